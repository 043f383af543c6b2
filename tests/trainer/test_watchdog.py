"""Who is to blame when nothing moves: literal cases, and threads in the place of ranks."""

import threading
import time

import pytest

from megatron_credit.mcore.progress_board import Progress
from megatron_credit.trainer.watchdog import Watchdog, describe_hang


def said(*ranks):
    """A board from (rank, count, phase, beat)."""
    return {
        rank: Progress(rank=rank, count=count, step=5, phase=phase, node=f"n{rank}", beat=beat)
        for rank, count, phase, beat in ranks
    }


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            said((0, 7, "train", 4), (1, 7, "train", 4), (2, 7, "train", 4)),
            said((0, 7, "train", 7), (1, 7, "train", 4), (2, 7, "train", 7)),
            "no progress for 30 s: rank 1 (node n1) stands in train of step 5, silent; "
            "rank 0 (node n0) stands in train of step 5",
        ),
        (
            said((0, 8, "sync", 4), (1, 7, "train", 4), (2, 7, "train", 4)),
            said((0, 8, "sync", 7), (1, 7, "train", 7), (2, 7, "train", 8)),
            "no progress for 30 s: ranks 1, 2 (node n1, n2) stand in train of step 5; "
            "rank 0 (node n0) stands in sync of step 5",
        ),
        (
            said((0, 8, "sync", 4), (1, 8, "sync", 4), (2, 8, "sync", 1)),
            said((0, 8, "sync", 7), (1, 8, "sync", 7), (2, 8, "sync", 2)),
            "no progress for 30 s: all 3 ranks stand in sync of step 5",
        ),
        (
            said((0, 1, "rollout", 4)),
            said((0, 1, "rollout", 7), (2, 1, "rollout", 1)),
            "no progress for 30 s: rank 1 never came as far as the first phase",
        ),
    ],
    ids=["stopped", "behind", "all", "missing"],
)
def test_the_ranks_that_the_others_wait_for_are_named(before, after, expected):
    assert describe_hang(before, after, 3, 30.2) == expected


class SharedBoard:
    """What all ranks see, and what one of them says."""

    def __init__(self, shared):
        self.shared = shared
        self.is_stopped = threading.Event()
        self.beat = 0

    def publish(self, progress):
        if self.is_stopped.is_set():
            return
        self.beat += 1
        fields = vars(progress) | {"beat": self.beat}
        self.shared[progress.rank] = Progress(**fields)

    def read(self):
        return dict(self.shared)


class Ranks:
    """Watchdogs of so many ranks, and what they found."""

    def __init__(self, count, timeout_s, start_timeout_s=None):
        shared = {}
        self.boards = [SharedBoard(shared) for _ in range(count)]
        self.found = [[] for _ in range(count)]
        self.dogs = [
            Watchdog(
                board,
                rank=rank,
                world_size=count,
                node=f"n{rank}",
                timeout_s=timeout_s,
                start_timeout_s=start_timeout_s or timeout_s,
                on_hang=lambda reason, phase, rank=rank: self.found[rank].append((reason, phase)),
            )
            for rank, board in enumerate(self.boards)
        ]

    def wait(self, ranks, limit_s=20.0):
        deadline = time.monotonic() + limit_s
        while not all(self.found[rank] for rank in ranks):
            assert time.monotonic() < deadline, self.found
            time.sleep(0.01)

    def close(self):
        for dog in self.dogs:
            dog.close()


def test_a_rank_that_is_behind_is_found_by_the_others():
    ranks = Ranks(2, timeout_s=0.4)
    ranks.dogs[0].enter(3, "train")
    ranks.dogs[1].enter(3, "train")
    ranks.dogs[0].enter(3, "sync")
    ranks.wait([0, 1])
    for rank, phase in enumerate(["sync", "train"]):
        ((reason, stands_in),) = ranks.found[rank]
        assert stands_in == phase
        assert "rank 1 (node n1) stands in train of step 3" in reason
    ranks.close()


def test_a_rank_that_goes_on_is_left_alone():
    ranks = Ranks(2, timeout_s=0.5)
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        for dog in ranks.dogs:
            dog.enter(1, "train")
        time.sleep(0.02)
    ranks.close()
    assert ranks.found == [[], []]


def test_a_silent_rank_is_named_although_it_is_as_far():
    ranks = Ranks(3, timeout_s=0.5)
    for dog in ranks.dogs:
        dog.enter(2, "rollout")
    time.sleep(0.2)
    ranks.boards[2].is_stopped.set()
    ranks.wait([0, 1])
    assert "rank 2 (node n2) stands in rollout of step 2, silent" in ranks.found[0][0][0]
    ranks.close()


def test_a_start_takes_longer_than_a_phase():
    ranks = Ranks(1, timeout_s=0.3, start_timeout_s=60.0)
    time.sleep(1.5)
    assert ranks.found == [[]]
    ranks.dogs[0].enter(1, "rollout")
    ranks.wait([0])
    ranks.close()
