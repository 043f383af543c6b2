"""Answer probes: how likely the model finds each answer, if a rollout stopped at each state.

The prompt and the response are read once for all states and answers of a rollout, and so is what
answers begin with alike, such as their opening: `batch.tree_packing`. What several rollouts ask, as
those of a group do behind their prompt, is asked once.

A tree needs an attention that takes it, which is ours. Transformer Engine's takes packed sequences
alone, so on its path every probe is a sequence of its own, with everything before it: about
states x answers times the work.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from credit_kernels import linear_logprob
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from megatron_credit.batch.packing import PackedBatch, Padding
from megatron_credit.batch.probes import ProbedRollout, Questions, check_probe, grow
from megatron_credit.batch.tree_packing import PackedTrees, TreePacker
from megatron_credit.mcore.forward import OutputHead, output_weight_of, run_schedule
from megatron_credit.mcore.layer_spec import uses_transformer_engine
from megatron_credit.mcore.policy import Policy
from megatron_credit.mcore.scoring import TokenScores, TokenValues

log = logging.getLogger(__name__)


@torch.no_grad()
def probe_answers(
    policy: Policy, rollouts: Sequence[ProbedRollout], *, temperature: float
) -> list[Tensor]:
    """Of each rollout [P, Y], float32 on the CPU: log p(answer y | state p, opening y) in nats, in
    input order, on every rank; empty where nothing is asked.

    The same list must be given on every rank. A rollout and its probes share a micro-batch, which
    exceeds `tokens_per_microbatch` where they alone do. The policy's own routers choose the
    experts, replayed or not: the engine never read the answers.

    ValueError for a probe longer than the model's positions and for unknown token ids.
    """
    architecture = policy.architecture
    for number, rollout in enumerate(rollouts):
        check_probe(
            f"rollout {number}",
            rollout,
            vocab_size=architecture.vocab_size,
            max_positions=architecture.max_positions,
        )
    questions = Questions.of(rollouts)
    if not questions.rollouts:
        found = []
    elif uses_transformer_engine():
        _tell_that_no_prefix_is_shared()
        found = plain_probes(policy, questions.rollouts, temperature=temperature)
    else:
        found = shared_probes(policy, questions.rollouts, temperature=temperature)
    return [
        torch.zeros(len(rollout.states), len(rollout.continuations))
        if rollout.is_empty
        else torch.stack([found[number][state] for number, state in places])
        for rollout, places in zip(rollouts, questions.places, strict=True)
    ]


@functools.cache
def _tell_that_no_prefix_is_shared() -> None:
    log.info(
        "answer probes are read one by one: Transformer Engine's attention cannot share a prefix"
    )


def shared_probes(
    policy: Policy, rollouts: Sequence[ProbedRollout], *, temperature: float
) -> list[Tensor]:
    """[P, Y] of rollouts in which something is asked, each of which is read once.

    Needs our own attention.
    """
    padding = Padding.for_layout(
        tensor=policy.parallel.tensor,
        context=policy.parallel.context,
        sequence_parallel=policy.parallel.sequence_parallel,
    )
    packer = TreePacker(rollouts, padding=padding)
    values = EdgeValues(1, packer.edges[-1], policy.device)
    batches = policy.batching.batches(packer)
    _run(policy, batches, EdgeHead(policy.batching.head(temperature)), values.keep)
    (logprob_E,) = values.gather(policy.ranks)
    sizes = [stop - start for start, stop in pairwise(packer.edges)]
    return [
        grow(rollout.continuations).answers_PY(part_E.view(len(rollout.states), -1))
        for rollout, part_E in zip(rollouts, logprob_E.split(sizes), strict=True)
    ]


def plain_probes(
    policy: Policy, rollouts: Sequence[ProbedRollout], *, temperature: float
) -> list[Tensor]:
    """The same, each different probe read as a sequence of its own."""
    distinct = [list(dict.fromkeys(rollout.continuations)) for rollout in rollouts]
    sequences = [
        rollout.plain(state, one)
        for rollout, continuations in zip(rollouts, distinct, strict=True)
        for state in rollout.states
        for one in continuations
    ]
    batching = replace(policy.batching, router_replay=False)
    packer = batching.packer(sequences, [0.0] * len(sequences))
    scores = TokenScores(packer, policy.device)
    _run(policy, batching.batches(packer), batching.head(temperature), scores.keep)
    scored = iter(scores.gather(sequences, policy.ranks))
    found = []
    for rollout, continuations in zip(rollouts, distinct, strict=True):
        column = [continuations.index(one) for one in rollout.continuations]
        rows = [[next(scored).logprob_T.sum() for _ in continuations] for _ in rollout.states]
        found.append(torch.stack([torch.stack(row)[column] for row in rows]))
    return found


def _run(
    policy: Policy,
    batches: Sequence[PackedBatch],
    head: Callable[..., tuple[Tensor, ...]],
    keep: Callable[..., None],
) -> None:
    """Forward; `keep` takes each micro-batch and what the head found of it."""

    def collect(batch: Any, *found: Tensor) -> tuple[Tensor, None]:
        keep(batch, *found)
        return found[0].new_zeros(()), None

    run_schedule(policy.wrapped, batches, head, collect, forward_only=True)


class EdgeValues(TokenValues):
    """Numbers of every scored edge."""

    def keep(self, batch: PackedTrees, found_SR: Tensor) -> None:
        """Takes what the last stage found of one micro-batch, of its edges in their order."""
        self._found_ST[:, batch.edge_slot_E] = found_SR


@dataclass(frozen=True, eq=False)
class EdgeHead:
    """found_1E: log-probs of the targets of a micro-batch's edges, float32."""

    output: OutputHead

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: ColumnParallelLinear,
        output_weight: Tensor | None,
        context: PackedTrees,
        **_unused: Any,
    ) -> tuple[Tensor]:
        """megatron's `output_processor` hook."""
        weight_VH = output_weight_of(output_layer, output_weight)
        hidden_EH = self.output.rows(self.output.gathered(hidden_states), context.row_E)
        logprob_E = linear_logprob(
            hidden_EH,
            weight_VH,
            context.edge_target_E,
            temperature=self.output.temperature,
            shard=self.output.shard(len(weight_VH)),
        )
        assert isinstance(logprob_E, Tensor)
        return (logprob_E[None],)
