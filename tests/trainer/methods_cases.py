"""Every credit method, and settings of some, as run configurations over the recorded rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.methods_records import ATTEMPTS, BOXED, GROUP_SIZE, GROUPS, MODEL, TAGS

from megatron_credit.credit import METHODS
from megatron_credit.credit.method import CreditMethod
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.signals.attempts import AttemptSource
from megatron_credit.trainer.signals.probes import ProbeSource
from megatron_credit.trainer.signals.saliency import SaliencySource
from megatron_credit.trainer.signals.steps import StepSource
from megatron_credit.trainer.signals.teacher import TeacherSource

TP2, PP2, CP2 = {"tensor": 2}, {"pipeline": 2}, {"context": 2}
SP = {"sequence_parallel": True}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {"tp2": TP2, "tp2_sp": TP2 | SP, "pp2": PP2, "cp2": CP2, "dp2": {}},
}
PROBES = {
    "segmenter": {"min_tokens": 4},
    "opening": "<answer>",
    "closing": "</answer>",
}
PRM = {
    "kind": "callable",
    "function": "megatron_credit.tasks.chain_sum_steps:score_steps",
    "step_separator": ";",
}
SLOW = {"kind": "ema", "decay": 0.5}


@dataclass(frozen=True)
class Case:
    """What a run is configured to, beyond what the method needs anyway."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    layouts: tuple[str, ...] = ("one", "tp2", "tp2_sp", "pp2", "cp2", "dp2")

    @property
    def configured(self) -> CreditMethod:
        """The method."""
        return METHODS[self.method].configure(self.options)

    def needs(self, signals: Sequence[str]) -> bool:
        """The method may read one of these."""
        return not set(METHODS[self.method].needs).isdisjoint(signals)

    @property
    def record(self) -> str:
        """Which rollouts it is given."""
        if self.needs(AttemptSource.signals):
            return ATTEMPTS
        return BOXED if self.needs(SaliencySource.signals) else TAGS


SOME = ("one", "tp2", "pp2")
VARIANTS = {
    "cepo_wrapped": Case(
        "cepo",
        {"fallback": "rlsd"},
        {"evidence": {"template": "wrapped", "exclude_self": True}},
        SOME,
    ),
    "grail_last": Case(
        "grail", {"rollouts": "both"}, {"saliency": {"leaf": "last", "align": "token"}}, SOME
    ),
    "rredcot_fixed": Case(
        "rredcot",
        {"values": "enumerated", "credit": "mix"},
        {"probes": {"segmenter": {"kind": "fixed", "min_tokens": 6}}},
        SOME,
    ),
    "sc_grpo_slow": Case(
        "sc_grpo", {"scope": "all"}, {"evidence": {"teacher": SLOW, "baseline": "teacher"}}, SOME
    ),
    "verpo_advantage": Case(
        "verpo",
        {"mode": "advantage"},
        {"evidence": {"divergence": "reverse", "negatives": 2, "top_k": 64}},
        SOME,
    ),
    "verpo_current": Case(
        "verpo", {}, {"evidence": {"teacher": {"kind": "current"}, "contrast": "fixed"}}, SOME
    ),
    "verpo_frozen": Case(
        "verpo", {}, {"evidence": {"teacher": {"kind": "frozen"}, "baseline": "teacher"}}, SOME
    ),
    "verpo_in_two": Case("verpo", {}, {"trainer": {"updates_per_step": 2}}, SOME),
    "sc_grpo_in_two": Case("sc_grpo", {}, {"trainer": {"updates_per_step": 2}}, SOME),
}
OFF = {
    "cepo_off": Case("cepo", {"lam0": 0.0}, layouts=("one",)),
    "rlsd_off": Case("rlsd", {"lam0": 0.0}, layouts=("one",)),
    "rlcsd_off": Case("rlcsd", {"lam": 0.0}, layouts=("one",)),
    "verpo_off": Case(
        "verpo", {"base": "grpo"}, {"evidence": {"lambda_ref": 0.0, "lambda_evi": 0.0}}, ("one",)
    ),
    "grail_off": Case("grail", {"base": "grpo", "w_std": 0.0, "w_max": 1.0}, layouts=("one",)),
}
"""Methods whose weights are 0: GRPO."""
CASES = {name: Case(name) for name in METHODS} | VARIANTS | OFF


def config_of(case: Case, layout: dict[str, Any], directory: Path, *, bound: int) -> RunConfig:
    """The run of a case; `bound`: tokens of a micro-batch."""
    sections: dict[str, Any] = {
        "run": {"directory": directory / "run", "seed": 3},
        "task": {"answer_format": "boxed" if case.record == BOXED else "tags"},
        "policy": {"model": MODEL, "tokens_per_microbatch": bound},
        "parallel": layout | {"distributed_optimizer": False},
        "optimizer": {"kind": "sgd", "lr": 2.0, "clip_grad": 0},
        "sampling": {"max_new_tokens": 64},
        "credit": {"method": case.method, "options": case.options},
        "trainer": {
            "steps": 1,
            "prompts_per_step": len(GROUPS),
            "samples_per_prompt": GROUP_SIZE,
        },
    }
    if case.needs(AttemptSource.signals):
        sections["attempts"] = {"max_attempts": 2}
    if case.needs(StepSource.signals):
        sections["prm"] = PRM
    if case.needs(ProbeSource.signals):
        sections["probes"] = PROBES
    if case.needs(TeacherSource.signals):
        sections["evidence"] = {"teacher": {"kind": "frozen", "model": MODEL}}
    for name, keys in case.sections.items():
        sections[name] = sections.get(name, {}) | keys
    return RunConfig.model_validate(sections)
