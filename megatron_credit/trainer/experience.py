"""Graded rollouts as training sequences, and their records with what was found of them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_credit.batch.rollout import Rollout
from megatron_credit.batch.routing import decode_experts
from megatron_credit.batch.scored import Scored
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.trainer.signals.step import Note


@dataclass(frozen=True, kw_only=True)
class Experience:
    """The rollouts of one step as every rank knows them; sequences of a group stand together."""

    sequences: list[TrainSequence]
    reward_R: Tensor
    """Reward of each sequence; NaN = no verdict."""
    group_size: int
    records: list[Rollout] | None = None
    """What was sampled, with its texts, on the rank that sampled; None elsewhere."""

    def groups(self) -> list[slice]:
        """Where the sequences of each group stand."""
        return [
            slice(start, start + self.group_size)
            for start in range(0, len(self.sequences), self.group_size)
        ]


def to_sequence(rollout: Rollout) -> TrainSequence:
    """The rollout as tensors, with no credit yet."""
    token_ids = rollout.prompt_ids + rollout.response_ids
    experts = rollout.routed_experts
    return TrainSequence(
        token_ids_L=torch.tensor(token_ids),
        num_prompt=len(rollout.prompt_ids),
        mask_T=torch.tensor(rollout.mask, dtype=torch.bool),
        rollout_logprob_T=torch.tensor(rollout.logprobs, dtype=torch.float32),
        advantage_T=torch.zeros(len(rollout.response_ids)),
        old_logprob_T=None,
        reference_logprob_T=None,
        routed_experts_LDK=decode_experts(experts, num_tokens=len(token_ids)) if experts else None,
    )


def with_credit(
    rollout: Rollout, sequence: TrainSequence, scored: Scored, note: Note
) -> Rollout:
    """The rollout with what the step found of its tokens."""
    return replace(
        rollout,
        advantages=sequence.advantage_T.tolist(),
        token_values={
            "policy_logprob": scored.logprob_T.tolist(),
            "entropy": scored.entropy_T.tolist(),
            **note.token_values,
        },
        spans=rollout.spans | note.spans,
        evidence=note.evidence,
    )


def pad_rows(rows: list[Tensor]) -> Tensor:
    """Rows of different lengths as one matrix, padded on the right with 0 or False."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def advantage_metrics(sequences: list[TrainSequence]) -> dict[str, float]:
    """Where the credit of a step went."""
    advantage_M = torch.cat([s.advantage_T[s.mask_T] for s in sequences])
    if not advantage_M.numel():
        return {"credit/zero_tokens": 1.0, "credit/abs_mean": 0.0, "credit/max": 0.0}
    return {
        "credit/zero_tokens": (advantage_M == 0).double().mean().item(),
        "credit/abs_mean": advantage_M.abs().double().mean().item(),
        "credit/max": advantage_M.abs().max().item(),
    }
