"""The engines on one node of a launched run: `python -m megatron_credit.trainer.engine_node`.

Starts as many as the node has room for, says in the registry where those that serve are, and starts
an engine again when it ended, or when the trainer gave it up.
"""

import logging
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.registry import Entry, Registry, engine_log
from megatron_credit.rollouts.server import (
    EngineServer,
    Seat,
    end_with_parent,
    is_free,
    is_healthy,
    one_interface,
)
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.launched_attempt import Failure, LaunchedAttempt
from megatron_credit.trainer.place import Place, read_place
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.worker_environment import (
    engine_key,
    launch_variables,
    visible_devices,
)

log = logging.getLogger(__name__)
POLL_S = 0.2
FIRST_PORT = 2
"""The engines' first port among the job's; those before are the trainer's."""


@dataclass
class Post:
    """The place of one engine on the node, whichever start of it is there."""

    name: str
    seat: Seat
    log: Path
    restarts_left: int
    server: EngineServer | None = None
    """None: it is not started again."""
    incarnation: str = ""
    since: float = 0.0
    entry: Entry | None = field(default=None)
    """What the registry says of it; None while it loads."""


class EngineNode:
    """Keeps the engines of a node running until it is asked to stop."""

    def __init__(
        self, config: RunConfig, posts: Sequence[Post], registry: Registry, *, node: str
    ) -> None:
        self.reason = ""
        """Why the last engine that ended was lost."""
        self._config = config
        self._posts = posts
        self._registry = registry
        self._node = node
        self._is_stopping = False

    def stop(self) -> None:
        """Makes `run` return."""
        self._is_stopping = True

    def run(self) -> bool:
        """Watches the engines; False when none is left and none may be started any more."""
        try:
            for post in self._posts:
                self._start(post)
            while not self._is_stopping:
                posts = [post for post in self._posts if post.server is not None]
                if not posts:
                    return False
                for post in posts:
                    self._watch(post)
                time.sleep(POLL_S)
            return True
        finally:
            self._end_all()

    def _start(self, post: Post) -> None:
        post.incarnation, post.since = secrets.token_hex(8), time.monotonic()
        post.server = EngineServer.start(
            self._config.policy.model,
            self._config.engine,
            log_path=post.log,
            seed=self._config.run.seed,
            routed_experts=self._config.policy.router_replay,
            seat=with_free_port(post.seat),
        )
        log.info("%s starts at %s (process %d)", post.name, post.server.address, post.server.pid)

    def _watch(self, post: Post) -> None:
        """Registers the engine when it serves; starts it again where it is lost."""
        server = post.server
        assert server is not None
        try:
            server.check_alive()
            self._require_wanted(post, server)
        except EngineError as error:
            self._replace(post, error)
            return
        if post.entry is None and is_healthy(server.address):
            post.entry = Entry(
                name=post.name,
                address=server.address,
                incarnation=post.incarnation,
                node=self._node,
                pid=server.pid,
            )
            self._registry.publish(post.entry)
            log.info("%s serves after %.0f s", post.name, time.monotonic() - post.since)

    def _require_wanted(self, post: Post, server: EngineServer) -> None:
        """EngineError where the engine loads for too long, or the trainer gave it up."""
        timeout_s = self._config.engine.startup_timeout_s
        if post.entry is None:
            if time.monotonic() - post.since > timeout_s:
                raise EngineError(
                    f"the engine at {server.address} did not answer within {timeout_s:.0f} s of "
                    "its start",
                    server.log,
                )
            return
        verdict = self._registry.condemned(post.entry)
        if verdict is not None:
            raise EngineError(f"the trainer gave {post.name} up: {verdict}", server.log)

    def _replace(self, post: Post, error: EngineError) -> None:
        """Starts the engine again, unless that was done too often."""
        self._withdraw(post)
        assert post.server is not None
        post.server.stop()
        post.server = None
        # Only now its log is whole.
        self.reason = reason = str(error)
        if post.restarts_left == 0:
            log.error("%s is lost and not started again: %s", post.name, reason)
            return
        post.restarts_left -= 1
        log.warning("%s is lost, %d restarts left: %s", post.name, post.restarts_left, reason)
        self._start(post)

    def _withdraw(self, post: Post) -> None:
        if post.entry is not None:
            self._registry.withdraw(post.entry)
            post.entry = None

    def _end_all(self) -> None:
        servers = [post.server for post in self._posts if post.server is not None]
        for server in servers:
            server.ask_to_stop()
        for post in self._posts:
            self._withdraw(post)
        for server in servers:
            server.stop()


def main() -> None:
    """Entry point; exits with 0 when it was asked to end, with 1 when no engine can be kept."""
    end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    place = read_place(launch_variables())
    config = RunConfig.model_validate_json((place.run / "launch" / "config.json").read_text())
    node = EngineNode(config, posts_of(config, place), Registry(place.engines), node=this(place))
    signal.signal(signal.SIGTERM, lambda *_: node.stop())
    signal.signal(signal.SIGINT, lambda *_: node.stop())
    if node.run():
        return
    LaunchedAttempt(place.attempt).report(
        Failure(
            f"no engine of {place.task} can be kept running: {node.reason}",
            retry=True,
            task=place.task,
            phase="engine",
        )
    )
    sys.exit(1)


def this(place: Place) -> str:
    """The name of this node."""
    return place.nodes[place.node_rank]


def posts_of(config: RunConfig, place: Place) -> list[Post]:
    """The engines of this node, none of them started. ValueError where the node's address would be
    of no use to others, or where nobody gave us the key."""
    number = config.launch.engines_on_a_node(config.engine.tensor_parallel)
    key, host = engine_key(), own_address(config, place)
    if key is None:
        raise ValueError("the engines' key is not in the environment: the supervisor puts it there")
    logs = RunDirectory(config.run.directory).logs
    logs.mkdir(parents=True, exist_ok=True)
    devices = engine_devices(config, number, visible_devices())
    posts = []
    for engine in range(number):
        name = f"{place.task}.{engine}"
        # Nodes that are all this machine have the same ports.
        port = 0 if place.is_local else place.port + FIRST_PORT + engine
        seat = Seat(host=host, port=port, api_key=key, devices=devices[engine])
        posts.append(Post(name, seat, engine_log(logs, name), config.launch.max_restarts))
    return posts


def engine_devices(
    config: RunConfig, number: int, visible: Sequence[str] | None
) -> list[Sequence[str]]:
    """The CUDA devices of each engine, none of them a trainer rank's; empty on a node without.

    ValueError where there are fewer than the engines need.
    """
    launch, size = config.launch, config.engine.tensor_parallel
    if launch.gpus_per_node == 0:
        return [()] * number
    devices = list(map(str, range(launch.gpus_per_node))) if visible is None else visible
    # An allocation of the engines alone shows their devices only.
    is_shared = launch.rollout_nodes == 0 and len(devices) == launch.gpus_per_node
    first = launch.trainer_ranks_per_node if is_shared else 0
    if first + number * size > len(devices):
        raise ValueError(
            f"{number} engines of {size} GPUs behind {first} trainer ranks need "
            f"{first + number * size} GPUs, this node has {len(devices)}; lower "
            "launch.engines_per_node or engine.tensor_parallel"
        )
    return [devices[first + k * size : first + (k + 1) * size] for k in range(number)]


def own_address(config: RunConfig, place: Place) -> str:
    """This node's address on the interface that the job's nodes share."""
    interface = config.launch.interface
    if interface is None:
        address = one_interface(place.address)
        if address.startswith("127.") and not place.is_local:
            raise ValueError(
                f"node {this(place)} finds itself at {address}, where no other node reaches it; "
                "name the network interface in launch.interface"
            )
        return address
    found = psutil.net_if_addrs().get(interface, [])
    addresses = [one.address for one in found if one.family.name == "AF_INET"]
    if not addresses:
        raise ValueError(
            f"launch.interface={interface!r} has no IPv4 address on node {this(place)}; it has "
            f"{', '.join(sorted(psutil.net_if_addrs()))}"
        )
    return addresses[0]


def with_free_port(seat: Seat) -> Seat:
    """The seat, with any port where its own is taken: the registry says which it became."""
    if seat.port and not is_free(seat.port, seat.host):
        log.warning("port %d is taken, another will do", seat.port)
        return Seat(host=seat.host, api_key=seat.api_key, devices=seat.devices)
    return seat


if __name__ == "__main__":
    main()
