"""`launch slurm`, `status`, `stop` and `logs` as they are typed, on a pretended Slurm."""

import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from credit_launch.files import LaunchFiles
from credit_launch.plan import read_plan
from launch.fake_slurm import FakeSlurm
from typer.testing import CliRunner

from megatron_credit.cli import app
from megatron_credit.trainer.launching import refusals, site, start

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "configs" / "launch" / "cpu_two_nodes.toml"
LARGE = ROOT / "configs" / "launch" / "qwen3_235b_a22b_64_nodes.toml"


class Desk:
    """Where commands are typed."""

    def __init__(self, root):
        self.root = root
        self.run = root / "a run"
        self.files = LaunchFiles(self.run)

    def type(self, *words, code=0):
        """What the command says."""
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == code, (result.output, result.exception)
        return result.output

    def launch(self, *words, config=SMALL, code=0):
        """`launch slurm` of a configuration in this run directory."""
        keys = f"launch.key_directory={self.root / 'keys'}"
        return self.type(
            *("launch", "slurm", config, "--set", f"run.directory={self.run}", "--set", keys),
            *words,
            code=code,
        )

    def refused(self, *changes, config=SMALL):
        """The words of a refusal of a dry run; nothing is written."""
        words = [word for change in changes for word in ("--set", change)]
        said = self.launch("--dry-run", *words, config=config, code=2)
        assert not self.files.plan.exists()
        return said


@pytest.fixture
def desk(tmp_path, monkeypatch):
    # The directory of a test may be what real runs are refused in.
    monkeypatch.setattr(refusals, "NOT_SHARED", ())
    monkeypatch.setattr(refusals, "LOCAL_FILE_SYSTEMS", ())
    monkeypatch.setattr(site, "has_slurm", lambda: False)
    monkeypatch.setattr(start, "check_contents", lambda config, console: config)
    return Desk(tmp_path)


@pytest.fixture
def slurm(desk, monkeypatch):
    monkeypatch.setattr(site, "has_slurm", lambda: True)
    return FakeSlurm(desk.root / "slurm", monkeypatch)


def test_a_dry_run_shows_the_layout_and_writes_the_files(desk):
    said = desk.launch("--dry-run", config=LARGE)
    rows = [line.split() for line in said.splitlines()]
    assert ["0", "..", "31", "trainer", "8", "256", "ranks,", "8", "a", "node"] in rows
    assert "32 .. 61  rollout" in " ".join(said.split()) or "30 engines, 1 a node" in said
    assert ["62", "..", "63", "spare", "hot"] in rows
    assert ["9", "1", "0", "2", "0", "1", "9", "0"] in rows  # rank, node, pp, dp, cp, tp, ep, etp
    assert said.rstrip().endswith("nothing was submitted")
    plan = read_plan(desk.files.plan)
    assert plan.total_nodes == 64 and plan.run == str(desk.run)
    config = json.loads(desk.files.config.read_text())
    assert config["run"]["processes"] == 256
    assert "--nodes=64" in desk.files.script.read_text()
    assert not desk.files.job.exists() and not (desk.root / "keys").exists()


def test_a_submission_tests_first_then_says_what_to_type(desk, slurm):
    said = desk.launch()
    script = str(desk.files.script)
    assert slurm.calls == [
        "sinfo -h -o %G",
        f"sbatch --test-only {script}",
        f"sbatch --parsable {script}",
    ]
    assert "job 42 on 2 nodes" in said
    for command in ("status", "logs", "stop"):
        assert f"megatron-credit {command} {desk.run}" in said
    job = json.loads(desk.files.job.read_text())
    assert (job["job"], job["rollout_job"]) == ("42", None)
    assert json.loads(desk.files.status.read_text())["state"] == "submitted"
    keys = list((desk.root / "keys").iterdir())
    assert [path.stat().st_mode & 0o777 for path in keys] == [0o600]
    key = keys[0].read_text().strip()
    assert all(key not in path.read_text() for path in (desk.files.script, desk.files.plan))


def test_layout_jobs_submits_an_array_that_follows_the_trainer(desk, slurm):
    desk.launch("--set", 'launch.layout="jobs"', "--nodes", 5)
    assert slurm.calls[-1] == (
        f"sbatch --parsable --dependency=after:42 {desk.files.rollout_script}"
    )
    assert json.loads(desk.files.job.read_text())["rollout_job"] == "43"


def test_jobs_that_took_the_place_of_an_engine_job_are_the_runs_too(desk, slurm):
    desk.launch("--set", 'launch.layout="jobs"', "--nodes", 5)
    engines = LaunchFiles(desk.run, "rollout-1")
    engines.home.mkdir()
    engines.successor.write_text("77\n")
    assert desk.files.jobs() == ["42", "43", "77"]
    slurm.answers("queue", "RUNNING\n")
    desk.type("stop", desk.run, "--now")
    assert {"scancel 42", "scancel 43", "scancel 77"} <= set(slurm.calls)


def test_a_new_launch_clears_what_the_last_one_left(desk, slurm):
    desk.launch()
    engines = LaunchFiles(desk.run, "rollout-0")
    engines.home.mkdir()
    marks = [desk.files.done, desk.files.stop, desk.files.bad_nodes]
    marks += [engines.successor, engines.bad_nodes]
    for path in marks:
        path.touch()
    desk.files.claim()
    desk.launch()
    assert not any(path.exists() for path in marks)
    assert read_plan(desk.files.plan).first_attempt == 2


def test_slurm_may_refuse(desk, slurm):
    slurm.answers("refuse", "allocation failure: Invalid partition name specified")
    said = desk.launch("--set", "launch.partition=none", code=2)
    assert "Invalid partition name specified" in said
    assert not any("--parsable" in call for call in slurm.calls)
    assert "Job 9 to start at" not in said
    (slurm.root / "refuse").unlink()
    assert "Job 9 to start at" in desk.launch("--test-only")
    assert not desk.files.job.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["launch.warn_seconds=7200"], "warn_seconds = 7200 is not below the time limit 2:00:00"),
        (["launch.time=later"], "time = 'later' is no time limit"),
        (["launch.trainer_nodes=0"], "launch.trainer_nodes"),
        (["launch.ranks_per_node=1"], "use 2 trainer nodes"),
        (['launch.account="a\'b"'], "cannot hold a quote"),
        (["launch.container={kind='pyxis', image='/no.sqsh'}"], "there is no such file"),
        (["launch.secrets=/no/such/file"], "/no/such/file cannot be read"),
        (["launch.environment={HF_TOKEN='x'}"], "launch.environment.HF_TOKEN looks like a secret"),
        (["launch.prologue=['if true']"], "launch.prologue is not valid shell"),
        (["launch.extra={nodes='3'}"], "--nodes follows from launch.trainer_nodes"),
    ],
)
def test_refusals(desk, changes, message):
    if "prologue" in changes[0]:
        assert message in desk.launch("--dry-run", "--set", changes[0], code=2)
    else:
        assert message in desk.refused(*changes)


def test_more_gpus_than_the_site_has(desk, slurm):
    slurm.answers("gres", "gpu:a100:4(S:0-1)\n(null)\ngpu:2,mps:400\n")
    said = desk.refused(config=LARGE)
    assert "launch.gpus_per_node=8, but nodes of this site have at most 4" in said


def test_secrets_belong_elsewhere(desk):
    said = desk.refused(f"launch.key_directory={desk.run}/keys")
    assert "is in the run directory; keep it elsewhere" in said


def test_directories_that_are_not_shared(desk, monkeypatch):
    monkeypatch.setattr(refusals, "NOT_SHARED", (str(desk.root),))
    assert "which every node has for itself" in desk.refused()
    monkeypatch.setattr(refusals, "NOT_SHARED", ())
    mounts = desk.root / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nnone {desk.root} tmpfs rw 0 0\n")
    assert refusals.file_system(desk.run, mounts) == "tmpfs"
    assert refusals.file_system(Path("/home/x"), mounts) == "ext4"
    monkeypatch.setattr(refusals, "LOCAL_FILE_SYSTEMS", (refusals.file_system(desk.run),))
    assert "this machine's memory" in desk.refused()


def test_without_slurm_a_submission_says_what_to_use(desk):
    assert "there is no sbatch on this machine" in desk.launch(code=2)


def test_a_second_launch_of_a_live_run_is_refused(desk, slurm):
    desk.launch()
    slurm.answers("queue", "RUNNING\n")
    said = desk.launch("--dry-run", code=2)
    assert "is a run of job 42, which is RUNNING" in said
    slurm.answers("queue", "")
    for lock in (desk.files.lock, desk.run / "lock"):
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert "is held" in desk.launch("--dry-run", code=2)
    desk.launch("--dry-run")


def write_attempt(desk, number, **logs):
    """An attempt with these logs, name and text."""
    attempt = desk.files.claim()
    assert attempt.number == number
    for name, text in logs.items():
        (attempt.logs / f"{name.replace('__', '.').replace('_', '-')}.log").write_text(text)
    nodes = [{"name": "n1", "address": "n1"}]
    tasks = {"trainer": {"role": "trainer", "nodes": nodes}}
    attempt.topology.write_text(json.dumps({"tasks": tasks}))
    return attempt


def test_status_of_a_run(desk, slurm):
    assert "holds no launched run" in desk.type("status", desk.root, code=2)
    desk.launch()
    slurm.answers("queue", "PENDING\n")
    assert "submitted" in desk.type("status", desk.run)
    write_attempt(desk, 1)
    desk.files.progress.write_text("40\n")
    record = {"state": "running", "attempt": 1, "job": "42", "time": time.time() - 65, "why": ""}
    desk.files.status.write_text(json.dumps(record))
    slurm.answers("queue", "RUNNING\n")
    lines = [line.split() for line in desk.type("status", desk.run).splitlines()]
    assert ["state", "running,", "for", "1", "min", "5", "s"] in lines
    assert ["job", "42", "RUNNING"] in lines and ["checkpoint", "step", "40"] in lines
    assert ["trainer", "n1"] in lines
    found = json.loads(desk.type("status", desk.run, "--json"))
    assert (found["state"], found["alive"], found["checkpoint"]) == ("running", True, 40)
    slurm.answers("queue", "")
    assert "over while running: cancelled" in desk.type("status", desk.run)


def test_stop_asks_cancels_or_says_that_there_is_nothing(desk, slurm):
    desk.launch()
    assert "nothing to stop" in desk.type("stop", desk.run)
    assert not desk.files.stop.exists()
    slurm.answers("queue", "PENDING\n")
    assert "cancelled job 42" in desk.type("stop", desk.run)
    assert json.loads(desk.files.status.read_text())["state"] == "stopped"
    desk.files.stop.unlink()
    (slurm.root / "calls").unlink()
    slurm.answers("queue", "RUNNING\n")
    assert "saves after the present step" in desk.type("stop", desk.run)
    assert desk.files.stop.exists() and "scancel 42" not in slurm.calls
    assert "cancelled job 42" in desk.type("stop", desk.run, "--now")
    assert "scancel 42" in slurm.calls


def test_an_array_above_the_sites_limit_says_what_to_do(desk, slurm):
    slurm.answers("refuse", "allocation failure: Invalid job array specification")
    said = desk.launch("--set", 'launch.layout="jobs"', "--test-only", code=2)
    assert "MaxArraySize" in said and "use fewer rollout nodes" in said


def test_looking_at_a_run_does_not_import_torch():
    code = (
        "import sys, megatron_credit.cli, megatron_credit.trainer.launching.observe; "
        "print([name for name in ('torch', 'transformers', 'pydantic') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_logs_are_found_by_task_node_and_attempt(desk, slurm):
    desk.launch()
    write_attempt(desk, 1, trainer__n1="old\n")
    write_attempt(desk, 2, trainer__n1="a\nb\nc\n", trainer__n2="d\n", rollout_0__n3="e\n")
    said = desk.type("logs", desk.run)
    assert [word for word in said.split() if len(word) == 1] == ["e", "a", "b", "c", "d"]
    said = desk.type("logs", desk.run, "--task", "trainer", "--node", "n1", "--lines", "2")
    assert said.splitlines()[1:] == ["b", "c"]
    assert "old" in desk.type("logs", desk.run, "--attempt", "1")
    said = desk.type("logs", desk.run, "--task", "judge-0", code=2)
    assert "logs: rollout-0.n3.log, trainer.n1.log, trainer.n2.log; attempts: 1, 2" in said
    assert "e" in desk.type("logs", desk.run, "--task", "rollout-0", "--follow").split()
