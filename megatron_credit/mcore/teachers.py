"""Models that only read beside the policy: an average of its weights, its start, or another model.

Each is a second copy of a model on every rank, laid out as the policy is: as many bytes as the
policy's weights take there, neither gradients nor optimizer state. The average is kept in float32:
where the policy computes in bf16, that is 4 more bytes a parameter, without which steps smaller
than a bf16 rounding would never reach it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from credit_kernels.evidence.contrast import ContrastArgument
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn import Parameter

from megatron_credit.batch.scored import Scored
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.views import Views, ViewScores, count_contexts
from megatron_credit.mcore.architecture import Architecture, check_parallel, read_architecture
from megatron_credit.mcore.batching import Batching
from megatron_credit.mcore.comparison import Comparison
from megatron_credit.mcore.config import TeacherConfig
from megatron_credit.mcore.loading import load_model
from megatron_credit.mcore.model import build_model
from megatron_credit.mcore.scoring import score_sequences
from megatron_credit.mcore.views import StatisticsHead, check_views, score_views


class TeacherModel:
    """A model that never changes by itself. Every method is called by every rank."""

    def __init__(self, chunks: Sequence[GPTModel], batching: Batching) -> None:
        """`batching` is the policy's, but for the architecture."""
        self.chunks = list(chunks)
        # What the engine routed, it routed by the policy's experts.
        self.batching = replace(batching, router_replay=False)
        for chunk in self.chunks:
            chunk.eval()
            chunk.requires_grad_(False)

    @classmethod
    def copy_of(cls, chunks: Sequence[GPTModel], batching: Batching) -> Self:
        """A model with the weights that these chunks have now."""
        return cls(_copied(chunks, batching), batching)

    @classmethod
    def from_directory(cls, directory: Path, batching: Batching, *, dtype: torch.dtype) -> Self:
        """The model of a Hugging Face directory under the policy's layout.

        ValueError: the directory cannot be read, or its model cannot be laid out so.
        """
        architecture = read_architecture(directory)
        check_parallel(architecture, batching.parallel, batching.ranks.world_size)
        chunks, _ = load_model(
            directory, architecture, batching.parallel, batching.ranks, dtype=dtype
        )
        return cls(chunks, replace(batching, architecture=architecture))

    @property
    def architecture(self) -> Architecture:
        """What the model is."""
        return self.batching.architecture

    def score(self, sequences: Sequence[TrainSequence], *, temperature: float) -> list[Scored]:
        """Log-prob and entropy of every response token, in input order, on every rank.

        ValueError for a sequence that the model cannot read.
        """
        limit = self.architecture.max_positions
        for number, sequence in enumerate(sequences):
            if len(sequence.token_ids_L) > limit:
                raise ValueError(
                    f"sequence {number} has {len(sequence.token_ids_L)} tokens, the teacher "
                    f"{limit} positions; allow shorter responses or use another teacher"
                )
        return score_sequences(self.chunks, self.batching, sequences, temperature=temperature)

    @torch.no_grad()
    def score_views(
        self,
        views: Sequence[Views],
        *,
        temperature: float,
        contrast: ContrastArgument | None = None,
        divergence: str = "forward",
        top_k: int | None = None,
    ) -> list[ViewScores]:
        """What `Policy.score_views` finds, of this model: it reads the plain context too."""
        comparison = Comparison(count_contexts(views), contrast, divergence, top_k)
        comparison.check(temperature)
        check_views(views, self.architecture)
        packer = self.batching.view_packer(views, [0.0] * len(views))
        head = StatisticsHead(
            self.batching.head(temperature), comparison, self.batching.ranks.cp_group
        )
        batches = self.batching.scored_batches(packer)
        return score_views(self.chunks, packer, batches, head, self.batching.ranks)


@dataclass(frozen=True, eq=False)
class Average:
    """The moving average of one parameter."""

    source: Parameter
    """The policy's."""
    value: Tensor
    """float32."""
    copy: Parameter
    """The teacher's, which the value is rounded to; it may be the value itself."""


class AverageTeacher(TeacherModel):
    """A moving average of the policy's weights: t = decay t + (1 - decay) w after each step."""

    def __init__(self, chunks: Sequence[GPTModel], batching: Batching, *, decay: float) -> None:
        """`chunks` are the policy's, whose weights of now the average begins with."""
        super().__init__(_copied(chunks, batching), batching)
        self.decay = decay
        self.averages = [
            Average(source, copy.detach().float(), copy)
            for source, copy in _pairs(chunks, self.chunks)
        ]

    @torch.no_grad()
    def after_step(self) -> None:
        """Takes in the policy's weights after an optimizer step that was applied."""
        for one in self.averages:
            one.value.mul_(self.decay).add_(one.source.float(), alpha=1 - self.decay)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """The model computes with the values as they are now."""
        for one in self.averages:
            one.copy.copy_(one.value)


def make_teacher(
    config: TeacherConfig, chunks: Sequence[GPTModel], batching: Batching
) -> TeacherModel | None:
    """The teacher of a policy with these chunks; None where it is the policy itself.

    ValueError as for `TeacherModel.from_directory`.
    """
    if config.kind == "current":
        return None
    if config.kind == "ema":
        return AverageTeacher(chunks, batching, decay=config.decay)
    if config.model is None:
        return TeacherModel.copy_of(chunks, batching)
    dtype = chunks[0].config.params_dtype
    return TeacherModel.from_directory(config.model, batching, dtype=dtype)


def _copied(chunks: Sequence[GPTModel], batching: Batching) -> list[GPTModel]:
    """A second model with the weights of these chunks."""
    dtype = chunks[0].config.params_dtype
    copies = build_model(batching.architecture, batching.parallel, dtype=dtype, seed=None)
    with torch.no_grad():
        for source, copy in _pairs(chunks, copies):
            copy.copy_(source)
    return copies


def _pairs(
    chunks: Sequence[GPTModel], copies: Sequence[GPTModel]
) -> list[tuple[Parameter, Parameter]]:
    """Each parameter of the chunks with that of the copies."""
    return [
        pair
        for chunk, copy in zip(chunks, copies, strict=True)
        for pair in zip(chunk.parameters(), copy.parameters(), strict=True)
    ]
