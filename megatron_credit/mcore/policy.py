"""The policy that is trained: scores sequences, takes optimizer steps, hands out its weights."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from credit_kernels.evidence.contrast import ContrastArgument
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_credit.batch.packing import PackedBatch
from megatron_credit.batch.scored import Scored, Update
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.views import Views, ViewScores, count_contexts
from megatron_credit.mcore import checkpoint
from megatron_credit.mcore.architecture import Architecture, check_parallel, read_architecture
from megatron_credit.mcore.batching import Batching
from megatron_credit.mcore.bridge import BridgeConverter, build_with_bridge
from megatron_credit.mcore.comparison import Comparison
from megatron_credit.mcore.config import OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_credit.mcore.convert import Converter, TensorMeta
from megatron_credit.mcore.forward import run_schedule, token_inputs
from megatron_credit.mcore.hf_files import open_checkpoint, refuse_unread
from megatron_credit.mcore.manifest import identity
from megatron_credit.mcore.model import DTYPES, build_model
from megatron_credit.mcore.optimizer import PolicyOptimizer, StepResult, distribute
from megatron_credit.mcore.parallel import Ranks
from megatron_credit.mcore.scoring import TokenScores
from megatron_credit.mcore.teacher_pass import read_teachers
from megatron_credit.mcore.totals import global_totals, named_metrics
from megatron_credit.mcore.training_state import TrainingState
from megatron_credit.mcore.views import StatisticsHead, check_views, score_views
from megatron_credit.objective.config import ObjectiveConfig
from megatron_credit.objective.loss import LossSums, policy_loss
from megatron_credit.objective.normalise import normaliser

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Policy:
    """A model under a parallel layout with its optimizer. Every method is called by every rank."""

    def __init__(
        self,
        architecture: Architecture,
        chunks: Sequence[GPTModel],
        *,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        ranks: Ranks,
        tokens_per_microbatch: int,
        router_replay: bool = False,
        converter: Converter | BridgeConverter | None = None,
    ) -> None:
        """`chunks` hold their weights already: the optimizer copies them. See `build`.

        `converter`: between `chunks` and Hugging Face tensors; None: one of ours.
        """
        self.architecture = architecture
        self.parallel = parallel
        self.ranks = ranks
        self.chunks = list(chunks)
        self.converter = converter or Converter(architecture, chunks, ranks)
        # Plain SGD has no state to split, and megatron's distributed optimizer refuses it.
        splits_state = parallel.distributed_optimizer and optimizer.kind == "adam"
        self.wrapped = distribute(self.chunks, distributed_optimizer=splits_state)
        self.optimizer = PolicyOptimizer(self.wrapped, optimizer)
        self.device = next(self.chunks[0].parameters()).device
        self.batching = Batching(
            architecture=architecture,
            parallel=parallel,
            ranks=ranks,
            tokens_per_microbatch=tokens_per_microbatch,
            router_replay=router_replay,
            device=self.device,
        )

    @classmethod
    def build(
        cls,
        *,
        policy: PolicyConfig,
        optimizer: OptimizerConfig,
        parallel: ParallelConfig,
        ranks: Ranks,
        seed: int,
    ) -> Self:
        """The policy of a Hugging Face model directory. `start_parallel` must have run.

        ValueError: the directory cannot be read, or its model cannot be laid out so.
        """
        architecture = read_architecture(policy.model, policy.converter)
        check_parallel(architecture, parallel, ranks.world_size)
        if policy.converter == "bridge":
            chunks, converter = build_with_bridge(architecture, policy, parallel)
        else:
            chunks = build_model(
                architecture,
                parallel,
                dtype=DTYPES[policy.dtype],
                seed=seed if policy.random_weights else None,
                recompute=policy.recompute,
            )
            converter = Converter(architecture, chunks, ranks)
            if not policy.random_weights:
                converter.load(open_checkpoint(policy.model))
                refuse_unread(policy.model, [meta.name for meta in converter.metadata()])
        return cls(
            architecture,
            chunks,
            converter=converter,
            parallel=parallel,
            optimizer=optimizer,
            ranks=ranks,
            tokens_per_microbatch=policy.tokens_per_microbatch,
            router_replay=policy.router_replay,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every (Hugging Face name, full tensor); see `Converter.export`. Run it to its end."""
        return self.converter.export()

    def weights_metadata(self) -> list[TensorMeta]:
        """What `weights` yields, in its order; no communication."""
        return self.converter.metadata()

    @torch.no_grad()
    def score(self, sequences: Sequence[TrainSequence], *, temperature: float) -> list[Scored]:
        """Log-prob and entropy of every response token, in input order, on every rank.

        The same list must be given on every rank. Bit for bit what `update` sees for this list:
        the same packing, the same forward pass.
        """
        packer = self.batching.packer(sequences, [0.0] * len(sequences))
        scores = TokenScores(packer, self.device)

        def collect(
            batch: PackedBatch, logprob_R: Tensor, entropy_R: Tensor
        ) -> tuple[Tensor, None]:
            scores.keep(batch, logprob_R, entropy_R)
            return logprob_R.sum(), None

        run_schedule(
            self.wrapped,
            self.batching.batches(packer),
            self.batching.head(temperature),
            collect,
            forward_only=True,
        )
        return scores.gather(sequences, self.ranks)

    @torch.no_grad()
    def score_views(
        self,
        views: Sequence[Views],
        *,
        temperature: float,
        contrast: ContrastArgument | None = None,
        divergence: str = "forward",
        top_k: int | None = None,
        teacher: Sequence[GPTModel] | None = None,
    ) -> list[ViewScores]:
        """Statistics of each response token behind several contexts, in input order on every rank.

        The same list must be given on every rank; see `credit_kernels.evidence_stats` for the
        numbers, whose contexts count from the plain one, 0. NaN is what needs an absent view; a
        mean of several negatives needs one of them. The views of a rollout share a micro-batch,
        which exceeds `tokens_per_microbatch` where they alone do. The plain log-probs are those of
        `score` but for the rounding of another packing: the same bits without teachers.

        `teacher`: this rank's chunks of the model that reads all contexts but the plain one, laid
        out as the policy is; None: the policy reads them too, all in one pass.
        """
        comparison = Comparison(count_contexts(views), contrast, divergence, top_k)
        comparison.check(temperature)
        check_views(views, self.architecture)
        packer = self.batching.view_packer(views, [0.0] * len(views))
        output, cp_group = self.batching.head(temperature), self.ranks.cp_group
        if teacher is None:
            batches = self.batching.batches(packer)
        else:
            batches = read_teachers(teacher, self.batching.batches_apart(packer), output, cp_group)
        head = StatisticsHead(output, comparison, cp_group)
        return score_views(self.wrapped, packer, batches, head, self.ranks)

    def update(
        self, sequences: Sequence[TrainSequence], *, objective: ObjectiveConfig, temperature: float
    ) -> Update:
        """One optimizer step over these sequences; what it says is the same on every rank.

        The same list must be given on every rank; each data rank takes its share. Without a trained
        token, or where the gradient norm is not finite, nothing changes and `optimizer/skipped`
        is 1.
        """
        norm = normaliser([sequence.num_trained for sequence in sequences], objective)
        packer = self.batching.packer(sequences, norm.weight_N)
        scores = TokenScores(packer, self.device)

        def loss(
            batch: PackedBatch, logprob_R: Tensor, entropy_R: Tensor
        ) -> tuple[Tensor, LossSums]:
            scores.keep(batch, logprob_R, entropy_R)
            inputs = token_inputs(batch, logprob_R, entropy_R)
            part = policy_loss(inputs, objective)
            # The one division; gradients and losses are plain sums from here on.
            return part.loss / norm.count, replace(part, loss=part.loss.detach())

        learning_rate = self.optimizer.learning_rate()
        has_tokens = any(sequence.num_trained for sequence in sequences)
        parts, result = [], StepResult(0.0, applied=False)
        scored = [Scored.unknown(sequence) for sequence in sequences]
        if has_tokens:
            self.optimizer.zero_grad()
            head, batches = self.batching.head(temperature), self.batching.batches(packer)
            parts = run_schedule(self.wrapped, batches, head, loss, forward_only=False)
            result = self.optimizer.step()
            scored = scores.gather(sequences, self.ranks)
        sums, maxima = global_totals(parts, objective, self.ranks, self.device)
        metrics = named_metrics(sums, maxima, count=norm.count)
        metrics |= {
            "grad_norm": result.grad_norm,
            "lr": learning_rate,
            "optimizer/skipped": float(not result.applied),
        }
        return Update(metrics=metrics, scored=scored)

    def save(self, directory: Path, *, data: str = "") -> None:
        """Writes everything that training goes on from; see `checkpoint.save`.

        `data` is the fingerprint of the questions, which a run that goes on must find again.
        """
        layout = self.parallel.model_dump()
        owner = self._identity() | {"data": data}
        checkpoint.save(directory, self._training_state(), owner, layout)

    def load(self, directory: Path) -> None:
        """Goes on from what `save` wrote, under this or another layout; see `checkpoint.load`."""
        checkpoint.load(directory, self._training_state(), self._identity())

    def _training_state(self) -> TrainingState:
        return TrainingState(self.chunks, self.optimizer)

    def _identity(self) -> dict[str, str]:
        """What a checkpoint must share with this policy."""
        return identity(
            self.architecture,
            dtype=NAMES[self.chunks[0].config.params_dtype],
            optimizer=self.optimizer.config.kind,
        )
