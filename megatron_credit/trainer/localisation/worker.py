"""One rank of the benchmark: `torchrun -m megatron_credit.trainer.localisation.worker PLAN`.

It gives credit to recorded rollouts, method after method, as a run would in its first step.
"""

import argparse
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megatron_credit.mcore import cpu_mode

cpu_mode.enable()  # before anything imports megatron

from megatron_credit.batch.rollout_files import write_rollouts  # noqa: E402
from megatron_credit.batch.scored import Scored  # noqa: E402
from megatron_credit.mcore.config import TeacherConfig  # noqa: E402
from megatron_credit.mcore.parallel import start_parallel, stop_parallel  # noqa: E402
from megatron_credit.mcore.policy import Policy  # noqa: E402
from megatron_credit.mcore.teachers import TeacherModel  # noqa: E402
from megatron_credit.rollouts.server import end_with_parent  # noqa: E402
from megatron_credit.trainer.config import RunConfig  # noqa: E402
from megatron_credit.trainer.evidence_teacher import teacher_of  # noqa: E402
from megatron_credit.trainer.experience import Experience, with_credit  # noqa: E402
from megatron_credit.trainer.localisation.plan import CreditPlan, Pass  # noqa: E402
from megatron_credit.trainer.localisation.record import read_record  # noqa: E402
from megatron_credit.trainer.rollout_phase import share  # noqa: E402
from megatron_credit.trainer.run_directory import RunDirectory  # noqa: E402
from megatron_credit.trainer.signals.build import open_credit_stage  # noqa: E402
from megatron_credit.trainer.training_policy import TrainingPolicy  # noqa: E402
from megatron_credit.trainer.worker import redirect_output  # noqa: E402
from megatron_credit.trainer.worker_environment import global_rank  # noqa: E402

FIRST_STEP = 1
"""Schedules stand at their start."""


@dataclass(frozen=True)
class Given:
    """A record as every rank knows it."""

    experience: Experience
    scored: list[Scored]
    """What the policy finds of each token."""


def main() -> None:
    """Entry point of a rank; raises, and so ends the job, on any failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    plan = CreditPlan.model_validate_json(parser.parse_args().plan.read_text())
    end_with_parent()
    redirect_output(plan.logs / f"trainer-{global_rank()}.log")
    config = plan.passes[0].config
    ranks = start_parallel(
        config.parallel, seed=config.run.seed, timeout_s=config.engine.request_timeout_s
    )
    policy = Policy.build(
        policy=config.policy,
        optimizer=config.optimizer,
        parallel=config.parallel,
        ranks=ranks,
        seed=config.run.seed,
    )
    teachers = load_teachers(policy, plan)
    given = {name: take(config, policy, path) for name, path in plan.records.items()}
    for one in plan.passes:
        policy.teacher_model = teachers[kept_as(teacher_of(one.config))]
        run_pass(one, policy, given[one.record], plan)
    stop_parallel()


def load_teachers(policy: Policy, plan: CreditPlan) -> dict[str, TeacherModel | None]:
    """The teachers of all passes; afterwards the policy has its weights."""
    found: dict[str, TeacherModel | None] = {}
    # The average comes last: a checkpoint is loaded into the teacher that is there.
    configs = [teacher_of(one.config) for one in plan.passes]
    for config in sorted(configs, key=lambda config: config.kind == "ema"):
        if kept_as(config) not in found:
            policy.add_teacher(config)
            found[kept_as(config)] = policy.teacher_model
    if plan.checkpoint is not None:
        average = plan.average
        if average is None:
            policy.teacher_model = None
        elif kept_as(average) not in found:
            policy.add_teacher(average)
        policy.load(plan.checkpoint)
    return found


def kept_as(config: TeacherConfig) -> str:
    """Equal for teachers that are the same model as long as nothing is trained."""
    return f"{config.kind} {config.model or ''}"


def take(config: RunConfig, policy: Policy, path: Path) -> Given:
    """The record, with its texts on rank 0."""
    groups = read_record(config, path).groups
    rollouts = list(chain.from_iterable(groups)) if policy.ranks.rank == 0 else None
    experience = share(rollouts, group_size=len(groups[0]))
    temperature = config.sampling.temperature
    return Given(experience, policy.score(experience.sequences, temperature=temperature))


def run_pass(one: Pass, policy: Policy, given: Given, plan: CreditPlan) -> None:
    """Asks the method for its credit and writes it beside the rollouts."""
    records, config = given.experience.records, one.config
    passes = TrainingPolicy(
        policy,
        config=config,
        directory=RunDirectory(plan.directory),
        is_writer=records is not None,
    )
    with open_credit_stage(
        config,
        passes,
        max_positions=policy.architecture.max_positions,
        has_records=records is not None,
    ) as stage:
        credited = stage.assign(FIRST_STEP, given.experience)
    if records is not None:
        sequences = [sequence for part in credited.parts for sequence in part.sequences]
        found = map(with_credit, records, sequences, given.scored, credited.notes)
        write_rollouts(plan.credited(one.name), found)


if __name__ == "__main__":
    main()
