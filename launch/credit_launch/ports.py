"""Which TCP ports a job uses."""

from __future__ import annotations

import re
import socket
from pathlib import Path

PORTS_A_JOB = 16
SPAN = 20000
"""Ports over which jobs are spread."""
USUAL_FLOOR = 32768
"""Where Linux's ephemeral ports begin unless the site says otherwise."""
SERVICE_OFFSET = 14
"""Of a job's ports, that of the services; each has a node of its own."""
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def job_port(job: str, base: int, floor: int = USUAL_FLOOR) -> int:
    """The first of the job's 16 ports: different for neighbouring jobs, and below the ephemeral
    ports where `base` allows, since the kernel gives those to anybody."""
    below = floor - base if base + PORTS_A_JOB <= floor else 65536 - base
    slots = max(1, min(SPAN, below) // PORTS_A_JOB)
    return base + int(re.sub(r"\D", "", job) or 0) % slots * PORTS_A_JOB


def ephemeral_floor() -> int:
    """The first port that this machine's kernel may give to anybody."""
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return USUAL_FLOOR


def free_block(base: int, floor: int = USUAL_FLOOR) -> int:
    """The first of 16 neighbouring ports that nobody on this machine listens on."""
    for port in range(base, max(floor, base + 2 * PORTS_A_JOB) - PORTS_A_JOB, PORTS_A_JOB):
        if all(_is_free(port + offset) for offset in range(PORTS_A_JOB)):
            return port
    raise ValueError(f"no {PORTS_A_JOB} neighbouring free ports from {base} on; set base_port")


def free_ports(count: int) -> list[int]:
    """So many different ports that nobody on this machine listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
