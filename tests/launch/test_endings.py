"""What follows from an outcome, case by case."""

import json

import pytest
from credit_launch.endings import (
    Ending,
    History,
    Outcome,
    decide,
    history_of,
    num_bad_nodes_before,
    record_end,
)
from credit_launch.files import LaunchFiles
from credit_launch.plan import Limits

LIMITS = Limits(max_attempts=5, max_no_progress=2)
FIRST = History(1, 1)


@pytest.mark.parametrize(
    ("outcome", "history", "state", "code", "again"),
    [
        (Outcome(is_done=True, was_terminated=True), FIRST, "done", 0, False),
        (Outcome(was_stopped=True, was_warned=True, has_saved=True), FIRST, "stopped", 0, False),
        (Outcome(was_stopped=True, was_terminated=True), FIRST, "stopped", 0, False),
        # A cancelled job must not come back, even though the time limit was near.
        (Outcome(was_terminated=True, was_warned=True), FIRST, "stopping", 143, False),
        (Outcome(was_warned=True, has_saved=True), FIRST, "requeued", 0, True),
        (Outcome(was_warned=True, reason="slow"), FIRST, "requeued", 0, True),
        (Outcome(was_warned=True, reason="slow"), History(2, 2), "gave-up", 1, False),
        (Outcome(reason="crash"), FIRST, "requeued", 0, True),
        (Outcome(reason="crash"), History(4, 2), "gave-up", 1, False),
        (Outcome(reason="crash"), History(5, 0), "gave-up", 1, False),
        (Outcome(was_warned=True, has_saved=True), History(5, 0), "gave-up", 1, False),
        (Outcome(reason="full", may_retry=False), FIRST, "gave-up", 1, False),
        (Outcome(reason="ECC", bad_nodes=("n2",)), History(2, 0), "requeued", 0, True),
    ],
)
def test_what_follows(outcome, history, state, code, again):
    ending = decide(outcome, history, LIMITS)
    assert (ending.state, ending.code, ending.again) == (state, code, again)


class Book:
    """Attempts, one after the other, with the checkpoints that they left."""

    def __init__(self, root):
        self.files = LaunchFiles(root)
        self.step = -1

    def add(self, outcome, *, step=None, first=1):
        """The history as the supervisor of this attempt sees it."""
        attempt = self.files.claim()
        before, self.step = self.step, self.step if step is None else step
        history = history_of(self.files, outcome, first=first, before=before, after=self.step)
        if outcome is not LOST:
            record_end(attempt, outcome, Ending("x", "", 1), before=before, after=self.step)
        return history


CRASH = Outcome(reason="crash")
SAVED = Outcome(was_warned=True, has_saved=True)
ENDED = Outcome(was_terminated=True)
BAD_NODE = Outcome(reason="ECC", bad_nodes=("n2",))
LOST = Outcome(reason="its node lost power")


def test_failures_in_a_row_are_counted_against_checkpoints(tmp_path):
    book = Book(tmp_path)
    assert book.add(CRASH) == History(1, 1)
    assert book.add(CRASH, step=10) == History(2, 0)
    assert book.add(CRASH) == History(3, 1)
    assert book.add(CRASH) == History(4, 2)
    assert book.add(SAVED, step=20) == History(5, 0)
    assert book.add(CRASH) == History(6, 1)


def test_what_slurm_ended_and_bad_nodes_count_neither_way(tmp_path):
    book = Book(tmp_path)
    assert book.add(CRASH).num_fruitless == 1
    for neutral in (ENDED, BAD_NODE, LOST):
        book.add(neutral)
    assert book.add(BAD_NODE).num_fruitless == 0
    assert book.add(CRASH) == History(6, 2)


def test_bad_nodes_in_a_row_are_counted(tmp_path):
    book = Book(tmp_path)
    found = []
    for outcome in (BAD_NODE, CRASH, BAD_NODE, BAD_NODE, ENDED, BAD_NODE, LOST):
        book.add(outcome)
        found.append(num_bad_nodes_before(book.files.attempts()))
    assert found == [1, 0, 1, 2, 0, 1, 0]


def test_an_earlier_launch_does_not_count(tmp_path):
    book = Book(tmp_path)
    book.add(CRASH)
    assert book.add(CRASH, first=2) == History(1, 1)


def test_attempts_are_claimed_once_and_latest_points_at_the_newest(tmp_path):
    files = LaunchFiles(tmp_path)
    assert [files.claim().number for _ in range(3)] == [1, 2, 3]
    assert files.current.read_text() == "3\n"
    assert files.latest.resolve().name == "attempt-003"
    files.attempts()[1].end.write_text(json.dumps({}))
    assert [attempt.number for attempt in files.attempts()] == [1, 2, 3]
