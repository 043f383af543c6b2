"""Secrets: who may read them, and that nothing of a run shows them."""

import hashlib
import os

import pytest
from credit_launch.environment import for_submission, job_variables
from credit_launch.private import read_key, read_secrets
from launch.local_runs import LocalRun, rollout, trainer

from megatron_credit.trainer.launching.key import ensure_key, key_file

SECRET, KEY = "hf_3f9a-very-secret", "0123-the-key"


def private(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


def test_lines_of_a_secrets_file(tmp_path):
    text = f"# tokens\n\nHF_TOKEN={SECRET}\nexport WANDB_API_KEY='a b=c'\nEMPTY=\n"
    found = read_secrets(private(tmp_path / "s", text))
    assert found == {"HF_TOKEN": SECRET, "WANDB_API_KEY": "a b=c", "EMPTY": ""}


def test_a_line_that_is_none_is_named_but_not_shown(tmp_path):
    with pytest.raises(ValueError, match="line 2 is not of the form NAME=VALUE") as error:
        read_secrets(private(tmp_path / "s", f"A=1\n{SECRET}\n"))
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622])
def test_what_others_may_read_is_refused(tmp_path, mode):
    with pytest.raises(ValueError, match=f"may be read by others .mode {mode:04o}.; chmod 600"):
        read_secrets(private(tmp_path / "s", "A=1\n", mode))


def test_what_is_missing_or_no_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_secrets(tmp_path / "absent")
    with pytest.raises(ValueError, match="is no file"):
        read_secrets(tmp_path)


def test_the_key_is_made_once_and_is_its_owners(tmp_path):
    path = key_file(tmp_path / "run", tmp_path / "keys" / "deep")
    assert path != key_file(tmp_path / "other", tmp_path / "keys" / "deep")
    ensure_key(path)
    key = read_key(path)
    assert len(key) == 64 and path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    ensure_key(path)
    assert read_key(path) == key
    path.chmod(0o644)
    with pytest.raises(ValueError, match="may be read by others"):
        ensure_key(path)


def test_tasks_have_the_secrets_and_the_run_directory_does_not(tmp_path):
    secrets = private(tmp_path / "secrets", f"HF_TOKEN={SECRET}\n")
    key = private(tmp_path / "key", KEY + "\n")
    run = LocalRun(
        tmp_path / "run",
        trainer("done_when", "launch/attempt-001/sum"),
        rollout("checksum", "HF_TOKEN", "ENGINE_KEY"),
        secrets=str(secrets),
        key_file=str(key),
        key_variable="ENGINE_KEY",
    )
    assert run.run() == 0
    expected = hashlib.sha256((SECRET + KEY).encode()).hexdigest()
    assert (run.files.attempts()[0].root / "sum").read_text() == expected
    shown = [path for path in run.root.rglob("*") if path.is_file()]
    assert len(shown) > 10
    for path in shown:
        data = path.read_bytes()
        assert SECRET.encode() not in data and KEY.encode() not in data, path


def test_secrets_that_became_readable_end_the_run_before_it_starts(tmp_path):
    secrets = private(tmp_path / "secrets", "A=1\n", 0o644)
    run = LocalRun(tmp_path / "run", trainer("crash"), secrets=str(secrets))
    assert run.run() == 1
    assert "may be read by others" in run.status["why"]
    assert run.files.attempts() == []


def test_the_login_shell_cannot_change_a_submission():
    dirty = {
        "SBATCH_TIMELIMIT": "1",
        "SLURM_NTASKS": "7",
        "SLURM_JOB_ID": "3",
        "SLURMD_NODENAME": "n1",
        "SLURM_CONF": "/etc/slurm.conf",
        "PATH": os.environ["PATH"],
    }
    assert set(for_submission(dirty)) == {"SLURM_CONF", "PATH"}
    with pytest.raises(ValueError, match="SLURM_JOB_ID is not set"):
        job_variables({})
