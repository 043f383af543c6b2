"""`validate --parallel`: whether the run's layout computes what one rank computes."""

from rich.console import Console
from rich.table import Table

from megatron_credit.mcore.architecture import check_parallel, read_architecture
from megatron_credit.mcore.invariance import (
    Deviation,
    Invariance,
    Job,
    check_invariance,
    fewest_processes,
    is_small,
    make_twin,
)
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.prediction import TRAINER_PROCESS, Machine, size

SHOWN = 12
"""Gradients in the table."""


def check_layout(config: RunConfig, console: Console, *, full: bool) -> bool:
    """Prints what was compared with what, and the gradients with the largest errors.

    True: all within tolerance. ValueError: the model cannot be read or laid out, or this machine
    has too few GPUs. FailedProcess: a rank failed.
    """
    job, words = make_job(config, full=full)
    check_ranks_fit(job.num_processes, Machine.here())
    for line in words:
        console.print(line, markup=False)
    found = check_invariance(job)
    console.print(error_table(found))
    if not found.wrong:
        console.print("the layout computes what one rank computes")
        return True
    worst = max(found.wrong, key=lambda one: one.error)
    console.print(
        f"{len(found.wrong)} of {1 + len(found.gradients)} are wrong; the worst is {worst.name}, "
        f"off by {worst.error:.1e} of its largest value, where rounding explains "
        f"{found.tolerance:.1e}",
        markup=False,
    )
    return False


def check_ranks_fit(num_processes: int, machine: Machine) -> None:
    """ValueError where the ranks have no GPU each or, without GPUs, no room for their processes."""
    if machine.gpus and len(machine.gpus) < num_processes:
        raise ValueError(
            f"the check needs {num_processes} GPUs, one for each rank, this machine has "
            f"{len(machine.gpus)}; run it where the layout fits"
        )
    needed = num_processes * TRAINER_PROCESS
    if not machine.gpus and needed > machine.host:
        raise ValueError(
            f"the check starts {num_processes} processes, which need {size(needed)}, but only "
            f"{size(machine.host)} are free; run it on a larger machine"
        )


def make_job(config: RunConfig, *, full: bool) -> tuple[Job, list[str]]:
    """What to compute, and in words."""
    if config.policy.converter != "builtin":
        raise ValueError(
            f"policy.converter={config.policy.converter!r}: the check needs weights that are the "
            "same under every layout, which only the built-in families have"
        )
    architecture = read_architecture(config.policy.model, config.policy.converter)
    check_parallel(architecture, config.parallel, config.num_processes)
    weights = None if config.policy.random_weights else config.policy.model
    num_processes, subject = config.num_processes, f"the model in {config.policy.model}"
    if weights is None:
        subject += ", random weights"
    if not full and not is_small(architecture):
        weights, twin = None, make_twin(architecture, config.parallel)
        subject = (
            f"a twin of {config.policy.model} with random weights: {twin.num_layers} of "
            f"{architecture.num_layers} layers, hidden {twin.hidden_size} of "
            f"{architecture.hidden_size}, the same heads and experts (--full takes the model)"
        )
        architecture = twin
        num_processes = fewest_processes(twin, config.parallel, num_processes)
    axes = config.parallel.model_dump(exclude_defaults=True) or {"tensor": 1}
    shown = ", ".join(f"{name}={value}" for name, value in axes.items())
    words = [
        f"checking {subject}",
        f"layout of {num_processes} ranks ({shown}) against one rank, float32",
    ]
    if num_processes < config.num_processes:
        words.append(f"(of the run's {config.num_processes} ranks; the rest are more data ranks)")
    job = Job(
        architecture=architecture,
        weights=weights,
        parallel=config.parallel,
        num_processes=num_processes,
        # Its reference policy's log-probs are not what is checked here.
        objective=config.objective.model_copy(update={"kl_coef": 0.0}),
        temperature=config.sampling.temperature,
        recompute=config.policy.recompute,
    )
    return job, words


def error_table(found: Invariance) -> Table:
    """The loss and the worst gradients."""
    columns = ("largest relative error", "layout", "last bits", "")
    table = Table(*columns, box=None, pad_edge=False)
    for one in (found.loss, *found.gradients[:SHOWN]):
        table.add_row(one.name, *numbers(one), "wrong" if one in found.wrong else "")
    if len(found.gradients) > SHOWN:
        table.add_row(f"... and {len(found.gradients) - SHOWN} smaller ones", "", "", "")
    table.add_row("tolerance", f"{found.tolerance:.1e}", "", "")
    return table


def numbers(one: Deviation) -> tuple[str, str]:
    """Error of the layout, and of one rank whose weights differ in their last bits."""
    return f"{one.error:.1e}", f"{one.noise:.1e}"
