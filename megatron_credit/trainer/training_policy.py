"""The policy as the loop and the signals use it: objective, temperature and places filled in."""

from functools import partial

from torch import Tensor

from megatron_credit.batch.probes import ProbedRollout
from megatron_credit.batch.scored import Scored, Update
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.views import Views, ViewScores
from megatron_credit.mcore.policy import Policy
from megatron_credit.mcore.probes import probe_answers
from megatron_credit.mcore.saliency import saliency
from megatron_credit.mcore.teacher_pass import ViewReading
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.credit_stage import Part
from megatron_credit.trainer.run_directory import RunDirectory, checkpoint_step
from megatron_credit.trainer.signals.config import EvidenceSection, SaliencySection


class TrainingPolicy:
    """Implements the loop's `Policy` and the passes that signals ask for.

    Every method is called by every rank, with the same arguments.
    """

    def __init__(
        self, policy: Policy, *, config: RunConfig, directory: RunDirectory, is_writer: bool
    ) -> None:
        """The fingerprint of the questions stands in the run directory."""
        self._policy = policy
        self._config = config
        self._directory = directory
        self._is_writer = is_writer
        self._temperature = config.sampling.temperature
        self._reading: ViewReading | None = None

    @property
    def reads_itself(self) -> bool:
        """The teacher is the policy as it is now."""
        return self._policy.teacher_model is None

    def score(self, sequences: list[TrainSequence]) -> list[Scored]:
        """Log-prob and entropy of each response token at the sampling temperature."""
        # A ratio of several updates begins at exactly 1.
        exact = self._config.trainer.updates_per_step > 1
        return self._policy.score(sequences, temperature=self._temperature, exact=exact)

    def teacher_logprobs(self, sequences: list[TrainSequence]) -> list[Tensor]:
        """Log-prob of each response token under the teacher."""
        if not sequences:
            return []
        model = self._policy.teacher_model
        if model is None:
            scored = self._policy.score(sequences, temperature=self._temperature, exact=False)
        else:
            scored = model.score(sequences, temperature=self._temperature)
        return [one.logprob_T for one in scored]

    def score_views(
        self,
        views: list[Views],
        *,
        contrast: tuple | None,
        section: EvidenceSection,
        keep: bool,
    ) -> list[ViewScores]:
        """Statistics of the contexts, read as the section says.

        `keep`: a loss of the coming update reads the same views, so what the teachers made of them
        is kept for it.
        """
        if not views:
            return []
        statistics = {
            "temperature": self._temperature,
            "contrast": contrast,
            "divergence": section.divergence,
            "top_k": section.top_k if contrast is not None else None,
        }
        model = self._policy.teacher_model
        if section.baseline == "teacher" and model is not None:
            return model.score_views(views, **statistics)
        teacher = self._policy.teacher
        if keep and self._config.trainer.updates_per_step == 1:
            self._reading = self._policy.read_views(views, teacher=teacher)
            return self._policy.score_views(views, **statistics, reading=self._reading)
        return self._policy.score_views(views, **statistics, teacher=teacher)

    def saliency(
        self,
        sequences: list[TrainSequence],
        answer_parts: list[Tensor],
        section: SaliencySection,
    ) -> list[Tensor]:
        """Gradient-activation saliency of each response token."""
        if not sequences:
            return []
        return saliency(
            self._policy,
            sequences,
            answer_parts,
            temperature=self._temperature,
            leaf=section.leaf,
            align=section.align,
        )

    def probe_answers(self, rollouts: list[ProbedRollout]) -> list[Tensor]:
        """[P, Y] of each rollout: log p(answer | state)."""
        return probe_answers(self._policy, rollouts, temperature=self._temperature)

    def update(self, part: Part) -> Update:
        """One optimizer step on the run's objective."""
        reading, self._reading = self._reading, None
        return self._policy.update(
            part.sequences,
            objective=self._config.objective,
            temperature=self._temperature,
            teaching=part.teaching,
            teacher=self._policy.teacher if reading is None else None,
            reading=reading,
        )

    def save(self, step: int) -> None:
        """Begins to write the checkpoint after `step`; that of the last step is complete when this
        returns. Waits for the one before, and raises SaveError where it failed.

        When it is complete, those that are no longer kept are deleted.
        """
        section = self._config.checkpoint
        is_last = step == self._config.trainer.steps
        fingerprint = self._directory.read_data()["fingerprint"]
        self._policy.saver.save(
            self._directory.checkpoint(step),
            self._policy.training_state(),
            self._policy.owner(fingerprint),
            asynchronous=section.asynchronous and not is_last,
            after=partial(self._directory.completed, step, section) if self._is_writer else None,
        )

    def finish_save(self) -> None:
        """Returns when the newest checkpoint is complete; SaveError, on every rank, where it could
        not be written."""
        self._policy.saver.finish()

    def poll_save(self) -> bool:
        """Whether nothing is being written any more; SaveError as `finish_save`. Never waits for
        files."""
        return self._policy.saver.poll()

    def saved_step(self) -> int | None:
        """The step of the newest checkpoint that is known to be complete, of those saved here."""
        saved = self._policy.saver.saved
        return None if saved is None else checkpoint_step(saved)

    def save_metrics(self) -> dict[str, float]:
        """What the newest save took, once, after `poll_save` or `finish_save` found it complete."""
        seconds = self._policy.saver.take_seconds()
        if seconds is None:
            return {}
        metrics = {"timing/checkpoint_s": seconds.blocking}
        if seconds.writing is not None:
            metrics["timing/checkpoint_write_s"] = seconds.writing
        return metrics
