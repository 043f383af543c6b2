"""How this rank's micro-batches are made: packed, dealt to the data ranks, put on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_credit.batch.packing import PackedBatch, Packer, Padding, TokenWeight
from megatron_credit.batch.plan import Bin
from megatron_credit.batch.sequence import TrainSequence, check_token_ids
from megatron_credit.batch.shared_views import SharedViewPacker
from megatron_credit.batch.view_packing import Exchange, PackedViews, ViewPacker
from megatron_credit.batch.views import Views, count_contexts
from megatron_credit.mcore.architecture import Architecture
from megatron_credit.mcore.config import ParallelConfig
from megatron_credit.mcore.forward import OutputHead
from megatron_credit.mcore.layer_spec import uses_transformer_engine
from megatron_credit.mcore.parallel import Ranks
from megatron_credit.mcore.routing import with_replay, without_replay


@dataclass(frozen=True, kw_only=True, eq=False)
class Batching:
    """What the micro-batches of a policy follow from, besides the sequences in them."""

    architecture: Architecture
    parallel: ParallelConfig
    ranks: Ranks
    tokens_per_microbatch: int
    router_replay: bool
    device: torch.device

    def head(self, temperature: float) -> OutputHead:
        """The output head at this temperature."""
        return OutputHead(
            vocab_size=self.architecture.vocab_size,
            temperature=temperature,
            tp_group=self.ranks.tp_group,
            sequence_parallel=self.parallel.sequence_parallel,
        )

    def packer(self, sequences: Sequence[TrainSequence], weights: Sequence[TokenWeight]) -> Packer:
        """Packs these sequences, whose tokens weigh so much; ValueError for unknown token ids."""
        for index, sequence in enumerate(sequences):
            check_token_ids(f"sequence {index}", sequence.token_ids_L, self.architecture.vocab_size)
        return Packer(self._routed(sequences), weights=weights, padding=self._padding())

    def read_batches(
        self, sequences: Sequence[TrainSequence]
    ) -> tuple[Packer, Sequence[PackedBatch]]:
        """Micro-batches for a pass that only scores, and how they are packed: where our attention
        can see it so, what the sequences begin with alike is there once."""
        if not self.shares:
            packer = self.packer(sequences, [0.0] * len(sequences))
            return packer, self.batches(packer)
        for index, sequence in enumerate(sequences):
            check_token_ids(f"sequence {index}", sequence.token_ids_L, self.architecture.vocab_size)
        alone = [Views(plain=one) for one in self._routed(sequences)]
        views = SharedViewPacker(alone, weights=[0.0] * len(alone), padding=self._padding())
        return views, self.scored_batches(views)

    def view_packer(self, views: Sequence[Views], weights: Sequence[TokenWeight]) -> ViewPacker:
        """Packs the views of each rollout into one micro-batch; where our attention can see it so,
        what they begin with alike is read once."""
        plain = self._routed([one.plain for one in views])
        # Made anew, views are checked token by token.
        views = [
            one if one.plain is routed else replace(one, plain=routed)
            for one, routed in zip(views, plain, strict=True)
        ]
        kind = SharedViewPacker if self.shares and count_contexts(views) > 1 else ViewPacker
        return kind(views, weights=weights, padding=self._padding())

    @property
    def shares(self) -> bool:
        """Whether what sequences begin with alike is read once where nothing is trained. Replayed
        experts are those of one sequence; context ranks hold pieces of each."""
        return self.ranks.cp_size == 1 and not self.router_replay and not uses_transformer_engine()

    def _routed(self, sequences: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
        """With what is known of their experts, if it is to be replayed."""
        if self.router_replay:
            return with_replay(sequences, self.architecture)
        return without_replay(sequences)

    def _padding(self) -> Padding:
        return Padding.for_layout(
            tensor=self.parallel.tensor,
            context=self.parallel.context,
            sequence_parallel=self.parallel.sequence_parallel,
        )

    def batches(self, packer: Packer) -> list[PackedBatch]:
        """This rank's micro-batches, on its device."""
        rank, size = self.ranks.cp_rank, self.ranks.cp_size
        bins = self._bins(packer)
        return [packer.share(bin_, rank=rank, size=size).on(self.device) for bin_ in bins]

    def scored_batches(self, packer: ViewPacker) -> list[PackedViews]:
        """The same of views, for a pass that only reads."""
        rank, size = self.ranks.cp_rank, self.ranks.cp_size
        bins = self._bins(packer)
        return [packer.scored(bin_, rank=rank, size=size).on(self.device) for bin_ in bins]

    def plain_batches(
        self, packer: ViewPacker, exchanges: Sequence[Exchange], *, trains: bool
    ) -> list[PackedViews]:
        """The plain ones of `batches_apart` from its exchanges; `trains`: for a backward pass."""
        share = packer.trained_apart if trains else packer.scored_apart
        rank, size = self.ranks.cp_rank, self.ranks.cp_size
        return [share(one, rank=rank, size=size).on(self.device) for one in exchanges]

    def batches_apart(self, packer: ViewPacker) -> list[tuple[PackedViews, PackedViews]]:
        """The same, each as one of plain views and one of the teachers' views."""
        rank, size = self.ranks.cp_rank, self.ranks.cp_size
        pairs = [packer.shares_apart(bin_, rank=rank, size=size) for bin_ in self._bins(packer)]
        return [(plain.on(self.device), teachers.on(self.device)) for plain, teachers in pairs]

    def _bins(self, packer: Packer) -> list[Bin]:
        """What this data rank's micro-batches hold."""
        interleaved = self.parallel.virtual_pipeline > 1
        plan = packer.plan(
            max_tokens=self.tokens_per_microbatch,
            num_ranks=self.ranks.dp_size,
            multiple_of=self.ranks.pp_size if interleaved else 1,
        )
        return plan[self.ranks.dp_rank]
