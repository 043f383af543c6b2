"""Weights of the tokens of a step: one mean over all of them, or two."""

import pytest
import torch
from batch.test_packing import make_sequence

from megatron_credit.batch.packing import Packer, Padding
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.weights import step_weights
from megatron_credit.objective.config import ObjectiveConfig
from megatron_credit.objective.loss import TokenInputs, policy_loss


def bools(*values):
    return torch.tensor(values, dtype=torch.bool)


def two_sequences(**selected):
    """Five trained tokens: advantages 1, 2, 3 of the first, 10 and 20 of the second."""
    first = make_sequence(2, 4, mask_T=bools(1, 1, 1, 0), advantage_T=torch.tensor([1.0, 2, 3, 9]))
    second = make_sequence(1, 2, 20, advantage_T=torch.tensor([10.0, 20.0]))
    fields = [vars(first), vars(second)]
    given = selected.get("selected", [None, None])
    return [TrainSequence(**one | {"selected_T": s}) for one, s in zip(fields, given, strict=True)]


def loss_of(sequences, config=None):
    """The surrogate of the step on policy: minus the mean advantage, or the sum of two means."""
    config = config or ObjectiveConfig(importance="none")
    weights = step_weights(sequences, config)
    batch = Packer(sequences, weights=weights.weights, padding=Padding(sequence=4)).pack([1, 0])
    logprob_R = torch.zeros(len(batch.row_R))
    inputs = TokenInputs(
        policy_logprob_T=logprob_R,
        old_logprob_T=logprob_R,
        rollout_logprob_T=logprob_R,
        advantage_T=batch.advantage_P[batch.row_R],
        weight_T=batch.weight_P[batch.row_R],
        mask_T=batch.mask_P[batch.row_R],
        reference_logprob_T=None,
        entropy_T=None,
    )
    return policy_loss(inputs, config).loss.item() / weights.count


def test_one_mean_over_all_tokens():
    assert loss_of(two_sequences()) == pytest.approx(-(1 + 2 + 3 + 10 + 20) / 5)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # The fourth token is not trained, selected or not.
        (bools(1, 0, 0, 1), bools(0, 1), (1 + 20) / 2 + (2 + 3 + 10) / 3),
        (bools(0, 0, 0, 1), bools(0, 1), 20 + (1 + 2 + 3 + 10) / 4),
        # A mean over nothing is 0.
        (bools(0, 0, 0, 1), bools(0, 0), (1 + 2 + 3 + 10 + 20) / 5),
        (bools(1, 1, 1, 0), bools(1, 1), (1 + 2 + 3 + 10 + 20) / 5),
    ],
)
def test_two_means_are_added(first, second, expected):
    assert loss_of(two_sequences(selected=[first, second])) == pytest.approx(-expected, rel=1e-6)


def test_nothing_selected_has_the_weights_of_one_mean():
    none = two_sequences(selected=[bools(0, 0, 0, 0), bools(0, 0)])
    split, whole = (step_weights(each, ObjectiveConfig()) for each in (none, two_sequences()))
    assert split.count == whole.count == 5
    for one_T, other_T in zip(split.weights, whole.weights, strict=True):
        assert torch.equal(one_T, other_T)


def test_no_tokens_at_all():
    empty = [make_sequence(2, 0, selected_T=bools())]
    weights = step_weights(empty, ObjectiveConfig())
    assert weights.count == 1 and weights.weights[0].shape == (0,)


@pytest.mark.parametrize("normalisation", ["sequence_mean", "constant"])
def test_two_means_are_means_over_tokens(normalisation):
    config = ObjectiveConfig(normalisation=normalisation, constant_length=8)
    sequences = two_sequences(selected=[bools(1, 0, 0, 0), bools(0, 1)])
    with pytest.raises(ValueError, match=f"normalisation='{normalisation}' .* set normalisation"):
        step_weights(sequences, config)


def test_some_sequences_cannot_be_split():
    with pytest.raises(ValueError, match="1 of 2 sequences have selected_T"):
        step_weights(two_sequences(selected=[bools(1, 0, 0, 0), None]), ObjectiveConfig())


def test_what_is_selected_has_a_value_for_each_token():
    with pytest.raises(ValueError, match=r"selected_T has shape \(3,\) .* \(2,\)"):
        make_sequence(1, 2, selected_T=bools(1, 0, 0))
    with pytest.raises(ValueError, match=r"selected_T .* torch.float32; expected .* torch.bool"):
        make_sequence(1, 2, selected_T=torch.zeros(2))
