"""What the policy learns beside the surrogate: which losses, over which tokens, how heavy."""

import pytest
import torch
from trainer.signals.source_cases import record

from megatron_credit.batch.teaching import DistillationTeaching, EvidenceTeaching
from megatron_credit.batch.views import Views
from megatron_credit.credit import METHODS, CreditResult
from megatron_credit.trainer.experience import to_sequence
from megatron_credit.trainer.signals.config import EvidenceSection
from megatron_credit.trainer.signals.evidence_passes import Slots
from megatron_credit.trainer.signals.lessons import ViewLessons

FREE_AND_TWO = Slots(free=1, positive=2, negatives=(3, 4))
NO_FREE = Slots(free=0, positive=1, negatives=(2,))


def views_of(num_contexts):
    """Two rollouts of three and two tokens; of the first a token is not trained."""
    rollouts = [record(0, 1.0, "123", mask=[True, False, True]), record(1, 0.0, "12")]
    made = []
    for one in map(to_sequence, rollouts):
        prompt = one.token_ids_L[: one.num_prompt]
        made.append(Views.behind(one, [prompt] * (num_contexts - 1)))
    return made


def result(**fields):
    return CreditResult(advantage_NT=torch.zeros(2, 3), metrics={}, **fields)


EVIDENCE = result(
    evidence_weight_NT=torch.tensor([[0.1, 0.0, 0.2], [0.3, 0.4, 0.0]]),
    evidence_mask_NT=torch.tensor([[True, False, True], [False, False, False]]),
)


def lessons(name, slots, section=None, **options):
    method = METHODS[name].configure(options)
    section = section or EvidenceSection()
    return ViewLessons(method.losses(), method.evidence, section, slots)


def masks(loss):
    return [mask_T.tolist() for mask_T in loss.mask]


def test_reference_and_evidence():
    section = EvidenceSection(lambda_ref=0.25, lambda_evi=3.0, divergence="reverse", top_k=9)
    teaching = lessons("verpo", FREE_AND_TWO, section).teaching(views_of(5), [EVIDENCE])
    assert isinstance(teaching, EvidenceTeaching)
    reference, evidence = teaching.losses
    assert (reference.name, reference.coefficient) == ("reference", 0.25)
    # Every trained token, with evidence or without.
    assert masks(reference) == [[True, False, True], [True, True]]
    assert (evidence.name, evidence.coefficient) == ("evidence", 3.0)
    assert masks(evidence) == [[True, False, True], [False, False]]
    expected = [torch.tensor([0.1, 0.0, 0.2]), torch.tensor([0.3, 0.4])]
    for found_T, expected_T in zip(teaching.controller, expected, strict=True):
        assert torch.equal(found_T, expected_T)
    assert teaching.contrast == ("fec", 2, (3, 4), 1)
    assert (teaching.divergence, teaching.top_k) == ("reverse", 9)


def test_a_policy_that_reads_itself_has_no_reference():
    teaching = lessons("verpo", NO_FREE).teaching(views_of(3), [EVIDENCE])
    assert [one.name for one in teaching.losses] == ["evidence"]


def test_weights_that_are_in_the_advantage_are_not_in_the_loss():
    teaching = lessons("verpo", FREE_AND_TWO, mode="advantage").teaching(views_of(5), [EVIDENCE])
    assert [one.name for one in teaching.losses] == ["reference"]
    assert lessons("verpo", NO_FREE, mode="advantage").teaching(views_of(3), [EVIDENCE]) is None


@pytest.mark.parametrize(
    ("name", "given", "top_k"),
    [("opsd", None, None), ("opsd", 7, 7), ("sdpo", None, 100), ("srpo", None, 100)],
)
def test_distillation(name, given, top_k):
    mask_NT = torch.tensor([[False, False, True], [True, True, False]])
    section = EvidenceSection(beta=0.25, top_k=given)
    slots = Slots(free=0, positive=1, negatives=())
    teaching = lessons(name, slots, section).teaching(
        views_of(2), [result(distillation_mask_NT=mask_NT)]
    )
    assert isinstance(teaching, DistillationTeaching)
    (loss,) = teaching.losses
    assert (loss.name, loss.coefficient) == ("distillation", 1.0)
    assert masks(loss) == [[False, False, True], [True, True]]
    assert (teaching.beta, teaching.top_k) == (0.25, top_k)
