"""Processes that really run out of memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
LIMIT = 1 << 20


def refuse_memory(process: psutil.Process) -> None:
    """From here on the system gives the process no memory that it asks for."""
    process.rlimit(psutil.RLIMIT_AS, (LIMIT, LIMIT))


@contextmanager
def out_of_memory(process: psutil.Process) -> Iterator[bool]:
    """The kernel ends the process as soon as it touches new memory, as on a node that has none
    left. Where no cgroup with a limit can be made, it is refused memory in place of that, and False
    is given; it must have ended when the context does."""
    group, limit = memory_group(process.pid)
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT))
        (group / "cgroup.procs").write_text(str(process.pid))
        by_kernel = True
    except OSError:
        refuse_memory(process)
        by_kernel = False
    try:
        yield by_kernel
        process.wait(60)
    finally:
        if group.exists():
            group.rmdir()


def memory_group(pid: int) -> tuple[Path, str]:
    """A cgroup for the process below its own, and the name of its limit."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    name = f"credit-test-{os.getpid()}-{pid}"
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return CGROUPS / "memory" / path.lstrip("/") / name, "memory.limit_in_bytes"
    return CGROUPS / lines[-1][2].lstrip("/") / name, "memory.max"
