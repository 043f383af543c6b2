"""How many nodes train and how many sample, so that the trainer's ranks hold whole models."""

import math
from dataclasses import dataclass

from megatron_credit.mcore.config import ParallelConfig
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.launch_section import LaunchSection


@dataclass(frozen=True)
class Spread:
    """Nodes of the two roles, and the ranks of a training node."""

    trainer_nodes: int
    rollout_nodes: int
    ranks_per_node: int


def trainer_unit(parallel: ParallelConfig) -> int:
    """What the trainer's world must be a multiple of: whole replicas, and whole groups of experts
    in each stage."""
    experts = parallel.pipeline * parallel.expert * parallel.expert_tensor
    return math.lcm(parallel.tensor * parallel.pipeline * parallel.context, experts)


def spread_nodes(config: RunConfig, total: int | None) -> Spread:
    """The nodes of the configuration or, where given, `total` nodes split in its ratio; spares and
    services stay as they are. ValueError, with the nearest numbers that work, where none fits."""
    launch, unit = config.launch, trainer_unit(config.parallel)
    ranks = launch.trainer_ranks_per_node
    if total is None:
        check_world(launch.trainer_nodes, ranks, unit)
        return Spread(launch.trainer_nodes, launch.rollout_nodes, ranks)
    fixed = launch.spare_nodes + sum(service.nodes for service in launch.services)
    if total < fewest_nodes(config):
        raise ValueError(
            f"--nodes {total}: the trainer's world must be a multiple of {unit} ranks, the engines "
            f"need room too, and spares and services take {fixed}; use at least "
            f"{fewest_nodes(config)} nodes"
        )
    rest = total - fixed
    if config.engine.address is not None:
        check_world(rest, ranks, unit)
        return Spread(rest, launch.rollout_nodes, ranks)
    if rest == 1:
        return Spread(1, 0, shared_ranks(config))
    # A node that the engines shared may train with all of its GPUs now.
    ranks = launch.gpus_per_node if launch.rollout_nodes == 0 and launch.gpus_per_node else ranks
    step = unit // math.gcd(unit, ranks)
    trainer = rest * launch.trainer_nodes / (launch.trainer_nodes + max(launch.rollout_nodes, 1))
    multiple = min(max(round(trainer / step), 1), (rest - 1) // step)
    if multiple < 1:
        raise ValueError(
            f"--nodes {total}: {unit} trainer ranks are {step} nodes of {ranks}, and the engines "
            f"need one more; use at least {fixed + step + 1} nodes"
        )
    return Spread(multiple * step, rest - multiple * step, ranks)


def check_world(nodes: int, ranks: int, unit: int) -> None:
    """ValueError where the trainer's ranks hold no whole models."""
    if nodes * ranks % unit == 0:
        return
    step = unit // math.gcd(unit, ranks)
    below, above = nodes // step * step, (nodes // step + 1) * step
    fitting = f"{below} or {above}" if below else f"{above}"
    raise ValueError(
        f"launch.trainer_nodes={nodes} x {ranks} ranks = {nodes * ranks} trainer ranks, which is "
        f"no multiple of {unit} (whole replicas of the model and groups of experts); use {fitting} "
        "trainer nodes, or another launch.ranks_per_node"
    )


def fewest_nodes(config: RunConfig) -> int:
    """Nodes below which no split works; spares and services are among them."""
    launch, unit = config.launch, trainer_unit(config.parallel)
    fixed = launch.spare_nodes + sum(service.nodes for service in launch.services)
    step = unit // math.gcd(unit, launch.gpus_per_node or launch.trainer_ranks_per_node)
    engines = 0 if config.engine.address is not None else 1
    return fixed + (1 if engines and shared_ranks(config) else step + engines)


def shared_ranks(config: RunConfig) -> int:
    """Trainer ranks of one node that trains and samples; 0 where both do not fit on it."""
    launch, unit = config.launch, trainer_unit(config.parallel)
    asked = launch.trainer_ranks_per_node
    if launch.rollout_nodes == 0 and asked % unit == 0:
        return asked
    if not launch.gpus_per_node:
        return -(-asked // unit) * unit
    most = (launch.gpus_per_node - config.engine.tensor_parallel) // unit * unit
    half = launch.gpus_per_node // 2 // unit * unit
    return min(max(half, unit), most)


def with_spread(launch: LaunchSection, spread: Spread) -> LaunchSection:
    """The section with these nodes, checked anew."""
    numbers = {
        # Engines beside the trainer are in its job.
        "layout": launch.layout if spread.rollout_nodes else "one",
        "trainer_nodes": spread.trainer_nodes,
        "rollout_nodes": spread.rollout_nodes,
        "ranks_per_node": spread.ranks_per_node,
    }
    return LaunchSection.model_validate(launch.model_dump() | numbers)
