"""A node with real engines, as the supervisor of a launched run starts it, and its fleet."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
from rollouts.engine_checks import announced
from rollouts.stub_engine import wait_for

from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.fleet import Fleet
from megatron_credit.rollouts.registry import Entry, Registry
from megatron_credit.trainer.load_config import load_config

ROOT = Path(__file__).parents[2]
KEY = "the-key-of-this-run"
CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=320,
    max_num_seqs=32,
    kv_cache_mib=64,
    request_timeout_s=300,
    startup_timeout_s=400,
    sync_timeout_s=60,
    hang_timeout_s=20,
    bucket_mib=1,
    weight_backend="gloo",
)


class Node(NamedTuple):
    """A running engine node."""

    process: subprocess.Popen
    run: Path
    registry: Registry
    log: Path

    @property
    def failure(self) -> Path:
        return self.run / "launch" / "attempt-001" / "failure.json"


@contextmanager
def started_node(
    path: Path, config: EngineConfig = CONFIG, *, engines: int = 2, restarts: int = 5
) -> Iterator[Node]:
    """A node of engines that serve the model in path/model."""
    attempt = path / "launch" / "attempt-001"
    attempt.mkdir(parents=True)
    run = load_config(
        ROOT / "configs" / "quickstart.toml",
        [
            f"run.directory={path}",
            f"policy.model={path / 'model'}",
            "launch.gpus_per_node=0",
            f"launch.engines_per_node={engines}",
            f"launch.max_restarts={restarts}",
        ],
    ).model_copy(update={"engine": config})
    (path / "launch" / "config.json").write_text(run.model_dump_json())
    places = {"role": "rollout", "nodes": [{"name": "local1", "address": "127.0.0.1"}]}
    topology = {
        "run": str(path),
        "attempt": 1,
        "job": "7",
        "local": True,
        "port": 10000,
        "engines": str(attempt / "engines"),
        "tasks": {"rollout-0": places},
    }
    (attempt / "topology.json").write_text(json.dumps(topology))
    environment = os.environ | {
        "CREDIT_ATTEMPT": str(attempt),
        "CREDIT_TASK": "rollout-0",
        "CREDIT_NODE": "local1",
        "MEGATRON_CREDIT_ENGINE_KEY": KEY,
    }
    with (path / "node.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_credit.trainer.engine_node"],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        registry = Registry(attempt / "engines", logs=path / "logs")
        yield Node(process, path, registry, path / "node.log")
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def fleet_of(node: Node, tensors, config: EngineConfig = CONFIG, *, engines: int = 2):
    """All engines of the node, with these weights as version 1."""
    fleet = Fleet(node.registry, config, api_key=KEY)
    fleet.wait_ready(config.startup_timeout_s)
    wait_for(lambda: len(fleet.current() + fleet.newcomers()) >= engines, 400)
    fleet.send(announced(tensors), iter(tensors), 1)
    assert len(fleet.current()) == engines
    yield fleet
    fleet.close()


def generate_with_newcomers(fleet: Fleet, requests, tensors, disturb=lambda: None):
    """The answers, while this thread disturbs, then gives weights to engines that come."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fleet.generate, requests)
        disturb()
        while not asked.done():
            give_newcomers(fleet, tensors)
        return asked.result()


def give_newcomers(fleet: Fleet, tensors) -> None:
    if fleet.newcomers():
        fleet.send_to_newcomers(announced(tensors), iter(tensors))


def wait_complete(fleet: Fleet, tensors, engines: int = 2) -> None:
    """Returns when so many engines have the current weights again."""

    def is_complete():
        give_newcomers(fleet, tensors)
        return len(fleet.current()) == engines

    wait_for(is_complete, 400)


def tree_of(entry: Entry) -> list[psutil.Process]:
    """The engine's keeper, server and what is below."""
    keeper = psutil.Process(entry.pid)
    return [keeper, *keeper.children(recursive=True)]


def core_of(entry: Entry) -> psutil.Process:
    """The process of the engine that computes."""
    return next(one for one in tree_of(entry) if "EngineCore" in one.name())
