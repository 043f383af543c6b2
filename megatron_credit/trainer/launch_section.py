"""How a run is spread over nodes: the `[launch]` section of `launch slurm` and `launch local`;
`train` runs on one machine and leaves it alone."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from megatron_credit.settings import Settings


class ServiceSection(Settings):
    """A server of the user's beside the trainer: a process reward model, a judge."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,20}$")
    """Its name in logs; the trainer's processes find `http://host:port` of its first replica in the
    variable CREDIT_SERVICE_<NAME>, those of all in topology.json."""
    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments, started once on each of its nodes; `{port}` is replaced."""
    nodes: int = Field(1, ge=1)
    """Nodes, with one replica each."""
    max_restarts: int = Field(3, ge=0)
    """How often each replica is started again after it ended."""


class ContainerSection(Settings):
    """The container that roles run in; the supervisor itself runs outside of it."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """none: the nodes' own environment; pyxis: srun's --container-image; apptainer: exec."""
    image: str | None = None
    """Image: a file, or what pyxis and apptainer can pull."""
    mounts: tuple[str, ...] = ()
    """HOST:CONTAINER[:ro]; the run directory is always mounted, at its own path."""
    python: str = "python3"
    """The interpreter in the image that has megatron-credit."""

    @model_validator(mode="after")
    def _has_image(self) -> "ContainerSection":
        if (self.kind == "none") != (self.image is None):
            raise ValueError(
                f'kind = "{self.kind}" with image = {self.image!r}; an image needs '
                'kind = "pyxis" or "apptainer", and these need an image'
            )
        return self


class LaunchSection(Settings):
    """Nodes, roles and limits of a launched run."""

    layout: Literal["one", "jobs"] = "one"
    """one: one allocation whose hosts are split; jobs: a trainer job and an array of engine jobs,
    which come and go by themselves."""
    trainer_nodes: int = Field(1, ge=1)
    """Nodes that train."""
    rollout_nodes: int = Field(1, ge=0)
    """Nodes that sample; 0: the engines run beside the trainer on its one node."""
    spare_nodes: int = Field(0, ge=0)
    """Nodes that wait in the allocation to replace a bad one."""
    gpus_per_node: int = Field(8, ge=0)
    """GPUs of a node; 0: nodes without GPUs."""
    cpus_per_node: int = Field(16, ge=1)
    """CPU cores of a node that the run asks for."""
    ranks_per_node: int | None = Field(None, ge=1)
    """Trainer processes of a node; unset: one a GPU, one on a node without GPUs."""
    engines_per_node: int | None = Field(None, ge=1)
    """Engines of a rollout node; unset: as many as its GPUs hold, one without GPUs."""
    interface: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Network interface that engines listen on and collectives use, such as ib0; unset: that of
    the node's own name."""
    base_port: int = Field(10000, ge=1024, le=60000)
    """Lowest port of the job's ports; 16 ports a job follow from the job's number."""
    services: tuple[ServiceSection, ...] = ()
    """Servers of the user's."""
    container: ContainerSection = ContainerSection()
    """Where roles run."""
    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    qos: str | None = None
    """Slurm quality of service."""
    time: str = "24:00:00"
    """Time limit of the job: minutes, [days-]hours:minutes:seconds or days-hours."""
    constraint: str | None = None
    """Features that nodes must have."""
    exclude: tuple[str, ...] = ()
    """Nodes that must not be used."""
    reservation: str | None = None
    """Slurm reservation."""
    extra: dict[str, str] = Field(default_factory=dict)
    """Further sbatch options, without dashes; an empty value is an option without one."""
    prologue: tuple[str, ...] = ()
    """Lines of shell that the batch script runs first, such as `module load cuda`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables for all roles; no secrets, the run directory shows them."""
    secrets: Path | None = None
    """File of NAME=VALUE lines that only its owner may read; read when the job starts."""
    key_directory: Path | None = None
    """Where the engines' key of a run is kept, readable by its owner only and by all nodes; unset:
    ~/.local/state/megatron-credit."""
    warn_seconds: int = Field(300, ge=1)
    """Seconds before the time limit at which the run saves and queues again; longer than a step
    and a checkpoint take."""
    max_attempts: int = Field(50, ge=1)
    """Attempts of the whole run, time limits included."""
    max_no_progress: int = Field(2, ge=1)
    """Failed attempts in a row without a new checkpoint after which the run gives up."""
    max_restarts: int = Field(3, ge=0)
    """How often each engine is started again in an attempt."""
    hot_spares: bool = False
    """Keep the allocation when a rollout node is lost, and use a spare in its place."""
    preflight: tuple[str, ...] = ()
    """Program and arguments that must succeed on a node, besides our own checks."""
    preflight_seconds: int = Field(120, ge=1)
    """Time limit of the checks of a node."""

    @model_validator(mode="after")
    def _fits(self) -> "LaunchSection":
        if self.rollout_nodes == 0 and self.trainer_nodes > 1:
            raise ValueError(
                f"rollout_nodes = 0 puts the engines beside the trainer on its one node, but "
                f"trainer_nodes = {self.trainer_nodes}; use trainer_nodes = 1 or rollout nodes"
            )
        if self.rollout_nodes == 0 and self.gpus_per_node and self.ranks_per_node is None:
            raise ValueError(
                f"trainer and engines share the {self.gpus_per_node} GPUs of one node: say how "
                "many of them train by ranks_per_node"
            )
        if self.trainer_ranks_per_node > max(self.gpus_per_node, 1) and self.gpus_per_node:
            raise ValueError(
                f"ranks_per_node={self.ranks_per_node} is above gpus_per_node="
                f"{self.gpus_per_node}; a rank needs a GPU of its own"
            )
        names = [service.name for service in self.services]
        if len(set(names)) < len(names) or {"trainer", "rollout"} & set(names):
            raise ValueError(
                f"services are called {', '.join(names)}; each needs a name of its own, other than "
                "trainer and rollout"
            )
        return self

    @property
    def trainer_ranks_per_node(self) -> int:
        """Trainer processes of a node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def num_trainer_ranks(self) -> int:
        """The trainer's world size."""
        return self.trainer_nodes * self.trainer_ranks_per_node

    def engines_on_a_node(self, tensor_parallel: int) -> int:
        """Engines of a node that runs some."""
        if self.engines_per_node is not None:
            return self.engines_per_node
        shared = self.trainer_ranks_per_node if self.rollout_nodes == 0 else 0
        return max(1, (self.gpus_per_node - shared) // tensor_parallel)
