"""What a client does while nobody answers, and what a Gloo group does when a rank leaves."""

import http.server
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_credit.rollouts import connections
from megatron_credit.rollouts.client import EngineClient, GenerateRequest
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.gloo_group import GlooGroup
from megatron_credit.rollouts.gloo_sender import GlooSender, meeting_host
from megatron_credit.rollouts.participants import Participants


class FakeEngine(http.server.BaseHTTPRequestHandler):
    """Answers a generation after a moment, a health check by `status`, nothing else ever."""

    protocol_version = "HTTP/1.1"
    status = 200

    def do_GET(self):
        self.answer({}, type(self).status)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "null")
        if self.path != "/inference/v1/generate":
            time.sleep(30)
            return
        time.sleep(0.002 * (body["token_ids"][0] % 7))  # not in the order of the requests
        choice = {
            "index": 0,
            "token_ids": body["token_ids"],
            "logprobs": {"content": [{"logprob": -0.5}]},
            "finish_reason": "stop",
            "weight_versions": [{"version": "3", "start": 0, "end": 1}],
            "routed_experts": None,
        }
        self.answer({"choices": [choice]}, 200)

    def answer(self, content, status):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(FakeEngine, "status", 200)
    server = Server(("127.0.0.1", 0), FakeEngine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def silent():
    """Takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def request(first):
    return GenerateRequest(
        prompt_ids=[first],
        num_samples=1,
        temperature=1.0,
        max_new_tokens=1,
        stop_token_ids=(),
        seed=0,
    )


def test_more_requests_than_connections_keep_their_order(fake):
    client = EngineClient(fake, request_timeout_s=30)
    number = 3 * connections.MAX_CONNECTIONS
    answers = client.generate([request(first) for first in range(number)])
    assert [samples[0].token_ids for samples in answers] == [[first] for first in range(number)]
    client.close()


def test_the_timeout_holds_for_the_whole_batch(silent):
    client = EngineClient(silent, request_timeout_s=0.6)
    start = time.monotonic()
    number = 3 * connections.MAX_CONNECTIONS
    with pytest.raises(EngineError, match=r"generation: .* gave no answer within 0\.6 s"):
        client.generate([request(first) for first in range(number)])
    assert time.monotonic() - start < 3
    client.close()


def test_an_engine_that_dies_is_not_waited_for(fake):
    client = EngineClient(fake, request_timeout_s=30)
    FakeEngine.status = 503
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"transfer: .* died .*/health says 503"):
        client.post("/update_weights", {}, 30, "weight sync, transfer")
    assert time.monotonic() - start < 5
    client.close()


def test_an_engine_that_is_busy_is_waited_for(silent, monkeypatch):
    """It answers neither the request nor the health check: only the deadline ends that."""
    monkeypatch.setattr("megatron_credit.rollouts.client.HEALTH_S", 0.1)
    monkeypatch.setattr("megatron_credit.rollouts.client.WATCH_S", 0.1)
    client = EngineClient(silent, request_timeout_s=1)
    with pytest.raises(EngineError, match=r"gave no answer within 1\.5 s"):
        client.post("/update_weights", {}, 1.5, "weight sync, transfer")
    client.close()


def test_a_sync_with_a_dead_engine_names_the_phase_at_once(fake):
    """The worker never joins the group, and the request that asks it to is never answered."""
    client = EngineClient(fake, request_timeout_s=30)
    FakeEngine.status = 503
    sender = GlooSender(EngineConfig(max_model_len=8, sync_timeout_s=30))
    engines = Participants([client], timeout_s=30)
    start = time.monotonic()
    sender.send(engines, [], iter([]), version=1)
    assert not engines.live
    assert re.search(r"weight sync, connection: .* died", str(engines.failed[client]))
    assert time.monotonic() - start < 5
    sender.close()
    client.close()


def pair(timeout_s=20.0):
    """Both ranks of a group, in two threads."""
    first = GlooGroup("127.0.0.1", 0, rank=0, world_size=2, timeout_s=timeout_s)
    assert first.absent() == [1]
    second = GlooGroup("127.0.0.1", first.port, rank=1, world_size=2, timeout_s=timeout_s)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(second.join)
        while first.absent():
            time.sleep(0.01)
        first.join()
        joined.result()
    return first, second


def test_broadcasts_under_way_together_arrive_in_order():
    first, second = pair()
    sent = [torch.arange(5), torch.arange(7) * 10]
    taken = [torch.zeros(5, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)]
    for mine, theirs in zip(sent, taken, strict=True):
        first.start_broadcast(mine)
        second.start_broadcast(theirs)
    for group in (first, second, first, second):
        group.finish_broadcast()
    assert [tensor.tolist() for tensor in taken] == [tensor.tolist() for tensor in sent]


def test_who_waits_learns_at_once_that_the_other_left():
    first, second = pair()
    second.start_broadcast(torch.zeros(4))
    start = time.monotonic()
    first.close()
    # The kernel says "reset" where something of ours was still on its way to the other.
    with pytest.raises(RuntimeError, match=r"Connection (closed|reset) by peer"):
        second.finish_broadcast()
    assert time.monotonic() - start < 5


def test_engines_meet_us_where_they_reach_us():
    assert meeting_host("http://127.0.0.1:8000") == "127.0.0.1"
    assert meeting_host("http://localhost:8001") == "127.0.0.1"
    with pytest.raises(OSError):
        meeting_host("http://no-such-host.invalid:8000")
