"""CPU seconds and tokens that a trainer step of each configuration takes, on recorded rollouts.

    megatron-credit rollout configs/methods/grpo.toml --steps 1-3 --output RECORD
    OMP_NUM_THREADS=1 python benchmarks/cost_of_credit.py RECORD \\
        configs/methods/{grpo,sc_grpo,verpo}.toml [--repeats 5] [--unshared] [--out FILE]

All configurations train on the same rollouts, each from the start model, in one process, in turn.
CPU time depends less than seconds on what else runs on the machine; of the repeats of a step the
least counts. `--unshared`: each sequence is read by itself, as with Transformer Engine.
`signals` and `train` are the phases of the same names in a run. Tokens are the positions that
micro-batches had, in forward passes alone and in those that a backward pass followed.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}

from megatron_credit.mcore import cpu_mode

cpu_mode.enable()  # before anything imports megatron

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron_credit.mcore.batching import Batching  # noqa: E402
from megatron_credit.mcore.parallel import start_parallel, stop_parallel  # noqa: E402
from megatron_credit.mcore.policy import Policy  # noqa: E402
from megatron_credit.trainer.config import RunConfig  # noqa: E402
from megatron_credit.trainer.credit_stage import CreditStage  # noqa: E402
from megatron_credit.trainer.evidence_teacher import teacher_of  # noqa: E402
from megatron_credit.trainer.load_config import load_config  # noqa: E402
from megatron_credit.trainer.loaded_rollouts import LoadedRollouts  # noqa: E402
from megatron_credit.trainer.loaded_run import limits_of  # noqa: E402
from megatron_credit.trainer.recorded_steps import recorded_steps  # noqa: E402
from megatron_credit.trainer.run_directory import RunDirectory  # noqa: E402
from megatron_credit.trainer.signals.build import open_credit_stage  # noqa: E402
from megatron_credit.trainer.training_policy import TrainingPolicy  # noqa: E402

PHASES = ("signals", "train")


@dataclass
class Meter:
    """What the models of a policy were given to read since it was last emptied."""

    passes: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)

    def watch(self, policy: Policy) -> None:
        """Counts from here on what this policy and its teacher read."""
        teacher = policy.teacher or []
        for chunk in (*policy.chunks, *teacher):
            chunk.register_forward_pre_hook(self._count)

    def _count(self, _module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        kind = "trained" if torch.is_grad_enabled() else "read"
        self.passes[kind] += 1
        self.tokens[kind] += arguments[0].numel()

    def emptied(self) -> dict[str, float]:
        """What was counted; counts anew."""
        found = {
            f"{kind}_{name}": float(counted[kind])
            for name, counted in (("passes", self.passes), ("tokens", self.tokens))
            for kind in ("read", "trained")
        }
        self.passes.clear()
        self.tokens.clear()
        return found


def measure(config: RunConfig, record: Path) -> list[dict[str, float]]:
    """Of each step what its phases took and read, and the metrics of its update."""
    ranks = start_parallel(config.parallel, seed=config.run.seed, timeout_s=600)
    policy = Policy.build(
        policy=config.policy,
        optimizer=config.optimizer,
        parallel=config.parallel,
        ranks=ranks,
        seed=config.run.seed,
    )
    policy.add_teacher(teacher_of(config))
    meter = Meter()
    meter.watch(policy)
    limits = limits_of(config, policy.architecture)
    steps = recorded_steps(record, limits, first=1, last=config.trainer.steps)
    # Nothing is written: neither `keep` nor `save` is called.
    directory = RunDirectory(config.run.directory)
    rollouts = LoadedRollouts(config=config, directory=directory, steps=steps)
    training = TrainingPolicy(policy, config=config, directory=directory, is_writer=True)
    with open_credit_stage(
        config, training, max_positions=policy.architecture.max_positions, has_records=True
    ) as stage:
        found = [
            measured_step(step, rollouts, stage, training, meter)
            for step in range(1, config.trainer.steps + 1)
        ]
    stop_parallel(keep_world=True)
    return found


def measured_step(
    step: int,
    rollouts: LoadedRollouts,
    stage: CreditStage,
    policy: TrainingPolicy,
    meter: Meter,
) -> dict[str, float]:
    """CPU seconds of the phases, what was read, and the metrics."""
    experience, _ = rollouts.collect(step)
    meter.emptied()
    start = time.process_time()
    credited = stage.assign(step, experience)
    credited_at = time.process_time()
    updates = [policy.update(part) for part in credited.parts]
    end = time.process_time()
    seconds = {"signals_s": credited_at - start, "train_s": end - credited_at}
    losses = {name: updates[-1].metrics[name] for name in ("loss", "grad_norm")}
    return seconds | meter.emptied() | losses


def summary(repeats: list[list[dict[str, float]]]) -> dict[str, float]:
    """Means over the steps, of seconds those of the fastest repeat of each."""
    steps = [
        {name: min(one[name] for one in same) for name in same[0]}
        for same in zip(*repeats, strict=True)
    ]
    return {name: statistics.fmean(one[name] for one in steps) for name in steps[0]}


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """The results as Markdown; the first configuration is the baseline."""
    lines = [
        "| | CPU s of a step | signals | train | over the first | tokens read | in passes "
        "| tokens trained | in passes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    baseline = None
    for name, one in found.items():
        total = sum(one[f"{phase}_s"] for phase in PHASES)
        baseline = total if baseline is None else baseline
        lines.append(
            f"| {name} | {total:.3f} | {one['signals_s']:.3f} | {one['train_s']:.3f} "
            f"| {total / baseline - 1:+.0%} | {one['read_tokens']:.0f} | {one['read_passes']:.1f} "
            f"| {one['trained_tokens']:.0f} | {one['trained_passes']:.1f} |"
        )
    return lines


def main() -> None:
    """Prints the table, and writes everything that was measured to `--out`."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    if arguments.unshared:
        Batching.shares = property(lambda _: False)
    rendezvous = Path(tempfile.mkdtemp(), "rendezvous")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    steps = len(list(arguments.record.glob("step-*")))
    configs = {
        path.stem: load_config(path, [f"trainer.steps={steps}", *arguments.set])
        for path in arguments.configs
    }
    repeats: dict[str, list] = {name: [] for name in configs}
    for _ in range(arguments.repeats):
        for name, config in configs.items():
            repeats[name].append(measure(config, arguments.record))
    found = {name: summary(repeats[name]) for name in configs}
    print("\n".join(table(found)))
    if arguments.out is not None:
        machine = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, 1 thread",
            "torch": torch.__version__,
            "repeats": arguments.repeats,
            "steps": steps,
            "unshared": arguments.unshared,
        }
        report = machine | {"configurations": found}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path, help="directory of rollouts, a file for each step")
    parser.add_argument("configs", type=Path, nargs="+", help="the first one is the baseline")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--unshared", action="store_true", help="read each sequence by itself")
    parser.add_argument("--set", action="append", default=[], help="section.key=value of all")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
