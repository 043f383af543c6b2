"""Where engines say that they serve, and what the trainer says of those that it gave up."""

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from megatron_credit.rollouts.engine_log import EngineLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One start of an engine: a restarted one has another `incarnation` under the same name."""

    name: str
    address: str
    """http://host:port."""
    incarnation: str = ""
    node: str = ""
    pid: int = 0


class EngineSource(Protocol):
    """Where a fleet finds its engines."""

    can_replace: bool
    """Whether an engine may yet come in place of one that is lost."""

    def entries(self) -> list[Entry]:
        """The engines that say that they serve."""
        ...

    def condemn(self, entry: Entry, reason: str) -> None:
        """Has this start of an engine ended, which is of no use any more."""
        ...

    def log_of(self, entry: Entry) -> EngineLog | None:
        """What this start of the engine wrote, where that is known."""
        ...


class FixedEngine:
    """One engine at a known address."""

    can_replace = False

    def __init__(self, address: str, log: Path | None = None) -> None:
        self._entry = Entry(name="engine", address=address)
        self._log = log

    def entries(self) -> list[Entry]:
        """As `EngineSource` says."""
        return [self._entry]

    def condemn(self, entry: Entry, reason: str) -> None:
        """Nothing: nobody would start another."""

    def log_of(self, entry: Entry) -> EngineLog | None:
        """As `EngineSource` says."""
        return None if self._log is None else EngineLog(self._log)


class Registry:
    """A directory that the nodes share, with a file for each engine; files come by rename, so
    nobody reads half of one."""

    can_replace = True

    def __init__(self, directory: Path, *, logs: Path | None = None) -> None:
        """`logs`: where the engines' logs stand."""
        self._directory = directory
        self._logs = logs

    def publish(self, entry: Entry) -> None:
        """The engine serves; replaces an earlier start of it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._write(f"{entry.name}.json", asdict(entry))

    def withdraw(self, entry: Entry) -> None:
        """This start of the engine serves no more."""
        path = self._directory / f"{entry.name}.json"
        if read_entry(path) == entry:
            path.unlink(missing_ok=True)
        if self.condemned(entry) is not None:
            self._verdict(entry).unlink(missing_ok=True)

    def entries(self) -> list[Entry]:
        """The engines that say that they serve, by name."""
        found = (read_entry(path) for path in sorted(self._directory.glob("*.json")))
        return [entry for entry in found if entry is not None]

    def condemn(self, entry: Entry, reason: str) -> None:
        """Asks the engine's node to end this start of it."""
        verdict = {"incarnation": entry.incarnation, "reason": reason}
        self._write(self._verdict(entry).name, verdict)

    def condemned(self, entry: Entry) -> str | None:
        """Why the trainer gave up this start of the engine; None: it did not."""
        try:
            verdict = json.loads(self._verdict(entry).read_text())
        except FileNotFoundError:
            return None
        return verdict["reason"] if verdict["incarnation"] == entry.incarnation else None

    def log_of(self, entry: Entry) -> EngineLog | None:
        """As `EngineSource` says."""
        if self._logs is None:
            return None
        return EngineLog(engine_log(self._logs, entry.name), entry.pid)

    def _verdict(self, entry: Entry) -> Path:
        return self._directory / f"{entry.name}.condemned"

    def _write(self, name: str, content: dict[str, object]) -> None:
        partial = self._directory / f".{name}.{os.getpid()}.tmp"
        partial.write_text(json.dumps(content))
        partial.replace(self._directory / name)


def engine_log(logs: Path, name: str) -> Path:
    """The log of the engine of this name."""
    return logs / f"engine-{name}.log"


def read_entry(path: Path) -> Entry | None:
    """What the file says; None where it is gone, cannot be read just now, or is not one of ours."""
    try:
        return Entry(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s says nothing of an engine: %s", path, error)
        return None
