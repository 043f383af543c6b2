"""The lab itself: a test that trusts it must not pass because a node never broke."""

import subprocess
import sys
from pathlib import Path

import pytest
from slurm.lab import Lab, wait_for

pytestmark = pytest.mark.slurm

SHOW = 'srun -N2 -n2 --gpus-per-node=8 bash -c "hostname; id -un; echo gpus=$CUDA_VISIBLE_DEVICES"'


def output(lab, name):
    return (lab.site.home / name).read_text().split()


def state(lab, job):
    return lab.call("scontrol", "show", "job", "-o", job)


@pytest.mark.beside
def test_a_job_runs_as_the_user_on_nodes_with_names_and_gpus(lab):
    job = lab.call(
        "sbatch",
        "--parsable",
        "--exclusive",
        "-N2",
        "--gpus-per-node=8",
        "-o",
        "shown",
        f"--wrap={SHOW}",
    ).strip()
    wait_for(lambda: "JobState=COMPLETED" in state(lab, job), "the end of the job")
    words = output(lab, "shown")
    assert words.count(lab.site.user) == 2 and words.count("gpus=0,1,2,3,4,5,6,7") == 2
    assert len({word for word in words if word in lab.site.nodes}) == 2


@pytest.mark.beside
def test_a_node_without_power_has_no_processes_and_its_job_starts_anew(lab):
    script = "echo started >> restarted; sleep 300"
    job = lab.call(
        "sbatch", "--parsable", "--exclusive", "-N1", "--requeue", f"--wrap={script}"
    ).strip()
    wait_for(lambda: "JobState=RUNNING" in state(lab, job), "the start of the job")
    node = state(lab, job).split("BatchHost=")[1].split()[0]
    wait_for(lambda: any("sleep 300" in line for line in lab.processes(node)), "the sleep")
    lab.crash(node)
    assert lab.processes(node) == []
    wait_for(lambda: lab.node_states()[node].startswith("down"), "Slurm to notice")
    wait_for(lambda: "Restarts=1" in state(lab, job), "the second start")
    lab.revive(node)
    wait_for(lambda: output(lab, "restarted") == ["started"] * 2, "two starts")
    lab.call("scancel", job)
    wait_for(lambda: lab.node_states()[node] == "idle", "the node to be back")


@pytest.mark.beside
def test_a_node_without_its_cable_runs_on_alone(lab):
    job = lab.call(
        "sbatch", "--parsable", "--exclusive", "-N1", "--no-requeue", "--wrap=sleep 301"
    ).strip()
    wait_for(lambda: "JobState=RUNNING" in state(lab, job), "the start of the job")
    node = state(lab, job).split("BatchHost=")[1].split()[0]
    wait_for(lambda: any("sleep 301" in line for line in lab.processes(node)), "the sleep")
    lab.unplug(node)
    wait_for(lambda: lab.node_states()[node].startswith("down"), "Slurm to notice")
    assert any("sleep 301" in line for line in lab.processes(node))
    lab.plug(node)
    wait_for(lambda: lab.node_states()[node] == "idle", "the node to be back")
    wait_for(lambda: lab.processes(node) == [], "the orphan's end")


KILLED = """
import sys
sys.path[:0] = sys.argv[1:]
from slurm.lab import Lab
lab = Lab.free(2).__enter__()
sys.stdout.write(f"{lab.site.slot}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def running(directory):
    """Command lines of daemons that belong to a lab."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SLURM_CONF={directory}" in path.read_text(errors="replace"):
                found.append(path.with_name("cmdline").read_text())
        except OSError:  # gone meanwhile
            continue
    return [line for line in found if line]


@pytest.mark.beside
def test_a_killed_test_run_leaves_nothing_that_runs_and_its_files_go_with_the_next(lab):
    tests = Path(__file__).parents[1]
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tests), str(tests.parent / "launch")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        slot = int(child.stdout.readline())
        directory = Path(f"/run/megatron-credit-lab-{slot}")
        assert slot != lab.site.slot
        assert len(running(directory)) >= 3  # slurmctld and two slurmd
    finally:
        child.kill()
        child.wait()
    wait_for(lambda: not running(directory), "the end of the killed lab")
    assert directory.is_dir()
    with Lab.free(2) as next_lab:
        assert next_lab.site.slot == slot
        assert set(next_lab.node_states().values()) == {"idle"}
    assert not directory.exists() and not next_lab.site.home.exists()
