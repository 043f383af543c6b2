"""The policy that is trained: scores sequences, takes optimizer steps, hands out its weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from credit_kernels.evidence.contrast import ContrastArgument
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_credit.batch.scored import Scored, Update
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.teaching import Teaching
from megatron_credit.batch.views import Views, ViewScores, count_contexts
from megatron_credit.batch.weights import step_weights
from megatron_credit.mcore import checkpoint
from megatron_credit.mcore.architecture import Architecture, check_parallel, read_architecture
from megatron_credit.mcore.batching import Batching
from megatron_credit.mcore.bridge import BridgeConverter, build_with_bridge
from megatron_credit.mcore.comparison import Comparison
from megatron_credit.mcore.config import (
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    TeacherConfig,
)
from megatron_credit.mcore.convert import Converter, TensorMeta
from megatron_credit.mcore.loading import load_model
from megatron_credit.mcore.manifest import identity
from megatron_credit.mcore.model import DTYPES
from megatron_credit.mcore.optimizer import PolicyOptimizer, StepResult, distribute
from megatron_credit.mcore.parallel import Ranks
from megatron_credit.mcore.saving import Saver
from megatron_credit.mcore.scoring import TokenScores, score_sequences
from megatron_credit.mcore.teacher_pass import ViewReading, check_teacher, read_teachers
from megatron_credit.mcore.teachers import AverageTeacher, TeacherModel, make_teacher
from megatron_credit.mcore.training_pass import TrainingPass, head_of
from megatron_credit.mcore.training_state import TrainingState
from megatron_credit.mcore.views import StatisticsHead, check_views, score_views
from megatron_credit.objective.config import ObjectiveConfig

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
        self.saver = Saver()
        self.teacher_model: TeacherModel | None = None
        """Another model that only reads; see `add_teacher`."""
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
            chunks, converter = load_model(
                policy.model,
                architecture,
                parallel,
                ranks,
                dtype=DTYPES[policy.dtype],
                recompute=policy.recompute,
                seed=seed if policy.random_weights else None,
            )
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
    def score(
        self, sequences: Sequence[TrainSequence], *, temperature: float, exact: bool = True
    ) -> list[Scored]:
        """Log-prob and entropy of every response token, in input order, on every rank.

        Every rank gives the same list. `exact`: bit for bit what `update` sees, unless it teaches.
        """
        return score_sequences(
            self.wrapped, self.batching, sequences, temperature=temperature, exact=exact
        )

    @property
    def teacher(self) -> Sequence[GPTModel] | None:
        """The chunks of the teacher, to read views with; None: the policy is its own teacher."""
        return None if self.teacher_model is None else self.teacher_model.chunks

    def add_teacher(self, config: TeacherConfig) -> None:
        """From here on there is the teacher of this configuration; see `teachers.make_teacher`.

        Before `load`: copies begin with the weights that the policy has now.
        """
        assert self.optimizer.num_steps == 0
        if config.kind != "current" and isinstance(self.converter, BridgeConverter):
            raise ValueError(
                f'a teacher of kind = "{config.kind}" is a second model, which is not built with '
                'policy.converter = "bridge"; use kind = "current"'
            )
        self.teacher_model = make_teacher(config, self.chunks, self.batching)

    def read_views(
        self, views: Sequence[Views], *, teacher: Sequence[GPTModel] | None = None
    ) -> ViewReading:
        """What the teachers make of these views, for `score_views` and `update` of the same list.

        The same list must be given on every rank. `teacher`: chunks that read all contexts but the
        plain one, such as `self.teacher`, laid out as the policy is; None: the policy reads them.
        What is kept takes memory, see `ViewReading`. ValueError: the teacher's hidden states or
        vocabulary are of another size.
        """
        check_views(views, self.architecture)
        # Unwrapped: in bf16 megatron's wrapper would hand out float32 copies.
        chunks = self.chunks if teacher is None else teacher
        check_teacher(chunks, self.chunks)
        pairs = self.batching.batches_apart(self.batching.view_packer(views, [0.0] * len(views)))
        plain = read_teachers(chunks, pairs, self.batching.head(1.0), self.ranks.cp_group)
        return ViewReading.of(views, plain, self.optimizer.num_steps)

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
        reading: ViewReading | None = None,
    ) -> list[ViewScores]:
        """Statistics of each response token behind several contexts, in input order on every rank.

        The same list must be given on every rank; see `credit_kernels.evidence_stats` for the
        numbers, whose contexts count from the plain one, 0. NaN is what needs an absent view; a
        mean of several negatives needs one of them. The views of a rollout share a micro-batch,
        which exceeds `tokens_per_microbatch` where they alone do. The plain log-probs are those of
        `score` but for the rounding of another packing: the same bits without teachers.

        `teacher`: this rank's chunks of the model that reads all contexts but the plain one, laid
        out as the policy is; None: the policy reads them too, all in one pass. `reading`: what
        `read_views` found of these views, which says more than `teacher` and saves a pass.
        """
        comparison = Comparison(count_contexts(views), contrast, divergence, top_k)
        comparison.check(temperature)
        check_views(views, self.architecture)
        packer = self.batching.view_packer(views, [0.0] * len(views))
        if reading is None and teacher is None:
            batches = self.batching.scored_batches(packer)
        else:
            reading = reading or self.read_views(views, teacher=teacher)
            batches = reading.attached(packer, self.batching, self.optimizer.num_steps)
        head = StatisticsHead(self.batching.head(temperature), comparison, self.ranks.cp_group)
        return score_views(self.wrapped, packer, batches, head, self.ranks)

    def update(
        self,
        sequences: Sequence[TrainSequence],
        *,
        objective: ObjectiveConfig,
        temperature: float,
        teaching: Teaching | None = None,
        teacher: Sequence[GPTModel] | None = None,
        reading: ViewReading | None = None,
    ) -> Update:
        """One optimizer step over these sequences; what it says is the same on every rank.

        The same list must be given on every rank; each data rank takes its share. Without a trained
        token, or where the gradient norm is not finite, nothing changes and `optimizer/skipped`
        is 1.

        `teaching`: losses between the sequences and their views, added to the surrogate, each its
        coefficient times its mean; where none of them is active the step is, bit for bit, the one
        without them. `teacher` reads the views, unless `reading` is what `read_views` found of
        them; None: the policy as it is. The teachers' views never go through the backward pass.
        """
        norm = step_weights(sequences, objective)
        if teaching is not None:
            teaching = teaching.of(sequences)
        if teaching is None or not teaching.is_active:
            packer = self.batching.packer(sequences, norm.weights)
            head, batches = self.batching.head(temperature), self.batching.batches(packer)
        else:
            head = head_of(teaching, self.batching.head(temperature), self.ranks, self.device)
            packer = self.batching.view_packer(teaching.views, norm.weights)
            reading = reading or self.read_views(teaching.views, teacher=teacher)
            batches = reading.attached(packer, self.batching, self.optimizer.num_steps, trains=True)
        training = TrainingPass(packer, batches, head, objective, norm.count, teaching)
        scores = TokenScores(packer, self.device)
        learning_rate = self.optimizer.learning_rate()
        parts, result = [], StepResult(0.0, applied=False)
        scored = [Scored.unknown(sequence) for sequence in sequences]
        if any(sequence.num_trained for sequence in sequences):
            self.optimizer.zero_grad()
            parts = training.run(self.wrapped, scores, self.device)
            result = self.optimizer.step()
            scored = scores.gather(sequences, self.ranks)
        if result.applied and self._average is not None:
            self._average.after_step()
        metrics = training.metrics(parts, self.ranks, self.device) | {
            "grad_norm": result.grad_norm,
            "lr": learning_rate,
            "optimizer/skipped": float(not result.applied),
        }
        return Update(metrics=metrics, scored=scored)

    def save(self, directory: Path, *, data: str = "") -> None:
        """Writes everything that training goes on from; see `Saver.save`, and `owner`."""
        self.saver.save(directory, self.training_state(), self.owner(data))

    def load(self, directory: Path) -> None:
        """Goes on from what `save` wrote, under any layout; see `checkpoint.load`. The average of
        an ema teacher comes with it; a frozen one stays as `add_teacher` made it."""
        checkpoint.load(directory, self.training_state(), self._identity())

    def training_state(self) -> TrainingState:
        """What `saver` writes."""
        return TrainingState(self.chunks, self.optimizer, self._average)

    def owner(self, data: str) -> dict[str, dict]:
        """Whose it is; `data`: the fingerprint of the questions, which a run must find again."""
        found = self._identity() | {"data": data}
        return {"identity": found, "layout": self.parallel.model_dump()}

    def _identity(self) -> dict[str, str]:
        """What a checkpoint must share with this policy."""
        return identity(
            self.architecture,
            dtype=NAMES[self.chunks[0].config.params_dtype],
            optimizer=self.optimizer.config.kind,
            teacher="none" if self._average is None else "ema",
        )

    @property
    def _average(self) -> AverageTeacher | None:
        """The teacher that follows the policy, which checkpoints hold."""
        model = self.teacher_model
        return model if isinstance(model, AverageTeacher) else None
