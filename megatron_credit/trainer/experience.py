"""From graded rollouts to training sequences with an advantage for each token, on every rank."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_credit.batch.rollout import Rollout
from megatron_credit.batch.routing import decode_experts
from megatron_credit.batch.scored import Scored
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.credit import Group, assign
from megatron_credit.trainer.config import CreditSection


@dataclass(frozen=True, kw_only=True)
class Experience:
    """The rollouts of one step as every rank knows them; sequences of a group stand together."""

    sequences: list[TrainSequence]
    reward_R: Tensor
    """Reward of each sequence; NaN = no verdict."""
    group_size: int

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


def with_credit(rollout: Rollout, sequence: TrainSequence, scored: Scored) -> Rollout:
    """The rollout with what the step found of its tokens."""
    return replace(
        rollout,
        advantages=sequence.advantage_T.tolist(),
        token_values={
            "policy_logprob": scored.logprob_T.tolist(),
            "entropy": scored.entropy_T.tolist(),
        },
    )


def assign_credit(
    experience: Experience,
    credit: CreditSection,
    *,
    step: int,
    seed: int,
    policy_logprobs: list[Tensor] | None,
) -> tuple[list[TrainSequence], dict[str, float]]:
    """The sequences with their advantages, and the credit metrics averaged over the groups
    that have them.

    `policy_logprobs` holds log p of each sequence's response tokens under the current policy, where
    the method needs them. Pure: every rank computes the same.
    """
    sequences, found = [], dict[str, list[float]]()
    for place in experience.groups():
        members = experience.sequences[place]
        group = Group(
            reward_N=experience.reward_R[place],
            mask_NT=pad_rows([member.mask_T for member in members]),
            policy_logprob_NT=None if policy_logprobs is None else pad_rows(policy_logprobs[place]),
            step=step,
            seed=seed,
        )
        result = assign(credit.method, group, **credit.options)
        for member, advantage_T in zip(members, result.advantage_NT, strict=True):
            sequences.append(replace(member, advantage_T=advantage_T[: len(member.mask_T)]))
        for name, value in result.metrics.items():
            found.setdefault(name, []).append(value)
    # A method gives some metrics only for the groups that it had something to do for.
    metrics = {name: sum(values) / len(values) for name, values in found.items()}
    return sequences, metrics | advantage_metrics(sequences)


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
