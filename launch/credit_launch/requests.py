"""What the supervisor was asked for by signals and by the user's stop file."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class Requests:
    """Everything that was asked for so far."""

    stop_file: Path
    stop_now_file: Path
    warned: bool = False
    """SIGUSR1: the time limit is near."""
    terminated: bool = False
    """SIGTERM."""
    interrupted: int = 0
    """How often SIGINT came, which the user's terminal sends."""
    news: list[str] = field(default_factory=list)
    """Names of signals that nobody has spoken of yet."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Meanwhile signals are taken down, and end nothing."""
        before = {number: signal.signal(number, self._take_down) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def wants_stop(self) -> bool:
        """The user wants the run to save and end."""
        return self.interrupted > 0 or self.stop_file.exists()

    @property
    def anything(self) -> bool:
        """Whether the attempt is to end."""
        return self.warned or self.terminated or self.wants_stop

    @property
    def at_once(self) -> bool:
        """The user does not want to wait for a checkpoint."""
        return self.interrupted > 1 or self.stop_now_file.exists()

    def _take_down(self, number: int, _frame: object) -> None:
        if number == signal.SIGUSR1:
            self.warned = True
        elif number == signal.SIGINT:
            self.interrupted += 1
        else:
            self.terminated = True
        self.news.append(signal.Signals(number).name)
