"""Plans of every kind, as they are on any machine."""

from dataclasses import replace

from credit_launch.plan import Container, Limits, Plan, Role, Slurm

PYTHON = "/opt/venv/bin/python"


def roles(trainer=1, rollout=1, gpus=8):
    """A trainer and its engines, with nodes of their own where there are rollout nodes."""
    command = (PYTHON, "-m", "megatron_credit.trainer.node")
    engines = (PYTHON, "-m", "megatron_credit.trainer.engine_node")
    return (
        Role("trainer", command, nodes=trainer, gpus=gpus, cpus=16),
        Role(
            "rollout",
            engines,
            replicas=max(rollout, 1),
            gpus=gpus,
            cpus=16,
            beside="" if rollout else "trainer",
            max_restarts=3,
            is_essential=False,
        ),
    )


JUDGE = Role(
    "judge", ("judge", "--port", "{port}"), replicas=2, gpus=8, cpus=16, max_restarts=3, serves=True
)

SMALL = Plan(
    run="/shared/runs/small",
    roles=roles(),
    slurm=Slurm("small-0123abcd"),
    gpus_per_node=8,
    cpus_per_node=16,
    python=PYTHON,
    task_python=PYTHON,
    workdir="/home/ada/work",
)

PLANS = {
    "small": SMALL,
    "cpu_one_node": replace(
        SMALL,
        roles=roles(rollout=0, gpus=0),
        gpus_per_node=0,
        slurm=Slurm("cpu-0123abcd", time="90", partition="cpu"),
    ),
    "odd_texts": replace(
        SMALL,
        run="/shared/runs/100% of it #1",
        slurm=Slurm(
            "odd-0123abcd",
            constraint="h100&ib",
            extra=(("comment", "x=1 # y"), ("mem", "900G"), ("contiguous", "")),
            prologue=("module load cuda/13", 'echo "on $(hostname)"'),
        ),
        environment=(("GREETING", "it's $HOME"), ("LIST", "a b;c")),
    ),
    "large_with_spares": replace(
        SMALL,
        roles=(*roles(trainer=32, rollout=28), JUDGE),
        spare_nodes=2,
        hot_spares=True,
        slurm=Slurm(
            "large-0123abcd",
            time="7-0",
            partition="gpu",
            account="lab",
            qos="high",
            reservation="week",
            exclude=("n7", "n[20-22]"),
        ),
        limits=Limits(warn_seconds=900),
    ),
    "rollout_jobs": replace(SMALL, roles=roles(trainer=4, rollout=12), layout="jobs"),
    "pyxis": replace(
        SMALL,
        container=Container("pyxis", "nvcr.io#nvidia/pytorch:25.10-py3", ()),
        python="python3",
        task_python="python3",
        workdir="",
    ),
}
