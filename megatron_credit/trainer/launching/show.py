"""What a launch would do, for people: which node does what, which rank stands where."""

from pathlib import Path

from credit_launch.files import LaunchFiles
from credit_launch.plan import LEADER, ROLLOUT, Plan, Role
from credit_launch.times import in_words, seconds_of
from rich.console import Console
from rich.table import Table

from megatron_credit.mcore.rank_layout import rank_places
from megatron_credit.trainer.config import RunConfig

SHOWN_RANKS = 32
"""A longer table of ranks is cut."""


def show_launch(config: RunConfig, plan: Plan, console: Console) -> None:
    """Prints the layout of hosts and ranks, and the limits."""
    console.print("[bold]Nodes[/]")
    console.print(host_table(config, plan))
    console.print("\n[bold]Ranks[/] (trainer)")
    console.print(rank_table(config))
    limit = seconds_of(plan.slurm.time)
    console.print("\n[bold]Limits[/]")
    console.print(f"  time {'without limit' if limit is None else in_words(limit)}, saves and")
    console.print(f"  queues again {in_words(plan.limits.warn_seconds)} before its end, at most")
    console.print(f"  {plan.limits.max_attempts} attempts")


def host_table(config: RunConfig, plan: Plan) -> Table:
    """Which nodes do what, in the order of the allocation."""
    table = Table("nodes", "role", "GPUs a node", "what", box=None, pad_edge=True)
    first = 0
    for role in plan.roles:
        count = role.nodes * role.replicas
        apart = plan.layout == "jobs" and role.name == ROLLOUT
        if role.beside:
            where = "0" if count == 1 else f"0 .. {count - 1}"
        elif apart:
            where = f"{count} jobs"
        else:
            where = str(first) if count == 1 else f"{first} .. {first + count - 1}"
            first += count
        table.add_row(where, role.name, str(role.gpus), describe(config, role))
    if plan.spare_nodes:
        last = first + plan.spare_nodes - 1
        where = str(first) if plan.spare_nodes == 1 else f"{first} .. {last}"
        table.add_row(where, "spare", "", "hot" if plan.hot_spares else "replaces a bad node")
    return table


def describe(config: RunConfig, role: Role) -> str:
    """What a role's nodes run."""
    launch = config.launch
    if role.name == LEADER:
        return f"{launch.num_trainer_ranks} ranks, {launch.trainer_ranks_per_node} a node"
    if role.name == ROLLOUT:
        tensor = config.engine.tensor_parallel
        engines = launch.engines_on_a_node(tensor)
        return f"{engines * role.replicas} engines, {engines} a node, tensor parallel {tensor}"
    return " ".join(role.command)


def rank_table(config: RunConfig) -> Table:
    """Which rank is on which node and holds what."""
    has_experts = config.parallel.expert * config.parallel.expert_tensor > 1
    axes = ["pp", "dp", "cp", "tp", *(["ep", "etp"] if has_experts else [])]
    table = Table("rank", "node", *axes, box=None, pad_edge=True)
    places = rank_places(config.parallel, config.num_processes)
    for place in places[:SHOWN_RANKS]:
        node = place.rank // config.launch.trainer_ranks_per_node
        coordinates = vars(place)
        table.add_row(str(place.rank), str(node), *(str(coordinates[axis]) for axis in axes))
    if len(places) > SHOWN_RANKS:
        table.add_row("...", *[""] * (len(axes) + 1))
    return table


def show_next(run: Path, console: Console) -> None:
    """What to type from here on."""
    files = LaunchFiles(run)
    console.print(f"  files   {files.root}", markup=False)
    console.print(f"  status  megatron-credit status {run}", markup=False)
    console.print(f"  logs    megatron-credit logs {run} --follow", markup=False)
    console.print(f"  stop    megatron-credit stop {run}", markup=False)
