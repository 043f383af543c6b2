"""The srun of a step, and what puts it into a container."""

from dataclasses import replace
from pathlib import Path

from credit_launch.cluster import Step
from credit_launch.container import for_container
from credit_launch.plan import Container
from credit_launch.slurm import srun_command
from credit_launch.topology import Node
from launch.example_plans import PLANS, SMALL

STEP = Step(
    name="rollout-1",
    nodes=[Node("n3", "n3")],
    command=["python", "-m", "engines"],
    variables={"CREDIT_TASK": "rollout-1", "MEGATRON_CREDIT_ENGINE_KEY": "hush"},
    logs=Path("/shared/runs/50% off/launch/attempt-001/logs"),
    gpus=8,
    cpus=16,
)


def test_every_resource_is_repeated_and_no_secret_is_said():
    assert srun_command(SMALL, STEP) == [
        "srun",
        "--job-name=rollout-1",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--nodelist=n3",
        "--cpus-per-task=16",
        "--gpus-per-node=8",
        "--kill-on-bad-exit=1",
        "--wait=30",
        "--overlap",
        "--unbuffered",
        "--output=/shared/runs/50%% off/launch/attempt-001/logs/rollout-1.%N.log",
        "--open-mode=append",
        "python",
        "-m",
        "engines",
    ]


def test_a_shared_node_deals_its_gpus_out():
    command = srun_command(SMALL, replace(STEP, shares=True, gpus=4))
    assert "--exact" in command and "--overlap" not in command
    assert "--overlap" in srun_command(SMALL, replace(STEP, shares=True, gpus=0))


def test_checks_of_nodes_outlive_the_first_bad_one():
    command = srun_command(SMALL, replace(STEP, ends_together=False, one_log=True))
    assert "--kill-on-bad-exit=0" in command and "--label" in command
    assert "--wait=30" not in command
    assert command[command.index("--label") + 1].endswith("logs/rollout-1.log")


def test_with_hot_spares_a_lost_node_ends_no_step():
    plan = PLANS["large_with_spares"]
    many = replace(STEP, nodes=[Node("n1", "n1"), Node("n2", "n2")])
    assert "--no-kill" in srun_command(plan, STEP)
    assert "--no-kill" in srun_command(plan, replace(many, ends_together=False))
    # Ranks that lost a peer would wait for it.
    assert "--no-kill" not in srun_command(plan, many)


def test_pyxis_gets_names_of_variables_and_no_values():
    plan = replace(PLANS["pyxis"], container=Container("pyxis", "img", ("/data:/data:ro",)))
    command = srun_command(plan, STEP)
    start = command.index("--container-image=img")
    assert command[start:] == [
        "--container-image=img",
        "--container-mounts=/shared/runs/small:/shared/runs/small,/data:/data:ro",
        "--container-workdir=/shared/runs/small",
        "--no-container-mount-home",
        "--container-env=CREDIT_TASK,MEGATRON_CREDIT_ENGINE_KEY",
        "python",
        "-m",
        "engines",
    ]
    assert "img" not in " ".join(srun_command(plan, replace(STEP, outside_container=True)))


def test_apptainer_stands_before_the_program():
    plan = replace(PLANS["pyxis"], container=Container("apptainer", "docker://img", ("/d:/d",)))
    command = srun_command(plan, STEP)
    assert command[command.index("apptainer") :] == [
        *("apptainer", "exec", "--nv", "--no-home"),
        *("--bind", "/shared/runs/small:/shared/runs/small", "--bind", "/d:/d"),
        *("--pwd", "/shared/runs/small", "docker://img", "python", "-m", "engines"),
    ]
    assert for_container(plan, {"A": "1"}) == {"A": "1", "APPTAINERENV_A": "1"}
    assert for_container(SMALL, {"A": "1"}) == {"A": "1"}
