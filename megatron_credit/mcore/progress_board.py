"""Where every rank says how far it is, and anyone can read it while the others hang."""

import json
from dataclasses import asdict, dataclass

import torch.distributed as dist

CLAIM = "progress/{}"


@dataclass(frozen=True)
class Progress:
    """How far a rank is."""

    rank: int
    count: int
    """Phases that it has begun."""
    step: int
    phase: str
    node: str
    beat: int = 0
    """How often it has said so: what does not rise is a process that does not run."""


class ProgressBoard:
    """A connection of its own to the store that the ranks met at: the main thread's may wait.

    Nothing in here is collective.
    """

    def __init__(self, *, rank: int, world_size: int, address: str, port: int) -> None:
        self._rank = rank
        self._ranks = range(world_size)
        self._beat = 0
        self._store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)

    def publish(self, progress: Progress) -> None:
        """Replaces what this rank has said. RuntimeError (DistError) where the store is gone."""
        self._beat += 1
        said = asdict(progress) | {"beat": self._beat}
        self._store.set(CLAIM.format(self._rank), json.dumps(said))

    def read(self) -> dict[int, Progress]:
        """What the ranks have said last; those that never said anything are missing."""
        keys = {rank: CLAIM.format(rank) for rank in self._ranks}
        known = [rank for rank, key in keys.items() if self._store.check([key])]
        if not known:
            return {}
        texts = self._store.multi_get([keys[rank] for rank in known])
        return {rank: Progress(**json.loads(text)) for rank, text in zip(known, texts, strict=True)}
