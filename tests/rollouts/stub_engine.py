"""An engine over HTTP without a model: its answer to a request is a function of the request."""

import http.server
import json
import threading
import time
from contextlib import contextmanager

from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.fleet import Fleet
from megatron_credit.rollouts.registry import Entry, Registry

KEY = "stub-key"
POISON = 666
"""A prompt that begins with it ends the engine that gets it."""
CONFIG = EngineConfig(
    max_model_len=64,
    max_num_seqs=8,
    request_timeout_s=30,
    startup_timeout_s=20,
    sync_timeout_s=10,
    hang_timeout_s=5,
    weight_backend="gloo",
)


class StubEngine:
    """Serves in threads of this process until it is told to die, hang or lie."""

    def __init__(self, name, registry=None):
        self.name = name
        self.registry = registry
        self.delay_s = 0.0
        self.is_hanging = False
        self.version = "default"
        self.answered = []
        """First token and seed of each request that was answered."""
        self.asked = []
        """Paths of all other requests, with their bodies."""
        self.refusals = {}
        """Path -> status that it is answered with."""
        self.entry = None
        self._starts = 0
        self._server = None

    def start(self):
        """A new incarnation, on a new port, with weights of its own."""
        self._starts += 1
        self.version, self.is_hanging = "default", False
        self._server = server = Server(("127.0.0.1", 0), Handler)
        server.engine = self
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        self.address = f"http://127.0.0.1:{server.server_port}"
        self.entry = Entry(
            name=self.name, address=self.address, incarnation=f"{self.name}-{self._starts}"
        )
        if self.registry is not None:
            self.registry.publish(self.entry)

    def die(self):
        """As by kill -9: connections break, nobody listens."""
        server, self._server = self._server, None
        if server is not None:
            server.is_dead = True
            server.server_close()
            threading.Thread(target=server.shutdown, daemon=True).start()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    is_dead = False


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_one_request(self):
        super().handle_one_request()
        self.close_connection = self.close_connection or self.server.is_dead

    def do_GET(self):
        engine = self.server.engine
        while engine.is_hanging and self.path == "/is_paused":
            time.sleep(0.05)
        answers = {"/weight_info": {"weight_version": engine.version}}
        self.answer(answers.get(self.path, {"is_paused": False}))

    def do_POST(self):
        engine = self.server.engine
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null")
        if self.headers.get("authorization") != f"Bearer {KEY}":
            self.answer({}, 401)
        elif self.path == "/inference/v1/generate":
            self.generate(engine, body)
        else:
            engine.asked.append((self.path, body))
            if self.path == "/finish_weight_update":
                engine.version = body["weight_version"]
            self.answer({"success": True}, engine.refusals.get(self.path, 200))

    def generate(self, engine, body):
        first, parameters = body["token_ids"][0], body["sampling_params"]
        if first == POISON:
            engine.die()
            self.close_connection = True
            return
        end = time.monotonic() + engine.delay_s
        while engine.is_hanging or time.monotonic() < end:
            if self.server.is_dead:
                self.close_connection = True
                return
            time.sleep(0.01)
        if self.server.is_dead:
            self.close_connection = True
            return
        engine.answered.append((first, parameters["seed"]))
        choice = {
            "token_ids": [first, parameters["seed"]],
            "logprobs": {"content": [{"logprob": -0.5}] * 2},
            "finish_reason": "stop",
            "weight_versions": [{"version": engine.version, "start": 0, "end": 2}],
            "routed_experts": None,
        }
        choices = [choice | {"index": index} for index in range(parameters["n"])]
        self.answer({"choices": choices})

    def answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class NoTensors:
    """A sender whose engines have the weights when they say so."""

    def send(self, engines, pieces, weights, *, version):
        engines.ask("/start_weight_update", None, "start")
        for _ in weights:
            pass
        engines.ask("/finish_weight_update", {"weight_version": str(version)}, "finish")

    def forget(self, client):
        pass

    def close(self):
        pass


@contextmanager
def stub_fleet(tmp_path, names, config=CONFIG):
    """A fleet over a registry, the registered engines by name, and weights of version 1."""
    registry = Registry(tmp_path / "engines", logs=tmp_path)
    engines = {name: StubEngine(name, registry) for name in names}
    for engine in engines.values():
        engine.start()
    fleet = Fleet(registry, config, api_key=KEY)
    fleet._sync._sender = NoTensors()
    fleet.wait_ready(20)
    wait_for(lambda: len(fleet.newcomers() + fleet.current()) == len(engines))
    fleet.send([], iter([]), 1)
    assert len(fleet.current()) == len(engines)
    try:
        yield fleet, engines
    finally:
        fleet.close()
        for engine in engines.values():
            engine.die()


def wait_for(condition, timeout_s=120.0):
    """Returns when the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
