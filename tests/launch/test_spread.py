"""Nodes of the roles: the configured ones, those of --nodes, and the refusals."""

import math
from pathlib import Path

import pytest
from credit_launch.render import render

from megatron_credit.mcore.config import ParallelConfig
from megatron_credit.trainer.launching.build import build_plan, resolve
from megatron_credit.trainer.launching.spread import trainer_unit
from megatron_credit.trainer.load_config import load_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "launch").glob("*.toml"))
SMALL, LARGE = CONFIGS[0], ROOT / "configs/launch/qwen3_235b_a22b_64_nodes.toml"
DENSE = ROOT / "configs/launch/qwen3_8b_2_nodes.toml"
FEWEST = {
    "cpu_two_nodes": 1,
    "qwen3_8b_2_nodes": 1,
    "qwen3_32b_16_nodes": 3,
    "qwen3_235b_a22b_64_nodes": 11,
    "qwen3_coder_480b_512_nodes": 9,
}

OWN_SIZE = {
    "cpu_two_nodes": 2,
    "qwen3_8b_2_nodes": 2,
    "qwen3_32b_16_nodes": 16,
    "qwen3_235b_a22b_64_nodes": 64,
    "qwen3_coder_480b_512_nodes": 512,
}


def sizes(path, nodes, *overrides):
    """Trainer nodes, rollout nodes, ranks a node, all nodes of the plan."""
    resolved = resolve(load_config(path, list(overrides)), nodes)
    launch = resolved.launch
    total = build_plan(resolved).total_nodes
    return launch.trainer_nodes, launch.rollout_nodes, launch.ranks_per_node, total


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("nodes", [None, 1, 2, 64, 512, 2048])
def test_every_shipped_config_at_every_size_or_a_clear_refusal(path, nodes):
    config = load_config(path, [])
    fewest = FEWEST[path.stem]
    if nodes is not None and nodes < fewest:
        with pytest.raises(ValueError, match=f"use at least {fewest} nodes"):
            resolve(config, nodes)
        return
    resolved = resolve(config, nodes)
    plan = build_plan(resolved)
    assert plan.total_nodes == (nodes or OWN_SIZE[path.stem])
    assert render(plan).startswith("#!/bin/bash\n#SBATCH --job-name=")
    assert resolved.num_processes == resolved.launch.num_trainer_ranks
    assert resolved.num_processes % trainer_unit(resolved.parallel) == 0


def test_the_table_of_fewest_nodes_is_of_the_shipped_configs():
    assert set(FEWEST) == {path.stem for path in CONFIGS}
    for path in CONFIGS:
        assert sizes(path, FEWEST[path.stem])[3] == FEWEST[path.stem]


@pytest.mark.parametrize(
    ("path", "nodes", "expected"),
    [
        (SMALL, 1, (1, 0, 2, 1)),
        (SMALL, 7, (4, 3, 2, 7)),
        (DENSE, 1, (1, 0, 4, 1)),
        (DENSE, 3, (2, 1, 8, 3)),
        (LARGE, None, (32, 30, 8, 64)),
        (LARGE, 11, (8, 1, 8, 11)),
        (LARGE, 30, (16, 12, 8, 30)),
        (LARGE, 512, (264, 246, 8, 512)),
    ],
)
def test_the_split_keeps_the_ratio_in_whole_models(path, nodes, expected):
    assert sizes(path, nodes) == expected


def test_spares_and_services_stay_as_they_are():
    service = 'launch.services=[{name="judge", command=["serve"], nodes=2}]'
    assert sizes(DENSE, 8, service, "launch.spare_nodes=1") == (2, 3, 8, 8)
    with pytest.raises(ValueError, match="spares and services take 3; use at least 4 nodes"):
        resolve(load_config(DENSE, [service, "launch.spare_nodes=1"]), 3)


@pytest.mark.parametrize(
    ("overrides", "nodes", "message"),
    [
        (["launch.trainer_nodes=9"], None, "no multiple of 64"),
        (["launch.trainer_nodes=9"], None, "use 8 or 16 trainer nodes"),
        (["launch.trainer_nodes=3"], None, "use 8 trainer nodes"),
        ([], 0, "--nodes 0"),
        ([], -3, "--nodes -3"),
    ],
)
def test_worlds_that_hold_no_whole_models(overrides, nodes, message):
    with pytest.raises(ValueError) as error:
        resolve(load_config(LARGE, overrides), nodes)
    assert message in str(error.value)


def test_the_unit_is_whole_replicas_and_whole_groups_of_experts():
    assert trainer_unit(ParallelConfig(tensor=4, pipeline=2, context=3)) == 24
    assert trainer_unit(ParallelConfig(tensor=2, pipeline=3, expert=8)) == math.lcm(6, 24)


def test_engines_beside_the_trainer_share_its_gpus_and_cores():
    plan = build_plan(resolve(load_config(DENSE, []), 1))
    trainer, rollout = plan.roles
    assert (trainer.gpus, rollout.gpus, rollout.beside) == (4, 4, "trainer")
    assert (trainer.cpus, rollout.cpus) == (32, 32)


def test_jobs_become_one_job_where_the_engines_have_no_nodes():
    resolved = resolve(load_config(DENSE, ['launch.layout="jobs"']), 1)
    assert resolved.launch.layout == "one"
    render(build_plan(resolved))


def test_paths_are_absolute_wherever_tasks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resolved = resolve(load_config(DENSE, []))
    assert resolved.policy.model == tmp_path / "models" / "Qwen3-8B"
    assert resolved.run.directory == tmp_path / "runs" / "launch" / "qwen3_8b"
    assert resolved.data.train[0].path == tmp_path / "data" / "train.parquet"
    assert build_plan(resolved).run == str(resolved.run.directory)


def test_engines_that_run_elsewhere_get_no_nodes():
    overrides = ["engine.address=http://10.0.0.1:8000"]
    plan = build_plan(resolve(load_config(DENSE, overrides)))
    assert [role.name for role in plan.roles] == ["trainer"]
