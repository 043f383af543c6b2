"""What the launcher says of a trainer that failed."""

from megatron_credit.trainer.local import describe_end, describe_exit, failed_log
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.trainer_logs import RANK_STARTS


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


def test_an_earlier_starts_traceback_is_not_this_ones(tmp_path):
    old = f"{RANK_STARTS}Traceback (most recent call last):\nof yesterday\n"
    new = f"{RANK_STARTS}Traceback (most recent call last):\nof today\n"
    directory = logs(tmp_path, trainer_0=f"{old}{RANK_STARTS}fine\n", trainer_1=old + new)
    shown = failed_log(directory, 2)
    assert "of today" in shown and "of yesterday" not in shown and "trainer-1.log" in shown


def test_a_rank_that_was_killed_comes_before_those_that_lost_it(tmp_path):
    directory = logs(
        tmp_path,
        trainer_0="Traceback (most recent call last):\nConnection closed by peer\n",
        trainer_1="step 3\n",
        torchrun="  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n",
    )
    assert describe_end(directory, 1) == "rank 1 of the trainer was ended by SIGKILL"
    assert "torchrun.log" in failed_log(directory, 2)
    (directory.logs / "torchrun.log").write_text("")
    assert describe_end(directory, 1) == "the trainer ended with exit code 1"
    assert "Connection closed" in failed_log(directory, 2)


def test_exit_codes_in_words():
    assert describe_exit(1) == "ended with exit code 1"
    assert describe_exit(-9) == "was ended by SIGKILL"
