"""The forward pass of packed micro-batches to log-probs and entropies, in scoring and in training.

No tensor of tokens x vocabulary is ever made: the output layer is never called, its weight goes
with the hidden states into `credit_kernels.linear_logprob`.

Shape letters: P positions of a packed micro-batch on this context rank, R those that predict a
response token, H hidden, V this rank's rows of the output weight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from credit_kernels import VocabShard, linear_logprob
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_credit.batch.packing import PackedBatch
from megatron_credit.batch.sight import Sight
from megatron_credit.batch.tree_packing import PackedTrees
from megatron_credit.mcore.routing import RoutedPack
from megatron_credit.objective.loss import TokenInputs

Head = Callable[..., tuple[Tensor, ...]]
"""megatron's `output_processor`: hidden states of a micro-batch -> what is found of its rows."""
LossFunction = Callable[..., tuple[Tensor, Any]]
"""(micro-batch, *what the head found) -> (loss to differentiate, what to keep)."""


@dataclass(frozen=True, eq=False)
class OutputHead:
    """Turns the last stage's hidden states into log-probs of the targets."""

    vocab_size: int
    """Columns that count; the weight's rows beyond are padding."""
    temperature: float
    tp_group: dist.ProcessGroup
    sequence_parallel: bool

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: ColumnParallelLinear,
        output_weight: Tensor | None,
        context: PackedBatch,
        **_unused: Any,
    ) -> tuple[Tensor, Tensor]:
        """(logprob_R, entropy_R), float32, in nats; megatron's `output_processor` hook.

        Only rows with a target go through the head: prompts and padding cost nothing there.
        """
        hidden_RH = self.rows(self.gathered(hidden_states), context.row_R)
        return self.scores(hidden_RH, output_weight_of(output_layer, output_weight), context)

    def gathered(self, hidden_states: Tensor) -> Tensor:
        """[P, H]: the hidden states of this context rank, from all its tensor ranks."""
        if self.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self.tp_group)
        return hidden_states[:, 0]

    def rows(self, hidden_PH: Tensor, row_R: Tensor) -> Tensor:
        """[R, H]: chosen ones of them, whose gradient is summed over the tensor ranks."""
        hidden_RH = hidden_PH[row_R]
        if self.sequence_parallel:
            # Gathering them sees to it.
            return hidden_RH
        # Chosen first: the region's backward all-reduces only these rows.
        return copy_to_tensor_model_parallel_region(hidden_RH, group=self.tp_group)

    def scores(
        self, hidden_RH: Tensor, weight_VH: Tensor, batch: PackedBatch
    ) -> tuple[Tensor, Tensor]:
        """(logprob_R, entropy_R) of the rows of `batch`."""
        logprob_R, entropy_R = linear_logprob(
            hidden_RH,
            weight_VH,
            batch.target_R,
            temperature=self.temperature,
            shard=self.shard(len(weight_VH)),
            return_entropy=True,
        )
        return logprob_R, entropy_R

    def shard(self, num_rows: int) -> VocabShard:
        """The columns of a weight with this many rows on this rank."""
        size, rank = self.tp_group.size(), self.tp_group.rank()
        group = self.tp_group if size > 1 else None
        return VocabShard(rank * num_rows, (rank + 1) * num_rows, self.vocab_size, group)


def output_weight_of(layer: ColumnParallelLinear, tied_VH: Tensor | None) -> Tensor:
    """[V, H]: the layer's own weight, or the one that megatron hands over in its place."""
    return layer.weight if tied_VH is None else tied_VH


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[PackedBatch],
    head: Head,
    loss: LossFunction,
    *,
    forward_only: bool,
) -> list[Any]:
    """Sends the micro-batches through the pipeline, backward too unless `forward_only`.

    What `loss` kept of each micro-batch, in order, on the last stage; elsewhere an empty list.
    Gradients add up the losses as they are: megatron must not divide, which its
    `calculate_per_token_loss` sees to.
    """

    def step(source: Iterator[PackedBatch], chunk: torch.nn.Module) -> tuple[Any, Callable]:
        batch = next(source)
        output = chunk(
            batch.token_ids_P[None],
            batch.position_ids_P[None],
            None,
            packed_seq_params=packed_parameters(batch),
            output_processor=head,
            output_processor_context=batch,
        )
        return output, lambda outputs: keep(batch, outputs)

    def keep(batch: PackedBatch, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Any]:
        total, kept = loss(batch, *outputs)
        # The token count is what megatron would divide by; ours was divided by already.
        return total, torch.zeros((), dtype=torch.int, device=total.device), kept

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        # Stages tell each other the length of each micro-batch (variable_seq_lengths).
        seq_length=max(len(batch.token_ids_P) for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def packed_parameters(batch: PackedBatch) -> RoutedPack:
    """Megatron's description of where the sequences of a micro-batch lie."""
    return RoutedPack(
        qkv_format="thd",
        cu_seqlens_q=batch.boundaries_B1,
        cu_seqlens_kv=batch.boundaries_B1,
        max_seqlen_q=batch.max_length,
        max_seqlen_kv=batch.max_length,
        routed_experts_PDK=batch.routed_experts_PDK,
        sight=_sight(batch),
    )


def _sight(batch: PackedBatch) -> Sight | None:
    """None: in each sequence, what came before."""
    if isinstance(batch, PackedTrees):
        return batch.sight()
    return None if batch.shared is None else batch.shared.sight()


def token_inputs(batch: PackedBatch, logprob_R: Tensor, entropy_R: Tensor) -> TokenInputs:
    """What the objective needs of the rows that predict a response token.

    Where no older policy's log-probs are given, the policy of this very pass is the old one.
    """
    row_R = batch.row_R
    old_R = logprob_R.detach() if batch.old_logprob_P is None else batch.old_logprob_P[row_R]
    reference_P = batch.reference_logprob_P
    return TokenInputs(
        policy_logprob_T=logprob_R,
        old_logprob_T=old_R,
        rollout_logprob_T=batch.rollout_logprob_P[row_R],
        advantage_T=batch.advantage_P[row_R],
        weight_T=batch.weight_P[row_R],
        mask_T=batch.mask_P[row_R],
        reference_logprob_T=None if reference_P is None else reference_P[row_R],
        entropy_T=entropy_R,
    )
