"""What every rank of the tests of the methods runs: one world, one layout after another."""

import hashlib
import math
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer.methods_cases import CASES, LAYOUTS, Case, config_of

from megatron_credit.mcore import cpu_mode

BOUND = 512
"""Tokens of a micro-batch."""


def run(rank: int, world_size: int, rendezvous: str, directory: str) -> None:
    """Runs the cases of every layout of this world size; rank 0 writes `<layout>.pt`."""
    torch.set_num_threads(1)
    cpu_mode.enable()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}-{world_size}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=300),
    )
    first = {} if world_size == 1 else torch.load(Path(directory, "one.pt"))
    for name, layout in LAYOUTS[world_size].items():
        results = {
            kind: run_case(case, layout, Path(directory), first.get(kind))
            for kind, case in CASES.items()
            if name in case.layouts
        }
        if rank == 0:
            torch.save(results, Path(directory, f"{name}.pt"))
    if world_size == 1:
        from trainer import methods_checks

        torch.save(methods_checks.run(Path(directory)), Path(directory, "checks.pt"))
    dist.destroy_process_group()


class Setting:
    """A policy that has taken a step, so that slow and frozen teachers differ from it, and the
    stage that gives credit with it."""

    def __init__(
        self, case: Case, layout: dict[str, Any], directory: Path, *, bound: int = BOUND
    ) -> None:
        from transformers import AutoTokenizer

        from megatron_credit.mcore.parallel import start_parallel
        from megatron_credit.mcore.policy import Policy
        from megatron_credit.rewards.prm.scorer import StepScorer
        from megatron_credit.trainer.check_credit import check_credit
        from megatron_credit.trainer.evidence_teacher import teacher_of
        from megatron_credit.trainer.run_directory import RunDirectory
        from megatron_credit.trainer.signals.build import build_credit_stage
        from megatron_credit.trainer.training_policy import TrainingPolicy

        self.config = config_of(case, layout, directory, bound=bound)
        check_credit(self.config)
        ranks = start_parallel(self.config.parallel, seed=1, timeout_s=300)
        self.policy = Policy.build(
            policy=self.config.policy,
            optimizer=self.config.optimizer,
            parallel=self.config.parallel,
            ranks=ranks,
            seed=1,
        )
        self.policy.add_teacher(teacher_of(self.config))
        self.training = TrainingPolicy(
            self.policy,
            config=self.config,
            directory=RunDirectory(self.config.run.directory),
            is_writer=False,
        )
        is_leader = ranks.rank == 0
        self.experience = experience_of(directory / f"{case.record}.jsonl", is_leader=is_leader)
        self.warm_up()
        asked = self.config.prm is not None and is_leader
        self.scorer = StepScorer(self.config.prm) if asked else None
        self.tokenizer = AutoTokenizer.from_pretrained(self.config.policy.model)
        self.stage = build_credit_stage(
            self.config,
            self.training,
            self.tokenizer,
            max_positions=self.policy.architecture.max_positions,
            scorer=self.scorer,
        )
        self.forwards = Forwards(self.policy)

    def warm_up(self) -> None:
        """One step on alternating advantages."""
        from megatron_credit.trainer.credit_stage import Part

        signed = [
            replace(one, advantage_T=torch.full((one.num_response,), (-1.0) ** number))
            for number, one in enumerate(self.experience.sequences)
        ]
        self.training.update(Part(sequences=signed))

    def close(self) -> None:
        """Ends the layout, not the world."""
        from megatron_credit.mcore.parallel import stop_parallel

        if self.scorer is not None:
            self.scorer.close()
        stop_parallel(keep_world=True)


class Forwards:
    """Counts the passes through the first chunk of the policy, and of its teacher, on this rank."""

    def __init__(self, policy: Any) -> None:
        self.count = {"policy": 0, "teacher": 0}
        self._watch("policy", policy.chunks)
        self._watch("teacher", policy.teacher or [])

    def _watch(self, name: str, chunks: Any) -> None:
        def add(*_: Any) -> None:
            self.count[name] += 1

        for chunk in chunks[:1]:
            chunk.register_forward_pre_hook(add)


def experience_of(path: Path, *, is_leader: bool) -> Any:
    """The recorded rollouts, whose texts the leader alone knows."""
    from trainer.methods_records import GROUP_SIZE

    from megatron_credit.batch.rollout_files import read_rollouts
    from megatron_credit.trainer.experience import Experience, to_sequence

    rollouts = list(read_rollouts(path))
    return Experience(
        sequences=[to_sequence(rollout) for rollout in rollouts],
        reward_R=torch.tensor([rollout.reward for rollout in rollouts]),
        group_size=GROUP_SIZE,
        records=rollouts if is_leader else None,
    )


def run_case(case: Case, layout: dict[str, Any], directory: Path, first: Any = None) -> dict:
    """Credit, metrics and gradients of a step; complete on rank 0.

    `first`: the result of one rank, whose credit the steps then take: some methods magnify what
    float32 loses in a log-prob, which gradients are not to be blamed for.
    """
    setting = Setting(case, layout, directory)
    credited = setting.stage.assign(1, setting.experience)
    passes = dict(setting.forwards.count)
    parts = [update(setting, part, at, first) for at, part in enumerate(credited.parts)]
    mine = {"metrics": credited.metrics, "parts": parts}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    setting.close()
    return {
        "metrics": credited.metrics,
        "passes": passes,
        "notes": [plain(note) for note in credited.notes],
        "parts": [joined([one["parts"][at] for one in gathered]) for at in range(len(parts))],
        "agree": all(credit_of(one) == credit_of(mine) for one in gathered),
    }


def update(setting: Setting, part: Any, at: int, first: Any) -> dict[str, Any]:
    """One optimizer step: the credit that there was, and this rank's gradients."""
    from mcore.parity_worker import gradients

    given = part if first is None else with_credit_of(part, first["parts"][at])
    updated = setting.training.update(given)
    return {
        "advantage": [one.advantage_T for one in part.sequences],
        "selected": [one.selected_T for one in part.sequences],
        "teaching": described(part.teaching),
        "metrics": updated.metrics,
        "gradients": gradients(setting.policy),
    }


def with_credit_of(part: Any, other: dict[str, Any]) -> Any:
    """The part with the advantages and the controller of another one."""
    pairs = zip(part.sequences, other["advantage"], strict=True)
    teaching = part.teaching
    if other["teaching"] and other["teaching"]["controller"]:
        teaching = replace(teaching, controller=other["teaching"]["controller"])
    sequences = [replace(one, advantage_T=advantage_T) for one, advantage_T in pairs]
    return replace(part, sequences=sequences, teaching=teaching)


def plain(note: Any) -> dict[str, Any]:
    """A note without types of ours; None where a span has no score."""
    spans = {
        name: [(*span[:2], None if math.isnan(span.score) else span.score) for span in own]
        for name, own in note.spans.items()
    }
    return vars(note) | {"spans": spans}


def described(teaching: Any) -> dict[str, Any]:
    """The losses of a teaching as plain values."""
    if teaching is None:
        return {}
    has_controller = "controller" in vars(teaching)
    return {
        "losses": {one.name: (one.coefficient, list(one.mask)) for one in teaching.losses},
        "controller": list(teaching.controller) if has_controller else [],
        "prompts": [
            [[] if view is None else view.token_ids_L[: view.num_prompt].tolist() for view in own]
            for own in (one.teachers for one in teaching.views)
        ],
    }


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The same step as all ranks have it, with the gradients of all."""
    from mcore.parity_worker import merge

    return parts[0] | {"gradients": merge([one["gradients"] for one in parts])}


def credit_of(result: dict[str, Any]) -> str:
    """A digest of everything that all ranks must know alike, bit for bit."""
    parts = [{key: one[key] for key in one if key != "gradients"} for one in result["parts"]]
    return hashlib.sha256(repr(untensored([result["metrics"], parts])).encode()).hexdigest()


def untensored(value: Any) -> Any:
    """The value with lists in place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: untensored(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [untensored(item) for item in value]
    return value
