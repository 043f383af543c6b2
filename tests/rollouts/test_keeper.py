"""The keeper ends all that is below it, whichever process goes first; `sleep`s are the server."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rollouts.starving import out_of_memory
from rollouts.stub_engine import wait_for

from megatron_credit.rollouts.keeper import GRACE_S

SERVER = "sleep 300 & sleep 300 & wait"
STUBBORN = f"trap '' TERM; {SERVER}"


@pytest.fixture
def keep():
    """Starts a keeper and returns it with its server and the server's children."""
    started = []

    def start(script):
        command = [sys.executable, "-m", "megatron_credit.rollouts.keeper", "sh", "-c", script]
        keeper = subprocess.Popen(command)
        started.append(keeper)
        tree = []
        while len(tree) < 3:
            assert keeper.poll() is None
            tree = psutil.Process(keeper.pid).children(recursive=True)
        return keeper, tree

    yield start
    for keeper in started:
        keeper.kill()
        keeper.wait()


def none_is_left(tree):
    _, alive = psutil.wait_procs(tree, timeout=10)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_asked_to_end(keep):
    keeper, tree = keep(SERVER)
    keeper.terminate()
    assert keeper.wait(10) == 128 + signal.SIGTERM
    assert none_is_left(tree)


def test_the_server_is_killed(keep):
    keeper, tree = keep(SERVER)
    server = next(process for process in tree if process.ppid() == keeper.pid)
    server.kill()
    assert keeper.wait(10) == 128 + signal.SIGKILL
    assert none_is_left(tree)


def test_the_servers_exit_code_is_the_keepers():
    command = [sys.executable, "-m", "megatron_credit.rollouts.keeper", "sh", "-c", "exit 7"]
    assert subprocess.run(command, check=False, timeout=20).returncode == 7


def test_what_the_server_left_in_its_temporary_directory_goes(tmp_path):
    note = tmp_path / "note"
    script = f'touch "$TMPDIR/socket"; echo "$TMPDIR" > {note}; kill -9 $$'
    command = [sys.executable, "-m", "megatron_credit.rollouts.keeper", "sh", "-c", script]
    assert subprocess.run(command, check=False, timeout=20).returncode == 128 + signal.SIGKILL
    assert not Path(note.read_text().strip()).exists()


def test_the_launcher_is_killed():
    """Nobody is left to call anything: the kernel tells the keeper."""
    program = f"""
import subprocess, sys, time
from megatron_credit.rollouts.keeper import end_with_parent
command = [sys.executable, "-m", "megatron_credit.rollouts.keeper", "sh", "-c", {SERVER!r}]
print(subprocess.Popen(command, preexec_fn=end_with_parent).pid, flush=True)
time.sleep(300)
"""
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    keeper = psutil.Process(int(launcher.stdout.readline()))
    tree = []
    while len(tree) < 3:
        tree = keeper.children(recursive=True)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.communicate()
    assert none_is_left([keeper, *tree])


def test_a_server_that_does_not_listen(keep):
    keeper, tree = keep(STUBBORN)
    keeper.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.wait(1)  # it has some time to end by itself
    assert keeper.wait(GRACE_S + 5) == 128 + signal.SIGKILL
    assert none_is_left(tree)


HUNGRY = """
import pathlib, time
while not pathlib.Path("eat").exists():
    time.sleep(0.05)
bytearray(100 << 20)
"""


def test_the_log_says_that_the_kernel_ended_a_process(tmp_path):
    """The server ends as after any other error."""
    script = f"{sys.executable} -c '{HUNGRY}' & echo $! > hungry; wait; exit 1"
    command = [sys.executable, "-m", "megatron_credit.rollouts.keeper", "sh", "-c", script]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    path = tmp_path / "hungry"
    wait_for(lambda: path.exists() and path.read_text().strip())
    with out_of_memory(psutil.Process(int(path.read_text()))) as by_kernel:
        (tmp_path / "eat").touch()
    words, _ = keeper.communicate(timeout=20)
    assert keeper.returncode == 1
    if not by_kernel:
        pytest.skip("no cgroup with a limit of memory can be made here")
    prefix = rf"\(Keeper pid={keeper.pid}\) "
    killed = r"out of memory: the kernel ended .* of this machine for lack of memory just now"
    expected = rf"{prefix}the engine starts\n{prefix}{killed}\n"
    assert re.fullmatch(expected, words), words
