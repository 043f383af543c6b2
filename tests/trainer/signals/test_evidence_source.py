"""Who is read behind which evidence, and how what the teachers say becomes signals."""

import math

import pytest
import torch
from trainer.signals.source_cases import ids_of, record, step, tokenizer

from megatron_credit.batch.views import ViewScores
from megatron_credit.credit import METHODS
from megatron_credit.credit.need import EvidenceNeed
from megatron_credit.trainer.signals.config import EvidenceSection
from megatron_credit.trainer.signals.contexts import ContextWriter
from megatron_credit.trainer.signals.evidence import EvidenceSource
from megatron_credit.trainer.signals.evidence_passes import Slots

TOKENIZER = tokenizer()


class Policy:
    """Its log-prob of a token is log(d / 10) behind a prompt that ends in the digit d."""

    def __init__(self, *, reads_itself=True):
        self.reads_itself = reads_itself
        self.prompts, self.views, self.contrast, self.kept = [], [], None, False

    def teacher_logprobs(self, sequences):
        found = []
        for one in sequences:
            prompt = TOKENIZER.decode(one.token_ids_L[: one.num_prompt])
            self.prompts.append(prompt)
            digit = int([c for c in prompt if c.isdigit()][-1])
            found.append(torch.full((one.num_response,), math.log(digit / 10)))
        return found

    def score_views(self, views, *, contrast, section, keep):
        self.views += views
        self.contrast, self.kept = contrast, keep
        return [self.scores(one, at) for at, one in enumerate(views)]

    def scores(self, one, at):
        """A number of its own for each rollout, context and statistic."""
        length, count = one.plain.num_response, one.num_contexts
        numbers_C1 = at + torch.arange(count)[:, None] / 10
        whole_CT = numbers_C1.expand(count, length)
        return ViewScores(
            logprob_CT=whole_CT + 100,
            entropy_CT=whole_CT + 200,
            kl_teacher_student_CT=whole_CT,
            kl_student_teacher_CT=whole_CT + 300,
            contrast_target_T=torch.full((length,), at + 0.1),
            contrast_mean_T=torch.full((length,), at + 0.2),
            contrast_cost_T=torch.full((length,), at + 0.3),
        )


def compute(name, *groups, policy=None, options=None, max_positions=512, **section):
    """What is found, and the policy that was asked."""
    policy = policy or Policy()
    method = METHODS[name].configure(options or {})
    source = EvidenceSource(
        method.evidence,
        EvidenceSection(**section),
        policy,
        ContextWriter(TOKENIZER, max_positions),
        keeps_views=bool(method.losses()),
    )
    return source.compute(step(name, *groups, **options or {})), policy


def group(*rewards, answer="7"):
    """Rollout k has k + 3 tokens, says and answers the digit k + 1."""
    return [
        record(k, reward, f"{k + 1}" * (k + 3), parsed=f"{k + 1}", answer=answer)
        for k, reward in enumerate(rewards)
    ]


def rows(signal_NT):
    """The first value of each row, in tenths where it is a log-prob."""
    return [value if math.isnan(value) else round(value, 5) for value in signal_NT[:, 0].tolist()]


def log(*tenths):
    return [round(math.log(value / 10), 5) for value in tenths]


# Log-probs of answers


def test_right_and_wrong_answer_behind_the_prompt():
    found, policy = compute("cepo", group(1.0, 0.0))
    fields = found.fields[0]
    assert set(fields) == {"positive_logprob_NT", "negative_logprob_NT"}
    assert rows(fields["positive_logprob_NT"]) == log(7, 7)
    assert rows(fields["negative_logprob_NT"]) == log(2, 2)
    # Each rollout behind its contexts, in order.
    bare = "<|user|>2 + 5 =<|assistant|> "
    assert policy.prompts == [bare + "7", bare + "2", bare + "7", bare + "2"]
    assert found.metrics == {
        "evidence/rollouts": 1.0,
        "evidence/cut": 0.0,
        "evidence/no_room": 0.0,
    }


def test_rows_nobody_reads_are_zero_and_those_without_evidence_unknown():
    found, policy = compute("cepo", group(1.0, None, 0.0), group(0.0, 0.0), group(1.0, 0.0))
    assert list(found.fields) == [0, 1, 2]
    fields = found.fields[0]
    assert rows(fields["positive_logprob_NT"]) == [*log(7), 0.0, *log(7)]
    assert fields["positive_logprob_NT"][1].tolist() == [0.0] * 5
    # What lies behind a row's tokens is unknown.
    assert fields["positive_logprob_NT"][0, 3:].isnan().all()
    # All wrong: no advantage to be weighed.
    assert not found.fields[1]["positive_logprob_NT"].any()
    # The first rollout comes again in the last group, and is read once with the same answer.
    assert len(policy.prompts) == 2 * 2 + 2 * 2 - 1
    assert found.metrics["evidence/rollouts"] == pytest.approx(4 / 7)


def test_a_side_that_is_missing_is_unknown():
    found, policy = compute("cepo", group(1.0, 0.0, answer=""))
    assert found.fields[0]["positive_logprob_NT"].isnan().all()
    assert rows(found.fields[0]["negative_logprob_NT"]) == log(2, 2)
    assert len(policy.prompts) == 2


def test_no_schedule_no_pass():
    found, policy = compute("cepo", group(1.0, 0.0), options={"lam0": 0.0})
    assert found.fields == {} and policy.prompts == []
    assert found.metrics["evidence/rollouts"] == 0.0


def test_evidence_that_has_no_room():
    """The first rollout leaves room for a digit, the second, one token longer, does not."""
    bare = len(ids_of("<|user|>2 + 5 =<|assistant|> 7"))
    found, policy = compute("cepo", group(1.0, 0.0), max_positions=bare + 3)
    positive = rows(found.fields[0]["positive_logprob_NT"])
    assert positive[0] == log(7)[0] and math.isnan(positive[1])
    assert len(policy.prompts) == 2
    assert found.metrics["evidence/no_room"] == 0.5


# Log-probs of siblings


def test_several_wrong_siblings_are_averaged_as_probabilities():
    found, policy = compute("rlcsd", group(1.0, 0.0, 0.0, 1.0, 0.0))
    fields = found.fields[0]
    # Digits 2, 3 and 5 are wrong, 1 and 4 right.
    assert rows(fields["negative_logprob_NT"]) == log(10 / 3, 4, 3.5, 10 / 3, 2.5)
    positive = rows(fields["positive_logprob_NT"])
    assert positive[0] == log(4)[0] and positive[3] == log(1)[0]
    assert all(value in log(1, 4) for value in positive)
    assert all(
        prompt.startswith("<|user|>2 + 5 =\nA solution of this problem:\n")
        and prompt.endswith("<|assistant|>")
        for prompt in policy.prompts
    )
    assert len(policy.prompts) == 5 + 2 * 3 + 3 * 2


def test_a_solution_is_read_for_every_rollout_with_a_verdict():
    rollouts = [
        record(k, reward, "77", metadata={"solution": "5"} if k else {})
        for k, reward in enumerate([0.0, 0.0, None])
    ]
    found, policy = compute("opsd", rollouts)
    values = rows(found.fields[0]["positive_logprob_NT"])
    assert math.isnan(values[0]) and values[1] == log(5)[0] and math.isnan(values[2])
    assert len(policy.prompts) == 1
    assert [one.teachers[0] is not None for one in found.views] == [False, True, False]


# Divergences and contrasts


def test_divergences_of_the_teacher_with_a_reference():
    solved, unsolved = group(1.0, 1.0, 0.0), group(0.0, 0.0, 0.0)
    found, policy = compute("sc_grpo", solved, group(1.0, 0.0, 0.0), unsolved)
    assert list(found.fields) == [0, 2]
    assert set(found.fields[0]) == {"teacher_kl_NT"}
    # Context 1 of rollouts 0, 1 and 2 of those that were read.
    assert rows(found.fields[0]["teacher_kl_NT"]) == [0.1, 1.1, 2.1]
    reference_N = found.fields[2]["reference_index_N"].tolist()
    (reference,) = set(reference_N) - {-1}
    kl = rows(found.fields[2]["teacher_kl_NT"])
    assert [math.isnan(value) for value in kl] == [row == reference for row in range(3)]
    # Rollout 2 of either group is the same behind the same reference, and is read once.
    assert len(policy.views) == 4 and policy.contrast is None and not policy.kept
    prompt = TOKENIZER.decode(policy.views[0].teachers[0].token_ids_L)
    assert prompt.startswith("<|system|>A solution of this problem:\n2222<|user|>2 + 5 =")


def test_contrasts_are_of_right_and_wrong_sibling_and_the_free_context():
    policy = Policy(reads_itself=False)
    found, _ = compute("verpo", group(1.0, 0.0, 0.0), group(0.0, 0.0), policy=policy)
    assert policy.contrast == ("fec", 2, (3,), 1)
    fields = found.fields[0]
    assert rows(fields["contrast_target_NT"])[1:] == [1.1, 2.1]
    assert rows(fields["contrast_mean_NT"])[1:] == [1.2, 2.2]
    assert rows(fields["contrast_cost_NT"])[1:] == [1.3, 2.3]
    # The only right one has no right sibling; the all-wrong group has no right rollout.
    assert math.isnan(rows(fields["contrast_target_NT"])[0])
    assert found.fields[1]["contrast_target_NT"].isnan().all()
    # A loss learns from all of them, and the free context is the plain one.
    assert policy.kept and len(policy.views) == len(found.views) == 5
    for one in found.views:
        assert torch.equal(one.teachers[0].token_ids_L, one.plain.token_ids_L)


@pytest.mark.parametrize(
    ("section", "reads_itself", "contrast"),
    [
        ({}, True, ("fec", 1, (2,), 0)),
        ({"contrast": "fixed"}, True, ("fixed", 1, None, 0)),
        ({"contrast": "pair", "negatives": 3}, False, ("pair", 2, (3, 4, 5), 1)),
    ],
)
def test_numbers_of_the_contexts(section, reads_itself, contrast):
    policy = Policy(reads_itself=reads_itself)
    compute("verpo", group(1.0, 1.0, 0.0), policy=policy, **section)
    assert policy.contrast == contrast


def test_slots_without_a_free_context():
    need = EvidenceNeed(positive="sibling", negative="sibling")
    assert Slots.of(need, num_negatives=2, reads_itself=False) == Slots(0, 1, (2, 3))


# Notes


def test_notes_tell_texts_and_numbers():
    found, _ = compute("cepo", group(1.0, 0.0))
    note = found.notes[0, 1]
    assert note.evidence == {"positive": "7", "negative": "2"}
    assert note.token_values["positive_logprob"] == pytest.approx([math.log(0.7)] * 4)
    assert note.token_values["negative_logprob"] == pytest.approx([math.log(0.2)] * 4)
    found, _ = compute("cepo", group(0.0, 0.0))
    assert found.notes == {}
