"""What one start of an engine wrote into its log."""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.keeper import KEEPER, OUT_OF_MEMORY, START, keeper_line

LOG_LINES = 15
LINE_LENGTH = 300


@dataclass(frozen=True)
class EngineLog:
    """A file to which each start of an engine adds."""

    path: Path
    keeper: int | None = None
    """Process id of the keeper of the start that is meant; None: the last one."""

    def tail(self) -> str:
        """The end of it as a part of an error message; empty where there is no such file.

        When the part that computes fails, the server writes a traceback for each request that was
        under way, so the cause is far from the end; its last errors are shown too.
        """
        if not self.path.is_file():
            return ""
        cause: deque[tuple[int, str]] = deque(maxlen=LOG_LINES)
        end: deque[tuple[int, str]] = deque(maxlen=LOG_LINES)
        for line in enumerate(self._lines()):
            end.append(line)
            if vllm_api.is_core_error(line[1]):
                cause.append(line)
        lines = [f"  {text.rstrip()[:LINE_LENGTH]}" for _, text in sorted({*cause, *end})]
        return "\n".join([f"\nthe end of {self.path}:", *lines])

    def tells_of_memory(self) -> bool:
        """Whether it says that memory was short."""
        return self.path.is_file() and any(map(is_of_memory, self._lines()))

    def _lines(self) -> Iterator[str]:
        """Those of the start that is meant; all, where none says that it is the one."""
        with self.path.open(errors="replace") as log:
            starts = [k for k, line in enumerate(log) if self._is_start(line)]
            log.seek(0)
            first = starts[-1] if starts else 0
            for number, line in enumerate(itertools.islice(log, first, None)):
                if number and starts and is_start(line):
                    return
                yield line

    def _is_start(self, line: str) -> bool:
        if self.keeper is None:
            return is_start(line)
        return line.startswith(keeper_line(START, self.keeper))


def is_start(line: str) -> bool:
    """Whether the lines of another start begin here."""
    return line.startswith(KEEPER) and START in line


def is_of_memory(line: str) -> bool:
    """Whether the line says that memory was short: the engine's, or the kernel's by the keeper."""
    if line.startswith(KEEPER):
        return OUT_OF_MEMORY in line
    return vllm_api.is_core_error(line) and vllm_api.is_out_of_memory(line)
