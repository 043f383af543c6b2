"""Batch scripts, word for word. `python tests/launch/test_render.py` writes the golden files anew
(with PYTHONPATH=tests:launch)."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from credit_launch.plan import ROLLOUT, Container, Limits, Role, Slurm, from_json, to_json
from credit_launch.render import directives, render
from launch.example_plans import PLANS, SMALL

GOLDEN = Path(__file__).with_name("golden")
SCRIPTS = {
    **{name: (plan, "") for name, plan in PLANS.items()},
    "rollout_jobs.rollout": (PLANS["rollout_jobs"], ROLLOUT),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_the_golden_one(name):
    plan, part = SCRIPTS[name]
    assert render(plan, part) == (GOLDEN / f"{name}.sbatch").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_the_script(name, tmp_path):
    plan, part = SCRIPTS[name]
    script = tmp_path / "job.sbatch"
    script.write_text(render(plan, part))
    found = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


def test_odd_texts_reach_the_programs_unchanged(tmp_path):
    odd = 'it\'s $HOME `id` "x" #1; &'
    plan = replace(SMALL, environment=(("ODD", odd),))
    script = tmp_path / "job.sbatch"
    script.write_text(render(plan).replace('exec "$PYTHON"', 'printf %s "$ODD" #'))
    bash = shutil.which("bash")
    assert subprocess.check_output([bash, str(script)], text=True) == odd


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_survives_its_file(plan):
    assert from_json(to_json(plan)) == plan


def test_nodes_of_the_jobs():
    large, jobs = PLANS["large_with_spares"], PLANS["rollout_jobs"]
    assert (large.job_nodes(), large.total_nodes) == (32 + 28 + 2 + 2, 64)
    assert (jobs.job_nodes(), jobs.job_nodes(ROLLOUT), jobs.total_nodes) == (4, 1, 16)
    assert PLANS["cpu_one_node"].total_nodes == 1
    assert dict(directives(jobs, ROLLOUT))["array"] == "0-11"


def slurm(**changes):
    return {"slurm": replace(SMALL.slurm, **changes)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (slurm(time="0:05:00"), "warn_seconds = 300 is not below the time limit 0:05:00 = 300 s"),
        (slurm(time="5"), "warn_seconds = 300 is not below"),
        (slurm(time="soon"), "time = 'soon' is no time limit"),
        (slurm(partition='gpu"'), "partition = 'gpu\"': a line of sbatch cannot hold a quote"),
        (slurm(account="a\n#SBATCH --uid=0"), "cannot hold a quote, a backslash or a line"),
        (slurm(qos="it's"), "qos"),
        (slurm(constraint="a\rb"), "constraint"),
        (slurm(reservation="'"), "reservation"),
        (slurm(extra=(("comment", 'say "hi"'),)), "extra.comment"),
        (slurm(extra=(("nodes", "3"),)), "--nodes follows from launch.trainer_nodes"),
        (slurm(extra=(("--time", "3"),)), "--time follows from launch.time"),
        (slurm(extra=(("com ment", "3"),)), "'com ment' is no option of sbatch"),
        (slurm(exclude=("n1 n2",)), "exclude: 'n1 n2' is no name of a node"),
        (slurm(prologue=("a\nb",)), "prologue: one line of shell each"),
        ({"run": "/shared/a\nb"}, "run directory"),
        ({"run": "/shared/it's"}, "run directory"),
        ({"environment": (("A B", "1"),)}, "'A B' is no name of a variable"),
        ({"roles": ()}, "the first role must be trainer"),
        ({"roles": (Role("trainer", ("t",), nodes=0),)}, "a role needs at least one node"),
        ({"roles": (Role("trainer", ("t",), gpus=9),)}, "wants 9 GPUs of a node that has 8"),
        ({"roles": (Role("trainer", ()),)}, "trainer has no command"),
        ({"layout": "jobs", "roles": SMALL.roles[:1]}, "takes rollout nodes"),
        ({"hot_spares": True}, "hot_spares = true without spare nodes"),
        ({"container": Container("pyxis", "/nowhere/image.sqsh")}, "there is no such file"),
        ({"container": Container("apptainer", "image.sif")}, "there is no such file"),
        ({"container": Container("pyxis", "")}, "needs container.image"),
        ({"container": Container("docker", "x")}, "none, pyxis or apptainer"),
        ({"container": Container("pyxis", "x", ("/data",))}, "not of the form HOST:CONTAINER"),
        ({"container": Container("pyxis", "x", ("/nowhere:/y",))}, "/nowhere does not exist"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(changes, message):
    with pytest.raises(ValueError) as error:
        render(replace(SMALL, **changes))
    assert message in str(error.value)


def test_a_job_without_limit_may_warn_when_it_likes():
    plan = replace(SMALL, slurm=Slurm("x", time="UNLIMITED"), limits=Limits(warn_seconds=10**6))
    assert "#SBATCH --signal=B:USR1@1000000" in render(plan)


def test_an_image_file_that_exists_is_taken(tmp_path):
    image = tmp_path / "image.sqsh"
    image.touch()
    render(replace(SMALL, container=Container("pyxis", str(image), (f"{tmp_path}:/data:ro",))))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for one, (example, role) in SCRIPTS.items():
        (GOLDEN / f"{one}.sbatch").write_text(render(example, role))
