"""The engines of a node: devices, addresses, restarts, and the reason when none can be kept."""

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from rollouts.engine_checks import dense_model
from rollouts.node_checks import started_node
from rollouts.stub_engine import wait_for

from megatron_credit.rollouts.engine_log import EngineLog
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.registry import Registry
from megatron_credit.rollouts.server import EngineServer, Seat, one_interface
from megatron_credit.trainer import engine_node
from megatron_credit.trainer.engine_node import EngineNode, Post, engine_devices, own_address
from megatron_credit.trainer.load_config import load_config
from megatron_credit.trainer.place import Place
from megatron_credit.trainer.worker_environment import visible_devices

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
PLACE = Place(
    run=Path("run"),
    attempt=Path("run/launch/attempt-001"),
    number=1,
    task="rollout-1",
    nodes=("n4",),
    addresses=("127.0.0.1",),
    node_rank=0,
    port=10000,
    engines=Path("engines"),
    is_local=True,
)


def config_of(*overrides):
    return load_config(QUICKSTART, list(overrides))


def test_every_engine_gets_devices_of_its_own():
    apart = config_of("launch.gpus_per_node=8", "engine.tensor_parallel=2")
    assert engine_devices(apart, 4, None) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    named = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
    assert engine_devices(apart, 2, named) == [["GPU-a", "GPU-b"], ["GPU-c", "GPU-d"]]
    shared = config_of(
        "launch.rollout_nodes=0", "launch.gpus_per_node=4", "launch.ranks_per_node=1"
    )
    assert engine_devices(shared, 3, None) == [["1"], ["2"], ["3"]]
    assert engine_devices(shared, 3, ["1", "2", "3"]) == [["1"], ["2"], ["3"]]
    assert engine_devices(config_of("launch.gpus_per_node=0"), 2, None) == [(), ()]
    with pytest.raises(ValueError, match=r"3 engines of 2 GPUs .* need 6 GPUs, this node has 4"):
        engine_devices(apart, 3, named)


def test_devices_that_the_environment_names():
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "2,3"}) == ["2", "3"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_devices({}) is None


def test_the_address_is_one_that_others_reach():
    config = config_of()
    assert own_address(config, PLACE) == "127.0.0.1"
    with pytest.raises(ValueError, match=r"n4 finds itself at 127\.0\.0\.1.*launch\.interface"):
        own_address(config, replace(PLACE, is_local=False))
    assert own_address(config_of("launch.interface=lo"), PLACE) == "127.0.0.1"
    with pytest.raises(ValueError, match=r"launch\.interface='ib7' has no IPv4 address .* lo"):
        own_address(config_of("launch.interface=ib7"), PLACE)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "0"])
def test_all_interfaces_are_refused(host):
    with pytest.raises(ValueError, match="all interfaces"):
        one_interface(host)


def test_an_address_of_another_machine_is_refused(tmp_path):
    seat = Seat(host="192.0.2.1", port=8000)
    with pytest.raises(ValueError, match=r"engine\.port=8000 cannot be used on 192\.0\.2\.1"):
        EngineServer.start(
            Path("none"), config_of().engine, log_path=tmp_path / "log", seed=0, seat=seat
        )
    assert "api_key" not in repr(Seat(api_key="hidden")) and "hidden" not in repr(seat)


class FakeServer:
    """An engine that lives until a test ends it."""

    started: ClassVar[list] = []

    def __init__(self, seat, log_path):
        self.seat, self.log = seat, EngineLog(log_path)
        self.address = f"http://127.0.0.1:{len(self.started)}"
        self.pid = 100 + len(self.started)
        self.is_dead = self.is_stopped = False
        self.started.append(self)

    def check_alive(self):
        if self.is_dead:
            raise EngineError(f"{self.address} ended with exit code -9", self.log)

    def ask_to_stop(self):
        self.is_stopped = True

    stop = ask_to_stop


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node of two engines with one restart each, whose loop a test turns by hand."""
    monkeypatch.setattr(FakeServer, "started", [])
    monkeypatch.setattr(
        EngineServer,
        "start",
        lambda _model, _config, *, seat, log_path, **_: FakeServer(seat, log_path),
    )
    monkeypatch.setattr(engine_node, "is_healthy", lambda _: True)
    posts = [
        Post(f"rollout-0.{k}", Seat(api_key="key", devices=[str(k)]), tmp_path / f"{k}.log", 1)
        for k in range(2)
    ]
    node = EngineNode(config_of(), posts, Registry(tmp_path / "engines"), node="n4")
    node.posts, node.registry = posts, Registry(tmp_path / "engines")
    for post in posts:
        node._start(post)
    return node


def turn(node):
    for post in node.posts:
        if post.server is not None:
            node._watch(post)


def test_engines_are_registered_restarted_and_given_up(node):
    turn(node)
    first, second = node.registry.entries()
    assert (first.name, first.node, first.pid) == ("rollout-0.0", "n4", 100)
    FakeServer.started[0].is_dead = True
    turn(node)
    assert node.registry.entries() == [second]  # the new start has not answered yet
    turn(node)
    again, _ = node.registry.entries()
    assert again.name == first.name and again.incarnation != first.incarnation
    assert [server.seat.devices for server in FakeServer.started] == [["0"], ["1"], ["0"]]
    node.registry.condemn(first, "of an earlier start")
    turn(node)
    assert len(FakeServer.started) == 3
    node.registry.condemn(again, "it hangs")
    turn(node)
    assert FakeServer.started[2].is_stopped and len(FakeServer.started) == 3
    assert node.registry.entries() == [second] and "it hangs" in node.reason
    assert node.posts[0].server is None and node.posts[1].server is not None


def test_an_engine_that_never_answers_is_replaced(node, monkeypatch):
    monkeypatch.setattr(engine_node, "is_healthy", lambda _: False)
    turn(node)
    node.posts[1].since -= node._config.engine.startup_timeout_s + 1
    turn(node)
    assert FakeServer.started[1].is_stopped and len(FakeServer.started) == 3
    assert "did not answer within 300 s of its start" in node.reason


def test_a_taken_port_costs_nothing():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        seat = engine_node.with_free_port(Seat(port=port, api_key="key", devices=["3"]))
    assert (seat.port, seat.api_key, seat.devices) == (0, "key", ["3"])


def test_no_engine_can_be_kept(tmp_path):
    """Each start fails; the reason, with the end of the log, is the attempt's."""
    dense_model().save_pretrained(tmp_path / "model")
    broken = json.loads((tmp_path / "model" / "config.json").read_text()) | {"hidden_size": 0}
    (tmp_path / "model" / "config.json").write_text(json.dumps(broken))
    with started_node(tmp_path, engines=1, restarts=1) as node:
        wait_for(lambda: node.process.poll() is not None, 400)
        assert node.process.returncode == 1
        failure = json.loads(node.failure.read_text())
    assert failure["retry"] is True and failure["task"] == "rollout-0"
    assert "ended with exit code" in failure["reason"]
    assert f"the end of {tmp_path}/logs/engine-rollout-0.0.log" in failure["reason"]
    assert "1 restarts left" not in node.log.read_text()
    assert "0 restarts left" in node.log.read_text()


def test_the_node_ends_with_its_parent(tmp_path):
    """Nobody is left to end it: the kernel does, and the engines go with it."""
    program = f"""
import sys, time
sys.path.insert(0, ".")
from pathlib import Path
from rollouts.node_checks import started_node
with started_node(Path({str(tmp_path)!r}), engines=1) as node:
    while "starts at" not in node.log.read_text():
        time.sleep(0.05)
    print(node.process.pid, node.log.read_text().split("(process ")[1].split(")")[0], flush=True)
    time.sleep(300)
"""
    dense_model().save_pretrained(tmp_path / "model")
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    found = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.communicate()
    assert len(found) == 2
    _, alive = psutil.wait_procs(found, timeout=60)
    assert all(one.status() == psutil.STATUS_ZOMBIE for one in alive)
