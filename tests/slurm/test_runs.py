"""Runs that nothing happens to: who runs where, with what, and what is left at the end."""

import shutil
from dataclasses import replace

import pytest
from slurm.runs import new_run, stand_in_plan, started_run

pytestmark = [pytest.mark.slurm, pytest.mark.beside]

GPUS = "0,1,2,3,4,5,6,7"


def seen_by_task(run):
    """What each task was given, by (task, node)."""
    return {(row["task"], row["node"]): row for row in run.lines("seen.jsonl")}


def test_roles_stand_on_hosts_of_their_own_and_the_run_ends_with_done(lab):
    run = started_run(lab, "clean", trainer_nodes=2, rollouts=2, engines=2, steps=5)
    assert run.wait_finished() == "COMPLETED"
    assert run.slurm()["ExitCode"] == "0:0" and run.slurm()["Restarts"] == "0"
    topology = run.topology()
    hosts = [host for hosts in topology.values() for host in hosts]
    assert sorted(topology) == ["rollout-0", "rollout-1", "trainer"]
    assert [len(topology[name]) for name in sorted(topology)] == [1, 1, 2]
    assert len(set(hosts)) == 4 and set(hosts) <= set(lab.site.nodes)
    seen = seen_by_task(run)
    assert sorted(seen) == sorted((name, host) for name in topology for host in topology[name])
    assert {row["environment"]["CUDA_VISIBLE_DEVICES"] for row in seen.values()} == {GPUS}
    assert run.steps() == [1, 2, 3, 4, 5] and (run.launch / "DONE").exists()
    assert run.status()["state"] == "done" and run.status()["attempt"] == 1
    assert (run.launch / "latest").resolve() == run.attempts()[0]
    names = {f"{name}.{host}.log" for name in topology for host in topology[name]}
    assert names <= {path.name for path in (run.attempts()[0] / "logs").iterdir()}
    # Engines were asked to end before they were ended.
    assert {row["task"] for row in run.lines("ends.jsonl")} == {"rollout-0", "rollout-1"}


def test_two_runs_at_once_have_ports_and_nodes_of_their_own(lab):
    runs = [started_run(lab, f"pair-{k}", engines=1, steps=10) for k in range(2)]
    assert [run.wait_finished() for run in runs] == ["COMPLETED"] * 2
    blocks, hosts = [], []
    for run in runs:
        port = run.json("attempt-001/topology.json")["port"]
        blocks.append(set(range(port, port + 16)))
        hosts.append({host for hosts in run.topology().values() for host in hosts})
    assert not blocks[0] & blocks[1] and max(blocks[0] | blocks[1]) < 32768
    assert not hosts[0] & hosts[1]


def test_the_login_shell_does_not_reach_the_job(lab):
    run = new_run(lab, "dirty")
    run.submit(
        stand_in_plan(run.root, engines=1, steps=3),
        SBATCH_PARTITION="nowhere",
        SBATCH_TIMELIMIT="1",
        SBATCH_EXPORT="ALL",
        SBATCH_REQUEUE="0",
        SLURM_JOB_ID="77",
        SLURM_NNODES="9",
        SLURM_NTASKS_PER_NODE="5",
        SLURM_EXPORT_ENV="NONE",
        MASTER_PORT="29500",
        HTTP_PROXY="http://nowhere:1",
        A_SECRET="told-to-nobody",
    )
    assert run.wait_finished() == "COMPLETED"
    assert (run.slurm()["Partition"], run.slurm()["TimeLimit"]) == ("batch", "00:10:00")
    for row in run.lines("seen.jsonl"):
        given = row["environment"]
        assert not {"A_SECRET", "MASTER_PORT", "HTTP_PROXY", "SBATCH_EXPORT"} & set(given)
        assert given["SLURM_JOB_ID"] == run.job and given["SLURM_NTASKS_PER_NODE"] == "1"
    assert "told-to-nobody" not in "".join(
        path.read_text(errors="replace") for path in run.root.rglob("*") if path.is_file()
    )


def test_paths_with_spaces_and_signs_work(lab):
    run = new_run(lab, "a run; of $HOME %j & more")
    plan = stand_in_plan(run.root, engines=1, steps=3)
    run.submit(replace(plan, slurm=replace(plan.slurm, job_name="odd")))
    assert run.wait_finished() == "COMPLETED"
    assert run.steps() == [1, 2, 3]
    assert (run.launch / f"job-{run.job}.out").exists()


def test_secrets_reach_tasks_by_their_environment_and_are_nowhere_else(lab):
    run = new_run(lab, "secrets")
    secrets, key = lab.site.home / "secrets", lab.site.home / "key"
    for path, text in ((secrets, "JUDGE_TOKEN=psst-4711\n"), (key, "key-0815\n")):
        path.touch(0o600)
        path.write_text(text)
        shutil.chown(path, lab.site.user, lab.site.user)
    plan = stand_in_plan(run.root, engines=1, steps=1000)
    run.submit(
        replace(plan, secrets=str(secrets), key_file=str(key), key_variable="THE_ENGINES_KEY")
    )
    run.wait_steps(1)
    for row in run.lines("seen.jsonl"):
        given = row["environment"]
        assert (given["JUDGE_TOKEN"], given["THE_ENGINES_KEY"]) == ("psst-4711", "key-0815")
    hosts = [host for hosts in run.topology().values() for host in hosts]
    files = [path for path in run.launch.rglob("*") if path.is_file()]
    texts = [path.read_text(errors="replace") for path in files]
    texts += [*run.processes(*hosts), lab.call("scontrol", "show", "job", "-d", run.job)]
    assert len(texts) > 10
    assert not [text for text in texts if "psst-4711" in text or "key-0815" in text]
    lab.call("scancel", run.job)
    assert run.wait_finished() == "CANCELLED"
