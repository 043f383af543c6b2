"""Two ranks, one of which samples: engines that come in the middle, and what ends the job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("rollout_phase_worker.py")


def run_ranks(folder, scenario):
    """Exit codes and error outputs of both ranks."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder), scenario],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=400)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], outputs


def test_newcomers_get_the_weights_while_rank_0_samples(tmp_path):
    codes, outputs = run_ranks(tmp_path, "newcomer")
    assert codes == [0, 0], outputs
    leader, follower = (json.loads((tmp_path / f"rank-{k}.json").read_text()) for k in range(2))
    weights = [[f"w{number}", [2.0 * number] * 2] for number in range(3)]
    assert leader["got"] == [weights] * 2
    assert leader["passes"] == follower["passes"] == 3  # one at the start, one a newcomer
    assert follower["found"] == [None] * 3
    first, second, slept = leader["found"]
    assert first["thread"] == second["thread"] and slept == "slept"


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("failing", "RuntimeError: the engines are gone"),
        ("refusing", "ValueError: the weight stream brought w9"),
    ],
)
def test_an_error_on_rank_0_ends_both(tmp_path, scenario, message):
    """Also one in the main thread, while the sampling thread waits for engines."""
    codes, outputs = run_ranks(tmp_path, scenario)
    assert all(codes) and message in outputs[0]
    assert not list(tmp_path.glob("rank-*.json"))
