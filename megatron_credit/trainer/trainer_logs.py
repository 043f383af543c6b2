"""What the logs of torchrun and of its ranks say."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path

RANK_STARTS = "--- the rank starts ---\n"
"""The first line of each start in a rank's log, to which the starts of a run add."""
_FAILURE = re.compile(r"^\s*rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)


@dataclass(frozen=True)
class KilledRank:
    """A rank that a signal ended."""

    rank: int
    code: int
    """Minus the signal's number."""

    @property
    def may_be_a_consequence(self) -> bool:
        """Ranks that lost a peer may end like this too."""
        return self.code == -signal.SIGABRT


def newest_text(log: Path) -> str:
    """What the last start of a rank has written; empty where there is no such log."""
    if not log.is_file():
        return ""
    return log.read_text(errors="replace").rpartition(RANK_STARTS)[2]


def killed_rank(log: Path) -> KilledRank | None:
    """The rank that a signal ended first, as far as one can tell; None where none did.

    torchrun's root cause is the one that it saw first, of those that ended within its interval any.
    SIGTERM is its own.
    """
    if not log.is_file():
        return None
    found = _FAILURE.findall(log.read_text(errors="replace"))
    # What torchrun holds to be the cause stands last.
    ended = [KilledRank(int(rank), int(code)) for rank, code in reversed(found)]
    killed = [one for one in ended if one.code < 0 and one.code != -signal.SIGTERM]
    return min(killed, key=lambda one: one.may_be_a_consequence, default=None)
