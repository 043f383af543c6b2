"""The sources of a run: those of the signals that its method may need."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_credit.credit import METHODS
from megatron_credit.rewards.prm.scorer import StepScorer
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.credit_stage import CreditStage, Scorer
from megatron_credit.trainer.signals.attempts import AttemptSource
from megatron_credit.trainer.signals.contexts import ContextWriter
from megatron_credit.trainer.signals.evidence import EvidenceSource
from megatron_credit.trainer.signals.evidence_passes import TeacherPasses
from megatron_credit.trainer.signals.lessons import ViewLessons
from megatron_credit.trainer.signals.probes import ProbePass, ProbeSource
from megatron_credit.trainer.signals.saliency import SaliencyPass, SaliencySource
from megatron_credit.trainer.signals.step import Source
from megatron_credit.trainer.signals.steps import StepSource
from megatron_credit.trainer.signals.teacher import TeacherSource

PEAKS = ("hybrid", "entropy")
"""Segmenters that cut where the policy's entropy is high."""


class Passes(Scorer, TeacherPasses, SaliencyPass, ProbePass, Protocol):
    """Every pass that a source may ask of the policy."""


@contextmanager
def open_credit_stage(
    config: RunConfig, passes: Passes, *, max_positions: int, has_records: bool
) -> Iterator[CreditStage]:
    """What turns rollouts into credit, with the processes that score steps where they are asked.

    `has_records`: of the rank that samples.
    """
    with ExitStack() as stack:
        scorer = None
        if config.prm is not None and has_records:
            scorer = stack.enter_context(StepScorer(config.prm))
        tokenizer = AutoTokenizer.from_pretrained(config.policy.model, local_files_only=True)
        yield build_credit_stage(
            config, passes, tokenizer, max_positions=max_positions, scorer=scorer
        )


def build_credit_stage(
    config: RunConfig,
    passes: Passes,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_positions: int,
    scorer: StepScorer | None,
) -> CreditStage:
    """What turns rollouts into credit. `scorer` exists on the rank that samples, if at all."""
    method = METHODS[config.credit.method].configure(config.credit.options)
    needs, need, losses = frozenset(method.needs), method.evidence, method.losses()
    sources, lessons = list[Source](), None
    if needs.intersection(AttemptSource.signals):
        sources.append(AttemptSource())
    if needs.intersection(StepSource.signals):
        assert config.prm is not None
        sources.append(StepSource(scorer, tokenizer, separator=config.prm.step_separator))
    if needs.intersection(SaliencySource.signals):
        sources.append(SaliencySource(config.saliency, passes, tokenizer))
    if needs.intersection(ProbeSource.signals):
        probes = ProbeSource(config.probes, passes, tokenizer, max_positions=max_positions)
        sources.append(probes)
    if needs.intersection(TeacherSource.signals):
        sources.append(TeacherSource(passes))
    if need is not None:
        evidence = EvidenceSource(
            need,
            config.evidence,
            passes,
            ContextWriter(tokenizer, max_positions),
            keeps_views=bool(losses),
        )
        sources.append(evidence)
        if losses:
            lessons = ViewLessons(losses, need, config.evidence, evidence.slots)
    reads_entropy = bool(needs.intersection(ProbeSource.signals))
    return CreditStage(
        credit=config.credit,
        seed=config.run.seed,
        num_parts=config.trainer.updates_per_step,
        scorer=passes,
        sources=sources,
        lessons=lessons,
        reads_entropy=reads_entropy and config.probes.segmenter.kind in PEAKS,
    )
