"""What is taught fits the sequences that it is taught to."""

from dataclasses import replace

import pytest
import torch
from batch.test_packing import make_sequence

from megatron_credit.batch.teaching import DistillationTeaching, EvidenceTeaching, TokenLoss
from megatron_credit.batch.views import Views


def bools(*values):
    return torch.tensor(values, dtype=torch.bool)


PLAIN = [
    make_sequence(2, 3, 10, mask_T=bools(1, 1, 0)),
    make_sequence(1, 2, 20),
]
VIEWS = [Views.behind(one, [torch.tensor([5, 6])]) for one in PLAIN]
MASK = [bools(1, 0, 0), bools(1, 1)]


def loss(name="evidence", coefficient=0.5, mask=MASK):
    return TokenLoss(name=name, coefficient=coefficient, mask=mask)


def evidence(*losses, controller=None):
    return EvidenceTeaching(
        views=VIEWS,
        losses=losses,
        controller=controller or [torch.zeros(3), torch.zeros(2)],
        contrast=("fixed", 1, None, 0),
    )


def test_a_loss_counts_the_tokens_of_the_whole_step():
    assert loss().count == 3
    assert loss(mask=[bools(), bools()]).count == 0


def test_what_is_active_has_a_coefficient_and_tokens():
    off = loss("reference", coefficient=0.0)
    nowhere = loss("reference", mask=[bools(0, 0, 0), bools(0, 0)])
    assert evidence(loss(), off).is_active
    assert evidence(loss(), off).added[0].name == "evidence"
    assert len(evidence(loss(), off).added) == 1
    assert not evidence(off).is_active
    assert not evidence(nowhere).is_active
    assert len(evidence(nowhere).added) == 1


def test_the_plain_views_become_the_sequences_of_the_step():
    credited = [replace(one, advantage_T=one.advantage_T * 2) for one in PLAIN]
    found = evidence(loss()).of(credited)
    assert [one.plain for one in found.views] == credited
    assert [one.teachers for one in found.views] == [one.teachers for one in VIEWS]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: evidence(loss("distillation")), "EvidenceTeaching has no loss 'distillation'"),
        (
            lambda: DistillationTeaching(views=VIEWS, losses=(loss("evidence"),)),
            r"DistillationTeaching has no loss 'evidence'; expected one of \['distillation'\]",
        ),
        (lambda: evidence(loss(), loss()), "losses has 'evidence' more than once"),
        (lambda: evidence(loss(mask=MASK[:1])), "mask of 'evidence' has tensors for 1 sequences"),
        (
            lambda: evidence(loss(mask=[bools(1, 0), bools(1, 1)])),
            r"mask of 'evidence', sequence 0: shape \(2,\)",
        ),
        (
            lambda: evidence(loss(mask=[torch.zeros(3), bools(1, 1)])),
            "sequence 0: .* torch.float32; expected .* torch.bool",
        ),
        (
            lambda: evidence(loss(mask=[bools(1, 0, 1), bools(1, 1)])),
            "sequence 0: 1 tokens are outside of mask_T",
        ),
        (
            lambda: evidence(loss(), controller=[torch.zeros(3), torch.zeros(2).double()]),
            "controller, sequence 1: .* torch.float64; expected .* torch.float32",
        ),
        (lambda: evidence(loss()).of(PLAIN[:1]), "views of 2 rollouts and the step 1 sequences"),
        (
            lambda: evidence(loss()).of([replace(PLAIN[0], mask_T=bools(0, 1, 1)), PLAIN[1]]),
            "sequence 0: 1 tokens are outside of mask_T",
        ),
        (lambda: evidence(loss()).of(PLAIN[::-1]), "expected at least one token of a prompt"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
