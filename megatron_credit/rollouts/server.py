"""A vLLM server of our own: started on one address, watched, and never left behind."""

import ipaddress
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from megatron_credit.rollouts import vllm_api
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.engine_log import EngineLog
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.guard import KEY_VARIABLE
from megatron_credit.rollouts.keeper import GRACE_S, end_with_parent

STOP_TIMEOUT_S = GRACE_S + 10.0
POLL_S = 0.2
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a server listens, who may speak to it, and what it computes on."""

    host: str = LOOPBACK
    """Address of one interface of this machine."""
    port: int = 0
    """0 takes a free one."""
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    devices: Sequence[str] = ()
    """CUDA devices, as CUDA_VISIBLE_DEVICES names them; empty: all that we see."""


class EngineServer:
    """A server process with its children; `start` returns while it still loads."""

    def __init__(
        self, process: subprocess.Popen, *, address: str, api_key: str, log_path: Path
    ) -> None:
        self._process = process
        self.log = EngineLog(log_path, process.pid)
        self.address = address
        self.api_key = api_key

    @classmethod
    def start(
        cls,
        model_dir: Path,
        config: EngineConfig,
        *,
        log_path: Path,
        seed: int,
        routed_experts: bool = False,
        seat: Seat | None = None,
    ) -> "EngineServer":
        """Starts the server, which with `routed_experts` says which experts each token went to.

        Without a `seat` it listens on loopback, at the configured port. ValueError, before anything
        is started, where its port is in use, or where it would listen on all interfaces.
        """
        seat = seat or Seat(port=config.port)
        host = one_interface(seat.host)
        port = seat.port or free_port(host)
        require_free(port, host)
        backend = weight_backend(config)
        command = vllm_api.server_command(
            model_dir.absolute(),
            config,
            host=host,
            port=port,
            seed=seed,
            backend=backend,
            routed_experts=routed_experts,
        )
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **vllm_api.server_environment(backend, host=host),
            KEY_VARIABLE: seat.api_key,
        }
        if seat.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(seat.devices)
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "megatron_credit.rollouts.keeper", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal reaches us alone
                preexec_fn=end_with_parent,
            )
        address = f"http://{host}:{port}"
        return cls(process, address=address, api_key=seat.api_key, log_path=log_path)

    @property
    def pid(self) -> int:
        """Process id of the server's keeper; the server and its children are below it."""
        return self._process.pid

    def check_alive(self) -> None:
        """Raises EngineError with the end of the log when the server has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineError(
                f"the engine at {self.address} (process {self.pid}) ended with exit code {code}",
                self.log,
            )

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when the server answers; EngineError when it ends before or takes longer."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check_alive()
            if is_healthy(self.address):
                return
            time.sleep(POLL_S)
        raise EngineError(
            f"the engine at {self.address} did not answer within {timeout_s:.0f} s of its start",
            self.log,
        )

    def ask_to_stop(self) -> None:
        """Begins to end the server and its children."""
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """Ends the server and its children, the hard way where asking does not help."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def is_healthy(address: str) -> bool:
    """Whether a server answers there and can serve."""
    try:
        return httpx.get(address + vllm_api.HEALTH, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def weight_backend(config: EngineConfig) -> str:
    """gloo or nccl; `auto` goes by whether this machine has CUDA."""
    if config.weight_backend != "auto":
        return config.weight_backend
    return "nccl" if torch.cuda.is_available() else "gloo"


def one_interface(host: str) -> str:
    """The IPv4 address of a host or an address; ValueError for what stands for all interfaces."""
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(f"an engine cannot listen on {host!r}: {error.strerror}") from None
    if not host or ipaddress.ip_address(address).is_unspecified:
        raise ValueError(
            f"an engine on {host!r} would listen on all interfaces of the machine; give it "
            f"{LOOPBACK}, or the address of the interface that the job's nodes share"
        )
    return address


def free_port(host: str = LOOPBACK) -> int:
    """A port of the interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server can listen there."""
    try:
        require_free(port, host)
    except ValueError:
        return False
    return True


def require_free(port: int, host: str = LOOPBACK) -> None:
    """ValueError where somebody listens on the port, or where the address is not ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"engine.port={port} cannot be used on {host} ({error.strerror}); set another, or "
                "0 for any"
            ) from None
