"""A Gloo group between the trainer and the engines' workers, apart from both sides' own groups."""

import socket
from collections import deque
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


class GlooGroup:
    """Ranks that meet at a store, which rank 0, the sender, hosts. Needs torch alone.

    Both store and connections listen on the interface that reaches `host` only: on loopback for an
    engine of this machine. A Gloo connection lives as long as any Work that used it, even one that
    a traceback holds, and the other side would wait for nothing; so all of them stay in here, and
    `close` lets the other ranks fail at once.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        token: str = "",
    ) -> None:
        """`host` is rank 0's address; RuntimeError (DistError) where it cannot be reached.

        Port 0 on rank 0 takes a free one; `port` then tells which. What ranks write into the store
        stands behind the `token`, so that who does not know it cannot join in their place.
        """
        self._timeout = timedelta(seconds=timeout_s)
        self._rank = rank
        self._world_size = world_size
        self._own_address = local_address(host)
        listener = None
        if rank == 0:
            server = socket.create_server((host, port))
            port, listener = server.getsockname()[1], server.detach()
        server_store = dist.TCPStore(
            host,
            port,
            world_size,
            rank == 0,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        self._store = dist.PrefixStore(f"group-{token}", server_store)
        self.port = port
        self._group: dist.ProcessGroupGloo | None = None
        self._under_way: deque[dist.Work] = deque()

    def absent(self) -> list[int]:
        """The ranks that have not come yet. Rank 0 joins when there are none: joining waits, and
        nothing can interrupt it."""
        others = range(1, self._world_size)
        return [rank for rank in others if not self._store.check([f"arrived/{rank}"])]

    def join(self) -> None:
        """Connects to the other ranks; RuntimeError where one does not come in time."""
        self._store.set(f"arrived/{self._rank}", "yes")
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_address)]
        options._timeout = self._timeout
        store = dist.PrefixStore("weights", self._store)
        self._group = dist.ProcessGroupGloo(store, self._rank, self._world_size, options)

    def start_broadcast(self, data: Tensor) -> None:
        """Begins to bring rank 0's data to all ranks; `data` must live, untouched, until
        `finish_broadcast`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._under_way.append(self._group.broadcast([data], options))

    def is_done(self) -> bool:
        """Whether the oldest broadcast under way has ended, well or not."""
        return self._under_way[0].is_completed()

    def finish_broadcast(self) -> None:
        """Waits for the oldest one under way; RuntimeError when a rank is gone or too late."""
        self._under_way[0].wait()
        self._under_way.popleft()

    def close(self) -> None:
        """Leaves the group; waits for what is under way until it arrives or breaks."""
        self._under_way.clear()
        self._group = None
        self._store = None


def local_address(host: str) -> str:
    """Address of this machine's interface that reaches `host`; OSError where none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # chooses a route, sends nothing
        return probe.getsockname()[0]
