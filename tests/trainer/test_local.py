"""What the launcher says of a trainer that failed."""

from megatron_credit.trainer.local import describe_exit, failed_log
from megatron_credit.trainer.run_directory import RunDirectory


def logs(tmp_path, **texts):
    directory = RunDirectory(tmp_path)
    directory.create()
    for name, text in texts.items():
        (directory.logs / f"{name.replace('_', '-')}.log").write_text(text)
    return directory


def test_the_rank_with_a_traceback_is_shown(tmp_path):
    directory = logs(
        tmp_path,
        trainer_0="a warning\n",
        trainer_1="Traceback (most recent call last):\nValueError: here\n",
        torchrun="summary\n",
    )
    shown = failed_log(directory, 2)
    assert "trainer-1.log" in shown and "ValueError: here" in shown and "summary" not in shown


def test_without_a_traceback_torchrun_tells_what_happened(tmp_path):
    directory = logs(tmp_path, trainer_0="a warning\n", torchrun="rank 1 got SIGKILL\n")
    assert "rank 1 got SIGKILL" in failed_log(directory, 2)


def test_exit_codes_in_words():
    assert describe_exit(1) == "ended with exit code 1"
    assert describe_exit(-9) == "was ended by SIGKILL"
