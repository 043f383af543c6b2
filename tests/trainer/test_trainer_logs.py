"""Which rank ended first, by the summary that torchrun writes."""

import pytest

from megatron_credit.trainer.trainer_logs import KilledRank, killed_rank

HEAD = """
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
======================================================
megatron_credit.trainer.worker FAILED
------------------------------------------------------
Failures:
"""
ROOT = """\
------------------------------------------------------
Root Cause (first observed failure):
"""


def failure(rank, code):
    return (
        f"[{rank}]:\n  time      : 2026-11-30_20:17:24\n  host      : n1\n"
        f"  rank      : {rank} (local_rank: {rank % 8})\n"
        f"  exitcode  : {code} (pid: {30000 + rank})\n  error_file: <N/A>\n"
    )


@pytest.mark.parametrize(
    ("others", "cause", "expected"),
    [
        ([], (1, -9), (1, -9)),
        # Both within one look of torchrun's: rank 0 lost its peer.
        ([(1, -9)], (0, -6), (1, -9)),
        ([(0, -6)], (11, -11), (11, -11)),
        ([(2, -6)], (3, -6), (3, -6)),
        ([(2, -9)], (3, -7), (3, -7)),
        ([(1, -15)], (0, 1), None),
        ([(1, 1)], (0, 1), None),
        ([(1, 1)], (0, -6), (0, -6)),
    ],
)
def test_the_rank_that_ended_first(tmp_path, others, cause, expected):
    log = tmp_path / "torchrun.log"
    log.write_text(HEAD + "".join(failure(*one) for one in others) + ROOT + failure(*cause))
    assert killed_rank(log) == (None if expected is None else KilledRank(*expected))


def test_no_summary(tmp_path):
    assert killed_rank(tmp_path / "none") is None
    (tmp_path / "log").write_text("rank : 3\n")
    assert killed_rank(tmp_path / "log") is None
