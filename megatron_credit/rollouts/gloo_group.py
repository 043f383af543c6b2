"""A Gloo group between the trainer and the engines' workers, apart from both sides' own groups."""

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


class GlooGroup:
    """Ranks that meet at a store, which rank 0, the sender, hosts. Needs torch alone."""

    def __init__(
        self, host: str, port: int, *, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Returns when all ranks have joined; RuntimeError (DistError) after the timeout.

        Port 0 on rank 0 takes a free one; `port` then tells which.
        """
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(
            host, port, world_size, rank == 0, timeout=timeout, wait_for_workers=False
        )
        self.port = self._store.port
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._group: dist.ProcessGroupGloo | None = None

    def join(self) -> None:
        """Connects to the other ranks."""
        store = dist.PrefixStore("weights", self._store)
        self._group = dist.ProcessGroupGloo(store, self._rank, self._world_size, self._timeout)

    def broadcast(self, data: Tensor) -> None:
        """Rank 0's data, on all ranks; RuntimeError when a rank is gone or too late."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([data], options).wait()

    def close(self) -> None:
        """Leaves the group."""
        self._group = None
        self._store = None
