"""Checks of credit on one rank."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from trainer.methods_cases import Case


def run(directory: Path) -> dict[str, Any]:
    """What one rank finds."""
    return {
        "packed": log_probs(directory, bound=512),
        "alone": log_probs(directory, bound=1),
        "weights": weights(directory),
        "divergences": divergences(directory),
    }


@dataclass(frozen=True)
class Echo:
    """Writes contexts that are the rollout's own prompt, whatever the evidence."""

    def write(self, rollout: Any, text: str, place: str) -> Any:
        """The plain context."""
        from megatron_credit.trainer.signals.contexts import Context

        return Context(rollout.prompt_ids, text, is_cut=False)


def start(case: Case, directory: Path, bound: int) -> tuple[Any, Any, Any]:
    """A setting, its rollouts with a verdict on each, and a stage that shows plain contexts."""
    from trainer.methods_worker import Setting

    from megatron_credit.credit import METHODS
    from megatron_credit.trainer.credit_stage import CreditStage
    from megatron_credit.trainer.signals.evidence import EvidenceSource

    setting = Setting(case, {}, directory, bound=bound)
    experience = replace(setting.experience, reward_R=setting.experience.reward_R.nan_to_num(0.0))
    source = EvidenceSource(
        METHODS[case.method].evidence,
        setting.config.evidence,
        setting.training,
        Echo(),
        keeps_views=False,
    )
    stage = CreditStage(
        credit=setting.config.credit,
        seed=3,
        num_parts=1,
        scorer=setting.training,
        sources=[source],
    )
    return setting, experience, stage


def log_probs(directory: Path, *, bound: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each rollout the teacher's log-probs behind the plain context, and the policy's."""
    setting, experience, stage = start(Case("opsd"), directory, bound)
    notes = stage.assign(1, experience).notes
    scored = setting.training.score(experience.sequences)
    setting.close()
    return [
        (torch.tensor(note.token_values["positive_logprob"]), one.logprob_T)
        for note, one in zip(notes, scored, strict=True)
    ]


def weights(directory: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each rollout the advantages of a method that weighs by evidence, and GRPO's."""
    from megatron_credit.trainer.config import CreditSection
    from megatron_credit.trainer.credit_stage import CreditStage

    setting, experience, stage = start(Case("rlsd", {"lam0": 1.0}), directory, 1)
    (part,) = stage.assign(1, experience).parts
    grpo = CreditStage(credit=CreditSection(), seed=3, num_parts=1, scorer=setting.training)
    (other,) = grpo.assign(1, experience).parts
    setting.close()
    pairs = zip(part.sequences, other.sequences, strict=True)
    return [(one.advantage_T, plain.advantage_T) for one, plain in pairs]


def divergences(directory: Path) -> list[torch.Tensor]:
    """KL(teacher || policy) of the rollouts that were read."""
    setting, experience, stage = start(Case("sc_grpo"), directory, 512)
    notes = stage.assign(1, experience).notes
    setting.close()
    rows = [note.token_values.get("teacher_kl", []) for note in notes]
    return [torch.tensor(row) for row in rows if row]
