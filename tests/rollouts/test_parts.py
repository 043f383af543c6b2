"""What of the rollout side needs no engine: buckets, the key, engines that are not there."""

import asyncio
import http.server
import socket
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_credit.rollouts import guard, vllm_api
from megatron_credit.rollouts.buckets import Piece, bucket_bytes, pack, plan_buckets, unpack
from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.engine_log import EngineLog
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.server import EngineServer

DTYPES = [torch.float32, torch.bfloat16]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.sampled_from(DTYPES))),
    limit=st.integers(1, 120),
)
def test_buckets_bring_every_tensor_back(sizes, limit):
    tensors = [
        (f"t{number}", torch.randn(columns, rows).T.to(dtype))  # not contiguous
        for number, (rows, columns, dtype) in enumerate(sizes)
    ]
    pieces = [Piece(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
    stream, received = iter(tensors), []
    for bucket in plan_buckets(pieces, limit):
        assert bucket_bytes(bucket) <= limit or len(bucket) == 1
        received += list(unpack(bucket, pack(bucket, stream)))
    assert [name for name, _ in received] == [name for name, _ in tensors]
    for (_, mine), (_, sent) in zip(received, tensors, strict=True):
        assert torch.equal(mine, sent)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("b", torch.zeros(2))], "brought b .* announced was a"),
        ([("a", torch.zeros(3))], r"brought a torch.float32 \(3,\)"),
        ([("a", torch.zeros(2).double())], "brought a torch.float64"),
        ([], "brought the end"),
    ],
)
def test_a_stream_that_differs_from_its_announcement_is_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        pack([Piece("a", torch.float32, (2,))], iter(tensors))


def ask(headers, path="/pause"):
    """Status that the guard answers, 200 when it lets the request through."""
    answers = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        answers.append(message)

    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(guard.RequireKey(app)(scope, None, send))
    return answers[0]["status"]


def test_the_guard_lets_nobody_in_without_the_key(monkeypatch):
    monkeypatch.setenv(guard.KEY_VARIABLE, "secret")
    assert ask([(b"authorization", b"Bearer secret")]) == 200
    assert ask([(b"authorization", b"Bearer other")]) == 401
    assert ask([(b"authorization", b"secret")]) == 401
    assert ask([]) == 401
    assert ask([], path="/health") == 200
    assert ask([], path="/update_weights") == 401


def test_nothing_listens_there():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    client = EngineClient(address, request_timeout_s=1)
    with pytest.raises(EngineError, match=f"start: the engine at {address} does not answer"):
        client.wait_ready(0.5)
    with pytest.raises(EngineError, match=r"weight version: the engine at .* broke the connection"):
        client.weight_version()


class OtherServer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *_):
        pass


def test_something_else_answers_there():
    server = http.server.HTTPServer(("127.0.0.1", 0), OtherServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = EngineClient(f"http://127.0.0.1:{server.server_port}", request_timeout_s=2)
    with pytest.raises(EngineError, match="answered something that is not JSON"):
        client.wait_ready(5)
    server.shutdown()


def test_a_hanging_engine_is_given_up(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("line of the log\n")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = EngineClient(address, request_timeout_s=0.5, log=EngineLog(log))
        with pytest.raises(EngineError, match=r"gave no answer within 0.5 s(.|\n)*line of the log"):
            client.reset_prefix_cache()


def server_options(config, backend):
    return vllm_api.server_command(
        Path("model"), config, port=1, seed=0, backend=backend, routed_experts=True
    )


def test_routed_experts_are_asked_for_in_the_way_of_the_backend():
    config = EngineConfig(max_model_len=64)
    on_gpu = server_options(config, "nccl")
    assert "--enable-return-routed-experts" in on_gpu
    on_cpu = server_options(config, "gloo")
    assert "--no-enable-prefix-caching" in on_cpu
    recorders = [option for option in on_cpu if ".cpu_routing." in option]
    assert [option.split("=")[0] for option in recorders] == ["--worker-cls", "--scheduler-cls"]


def test_routed_experts_of_several_cpu_ranks_are_refused():
    config = EngineConfig(max_model_len=64, tensor_parallel=2)
    with pytest.raises(ValueError, match=r"engine\.tensor_parallel=2: .* policy\.router_replay"):
        server_options(config, "gloo")


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = EngineConfig(port=taken.getsockname()[1], max_model_len=64)
        with pytest.raises(ValueError, match=r"engine\.port=[0-9]+ cannot be used"):
            EngineServer.start(Path("none"), config, log_path=tmp_path / "log", seed=0)
    assert not (tmp_path / "log").exists()


class ClosesIdleConnections(http.server.BaseHTTPRequestHandler):
    """Answers, and breaks a connection that is used again after more than 3 s."""

    protocol_version = "HTTP/1.1"
    last = None

    def do_GET(self):
        if self.last is not None and time.monotonic() - self.last > 3:
            self.close_connection = True
            return
        body = b'{"weight_version": "4"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.last = time.monotonic()

    def log_message(self, *_):
        pass


def test_an_idle_connection_is_not_trusted_for_long():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ClosesIdleConnections)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = EngineClient(f"http://127.0.0.1:{server.server_port}", request_timeout_s=5)
    assert client.weight_version() == 4
    time.sleep(3.2)
    assert client.weight_version() == 4
    server.shutdown()


class BreaksUsedConnections(http.server.BaseHTTPRequestHandler):
    """Answers the first request of a connection and closes it at the second."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []
    is_used = False

    def answer(self):
        self.asked.append(self.path)
        if self.is_used:
            self.close_connection = True
            return
        self.is_used = True
        body = b'{"weight_version": "4"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


def test_a_lost_request_is_repeated_and_control_calls_are_never_lost():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), BreaksUsedConnections)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = EngineClient(f"http://127.0.0.1:{server.server_port}", request_timeout_s=5)
    assert [client.weight_version() for _ in range(3)] == [4, 4, 4]
    asked = BreaksUsedConnections.asked
    asked.clear()
    # Twice would not be the same as once, so each goes over a connection of its own.
    answers = [client.post("/pause", None, 5, "pause") for _ in range(3)]
    assert answers == [{"weight_version": "4"}] * 3
    assert asked == ["/pause"] * 3
    server.shutdown()
