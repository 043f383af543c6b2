"""A real Slurm on one machine: munged, slurmctld, and nodes that can lose power or their cable.

Each node is a network, process and host-name namespace with a slurmd in it. Every process dies with
the process that started the lab, so a killed test run leaves files, a bridge and a user, which the
next lab on the slot removes."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from slurm.lab_files import (
    GPUS_PER_NODE,
    Site,
    big_conf,
    gres_conf,
    hosts_file,
    login_script,
    node_script,
    slurm_conf,
)

LIMIT_S = 60
"""For what takes a second on a quiet machine."""
WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
NUM_SLOTS = 4
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "setpriv", "unshare", "ip", "useradd")


def missing() -> str | None:
    """Why no lab can run here, None where one can."""
    if os.geteuid() != 0:
        return "a Slurm of our own needs root"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurm-wlm munge (scripts/setup-env --dev)"
    if not Path("/sys/fs/cgroup").is_dir():
        return "slurmd wants /sys/fs/cgroup to exist"
    probe = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "true"], check=False)
    return "namespaces cannot be made here" if probe.returncode else None


def wait_for(condition, what: str, limit_s: float = LIMIT_S):
    """What the condition returned when it first was true. AssertionError after the limit."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s in vain: {what}"
        time.sleep(0.1)
    return found


def run(*command: str, check: bool = True) -> str:
    """Standard output of a command that root runs."""
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL
    )
    assert not check or result.returncode == 0, f"{' '.join(command)}: {result.stderr}"
    return result.stdout


class Lab:
    """One lab; `with Lab.free(num_nodes) as lab` starts and stops it."""

    def __init__(self, site: Site, lock):
        self.site = site
        self._lock = lock
        self.is_open = True
        """False once it was stopped."""
        self._daemons: dict[str, subprocess.Popen] = {}
        self._nodes: dict[str, subprocess.Popen] = {}
        self._login: subprocess.Popen | None = None
        self._cables = 0
        self._cable: dict[str, str] = {}

    @classmethod
    def free(cls, num_nodes: int) -> "Lab":
        """A lab on a slot that no living process uses."""
        for slot in range(NUM_SLOTS):
            lock = open(f"/run/megatron-credit-lab-{slot}.lock", "w")  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            return cls(Site(slot, num_nodes), lock)
        raise ValueError(f"{NUM_SLOTS} labs run on this machine already; end one of them first")

    def __enter__(self) -> "Lab":
        self.clean()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exception) -> None:
        self.is_open = False
        for node in list(self._nodes):
            self.crash(node)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        if self._login is not None:
            self._login.kill()
            self._login.wait()
        self.clean()
        self._lock.close()

    def clean(self) -> None:
        """Remove what a lab on this slot left when it was killed."""
        run("ip", "link", "delete", self.site.bridge, check=False)
        shutil.rmtree(self.site.directory, ignore_errors=True)
        shutil.rmtree(self.site.home, ignore_errors=True)
        run("userdel", self.site.user, check=False)

    def _start(self) -> None:
        here, site = self.site.directory, self.site
        for name in ("log", "state", "spool", "gpu", "big-state", "big-spool"):
            (here / name).mkdir(parents=True)
        run("useradd", "--no-create-home", "--home-dir", str(site.home), site.user)
        site.home.mkdir(mode=0o755)
        shutil.chown(site.home, site.user, site.user)
        for k in range(GPUS_PER_NODE):
            # Slurm wants device nodes; these are further names of /dev/null.
            os.mknod(here / f"gpu/gpu{k}", 0o20666, os.makedev(1, 3))
        controller = socket.gethostname().split(".")[0]
        (here / "slurm.conf").write_text(slurm_conf(site, controller))
        (here / "gres.conf").write_text(gres_conf(site))
        (here / "hosts").write_text(hosts_file(site))
        key = here / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        run("ip", "link", "add", site.bridge, "type", "bridge")
        run("ip", "address", "add", f"{site.network}.1/24", "dev", site.bridge)
        run("ip", "link", "set", site.bridge, "up")
        self._open_login()
        self._start_munge()
        self._daemon("slurmctld", "slurmctld", "-D", "-i", conf="slurm.conf")
        for node in site.nodes:
            self.revive(node)
        self.wait_idle()

    def _open_login(self) -> None:
        self._login = subprocess.Popen(
            [*WITH_PARENT, "unshare", "--mount", "bash", "-c", login_script(self.site)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._login.stdout.readline() == "ready\n", "the login node's mounts failed"

    def _start_munge(self) -> None:
        here = self.site.directory
        self._daemon(
            "munged",
            "munged",
            "--foreground",
            f"--key-file={here}/munge.key",
            f"--socket={here}/munge.socket",
            f"--pid-file={here}/munged.pid",
            f"--log-file={here}/log/munged.log",
            f"--seed-file={here}/munged.seed",
        )
        wait_for((here / "munge.socket").exists, "munged's socket")

    def start_big(self) -> Path:
        """Start the controller of the cluster that is only asked; the path of its slurm.conf."""
        directory = self.site.directory / "big"
        directory.mkdir()
        controller = socket.gethostname().split(".")[0]
        (directory / "slurm.conf").write_text(big_conf(self.site, controller))
        self._daemon("big", "slurmctld", "-D", "-c", conf="big/slurm.conf")
        return directory / "slurm.conf"

    def _daemon(self, name: str, *command: str, conf: str = "slurm.conf") -> None:
        with open(self.site.directory / f"log/{name}.out", "w") as out:
            self._daemons[name] = subprocess.Popen(
                [*WITH_PARENT, *command],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "SLURM_CONF": str(self.site.directory / conf)},
                start_new_session=True,
            )

    def revive(self, node: str) -> None:
        """Switch a node on."""
        assert node not in self._nodes, f"{node} runs"
        with open(self.site.directory / f"log/node-{node}.out", "a") as out:
            process = subprocess.Popen(
                [
                    *(*WITH_PARENT, "unshare", "--net", "--uts", "--pid", "--fork"),
                    *("--kill-child", "--mount-proc", "bash", "-c", node_script(self.site), node),
                ],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                text=True,
                start_new_session=True,
            )
        self._nodes[node] = process
        wait_for(lambda: _children(process.pid), f"the init of {node}")
        self._cables += 1
        self._cable[node] = cable = f"{self.site.bridge}c{self._cables}"
        run("ip", "link", "add", cable, "type", "veth", "peer", "eth0", "netns", str(process.pid))
        run("ip", "link", "set", cable, "master", self.site.bridge, "up")
        process.stdin.write(f"{self.site.address(node)}\n")
        process.stdin.close()

    def crash(self, node: str) -> None:
        """Cut a node's power: all its processes are gone at once."""
        process = self._nodes.pop(node)
        process.kill()
        process.wait()
        run("ip", "link", "delete", self._cable.pop(node), check=False)

    def unplug(self, node: str) -> None:
        """Pull a node's cable; its processes run on."""
        run("ip", "link", "set", self._cable[node], "down")

    def plug(self, node: str) -> None:
        """Put the cable back."""
        run("ip", "link", "set", self._cable[node], "up")

    def repair(self) -> None:
        """Switch on and plug in all nodes."""
        for node in self.site.nodes:
            if node in self._nodes:
                self.plug(node)
            else:
                self.revive(node)

    def processes(self, node: str, mentions: str = "") -> list[str]:
        """Command lines of what runs on a node, its own shell and slurmd aside; with `mentions`,
        of what has this text in its command line or environment."""
        if node not in self._nodes:
            return []
        found = []
        for pid in _in_namespace(*self._namespace(node)):
            line = _text(pid, "cmdline")
            known = mentions in line or mentions in _text(pid, "environ")
            if line and known and not line.startswith(f"slurmd -D -N {node}"):
                found.append(line)
        return found

    def kill(self, node: str, text: str, number: int = signal.SIGKILL) -> list[str]:
        """Signal the processes on a node whose command line has this text, but no srun, which only
        holds the other end of a task; their command lines."""
        found = []
        for pid in _in_namespace(*self._namespace(node)):
            line = _text(pid, "cmdline")
            if text in line and not line.startswith("srun"):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                    found.append(line)
        return found

    def _namespace(self, node: str) -> tuple[str, int]:
        init = _children(self._nodes[node].pid)[0]
        return os.readlink(f"/proc/{init}/ns/pid"), init

    def unreadable(self) -> str | None:
        """Why the lab's user cannot use this checkout, None where it can."""
        probe = "import megatron_credit.settings, credit_launch"
        result = self.finished(sys.executable, "-c", probe)
        if result.returncode == 0:
            return None
        return f"an ordinary user cannot use {sys.executable}: {result.stderr[-200:]}"

    def node_states(self) -> dict[str, str]:
        """State of each node in Slurm's words."""
        lines = self.call("sinfo", "-hNo", "%N %T", "-p", "batch").splitlines()
        return dict(line.split() for line in lines)

    def wait_idle(self, limit_s: float = LIMIT_S) -> None:
        """Wait until every node is up and has nothing to do."""
        wait_for(lambda: set(self.try_states().values()) == {"idle"}, "all nodes idle", limit_s)

    def try_states(self) -> dict[str, str]:
        """node_states, nothing while the controller does not answer."""
        try:
            states = self.node_states()
        except AssertionError:
            return {}
        return states

    def call(self, *command: str, check: bool = True, **variables: str) -> str:
        """Standard output of a command that the lab's user runs."""
        result = self.finished(*command, **variables)
        assert not check or result.returncode == 0, (
            f"{' '.join(command)} ended with {result.returncode}: {result.stdout}{result.stderr}"
        )
        return result.stdout

    def finished(
        self, *command: str, limit_s: float = 4 * LIMIT_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command that the lab's user ran, with further variables."""
        as_user = ("setpriv", f"--reuid={self.site.user}", f"--regid={self.site.user}")
        return subprocess.run(
            [
                *("nsenter", f"--mount=/proc/{self._login.pid}/ns/mnt"),
                *(*as_user, "--clear-groups", "--inh-caps=-all"),
                *("env", "-i", "-C", str(self.site.home)),
                *(f"{name}={value}" for name, value in self.environment(**variables).items()),
                *command,
            ],
            capture_output=True,
            text=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
        )

    def environment(self, **variables: str) -> dict[str, str]:
        """The environment of the lab's user."""
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.site.home),
            "USER": self.site.user,
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(Path(__file__).parents[2] / "launch"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SLURM_CONF": str(self.site.directory / "slurm.conf"),
            **variables,
        }


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def _in_namespace(namespace: str, init: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "ns/pid") == namespace and int(path.name) != init:
                found.append(int(path.name))
        except OSError:  # gone meanwhile
            continue
    return found


def _text(pid: int, name: str) -> str:
    """A file of a process with spaces for its zeros, empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""
