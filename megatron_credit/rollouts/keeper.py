"""Runs a server and leaves nothing of it behind: `python -m megatron_credit.rollouts.keeper CMD`.

A server has children that outlive it when it is killed, and sockets in the temporary directory.
This small process stands above them: when the server ends, when it is asked to end, or when its own
parent dies, however that happens, it ends all of them and removes what they left.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile

from megatron_credit.memory_kills import RECENT_S, MemoryKills

GRACE_S = 5.0
"""Seconds that the server has to end by itself; vLLM does not listen while it loads a model."""

KEEPER = "(Keeper pid="
START = "the engine starts"
OUT_OF_MEMORY = "out of memory"
EVENTS = (signal.SIGTERM, signal.SIGCHLD)
LIBC = ctypes.CDLL(None, use_errno=True)  # loading it between fork and exec could deadlock


def main() -> None:
    """Entry point; exits with the server's code, 128 + N where signal N ended it."""
    # Blocked signals wait for sigwait, so none is lost before it.
    signal.pthread_sigmask(signal.SIG_BLOCK, EVENTS)
    end_with_parent()
    with tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as scratch:
        code = run_server(sys.argv[1:], environment={**os.environ, "TMPDIR": scratch})
    sys.exit(code if code >= 0 else 128 - code)


def run_server(command: list[str], *, environment: dict[str, str]) -> int:
    """The server's exit code, negative for a signal, once nothing of it runs any more."""
    say(START)
    kills = MemoryKills()
    server = subprocess.Popen(
        command, env=environment, start_new_session=True, preexec_fn=prepare_server
    )
    while signal.sigtimedwait(EVENTS, RECENT_S) is None:
        kills.look()
    if killed := kills.just_now():
        say(f"{OUT_OF_MEMORY}: {killed}")
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
        os.killpg(server.pid, signal.SIGKILL)
    return server.wait()


def say(words: str) -> None:
    """A line of our own between the server's."""
    sys.stdout.write(keeper_line(words, os.getpid()) + "\n")
    sys.stdout.flush()


def keeper_line(words: str, pid: int) -> str:
    """What a keeper says, as it stands in the log."""
    return f"{KEEPER}{pid}) {words}"


def prepare_server() -> None:
    """In the server, before its command runs."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, EVENTS)
    end_with_parent()


def end_with_parent() -> None:
    """Asks the kernel to end this process when its parent dies, however that happens (Linux)."""
    set_parent_death_signal = 1
    LIBC.prctl(set_parent_death_signal, signal.SIGTERM)


if __name__ == "__main__":
    main()
