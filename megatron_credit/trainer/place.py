"""Where a process of a launched run stands, as the supervisor tells it."""

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_credit.trainer.worker_environment import LaunchVariables


@dataclass(frozen=True, kw_only=True)
class Place:
    """One task of one attempt on one node."""

    run: Path
    """The run directory."""
    attempt: Path
    """The directory of this attempt, which is the supervisor's and that of its tasks."""
    number: int
    """Of the attempt, from 1."""
    task: str
    """Name of the task: `trainer`, `rollout-0`, `judge-1`."""
    nodes: tuple[str, ...]
    """Names of the task's nodes; the first leads."""
    addresses: tuple[str, ...]
    """Their host names or addresses, as other nodes reach them."""
    node_rank: int
    """This node's place among them."""
    port: int
    """First of 16 ports that are the job's: +0 torchrun, +1 the watchdog's store, +2 and on the
    engines of a node."""
    engines: Path
    """Directory where engines say where they are."""
    is_local: bool
    """All nodes are this machine."""

    @property
    def leads(self) -> bool:
        """Whether this is the task's first node."""
        return self.node_rank == 0

    @property
    def address(self) -> str:
        """This node's address."""
        return self.addresses[self.node_rank]

    @property
    def master_address(self) -> str:
        """The first node's address."""
        return self.addresses[0]


def read_place(variables: LaunchVariables) -> Place:
    """The place in the published topology. ValueError where the topology has no such node."""
    topology = json.loads((variables.attempt / "topology.json").read_text())
    task = topology["tasks"][variables.task]
    nodes = tuple(node["name"] for node in task["nodes"])
    if variables.node not in nodes:
        raise ValueError(
            f"node {variables.node} is none of {', '.join(nodes)}, the nodes of {variables.task}"
        )
    return Place(
        run=Path(topology["run"]),
        attempt=variables.attempt,
        number=topology["attempt"],
        task=variables.task,
        nodes=nodes,
        addresses=tuple(node["address"] for node in task["nodes"]),
        node_rank=nodes.index(variables.node),
        port=topology["port"],
        engines=Path(topology["engines"]),
        is_local=topology["local"],
    )
