import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_credit.rewards.config import CustomConfig, ExactConfig, MathConfig, PoolConfig
from megatron_credit.rewards.pool import Question, VerifierPool
from megatron_credit.rewards.verdict import OUTCOMES, Verdict, count_outcomes

UNRULY = CustomConfig(path="rewards.unruly:check")
SETTINGS = PoolConfig(workers=2, time_limit_s=2.0, memory_mib=1024)


@pytest.fixture(scope="module")
def pool():
    verifiers = {"unruly": UNRULY, "exact": ExactConfig(), "math": MathConfig()}
    with VerifierPool(verifiers, SETTINGS) as found:
        yield found


def ask(text: str, answer: str = "yes") -> Question:
    return Question("unruly", text, answer)


EXPECTED = {
    "be yes": ("right", ""),
    "be no": ("wrong", ""),
    "exit yes": ("error", "ended with 3"),
    "sys.exit yes": ("error", "SystemExit"),
    "raise yes": ("error", "ZeroDivisionError"),
    "segfault yes": ("error", "SIGSEGV"),
    "sleep yes": ("timeout", "2 s"),
    "spin yes": ("timeout", "2 s"),
    "memory yes": ("error", "MemoryError"),
    "print yes": ("right", ""),
    "input yes": ("error", "EOFError"),
    "recurse yes": ("error", "RecursionError"),
    "fork yes": ("right", ""),
    "alarm yes": ("error", "own alarm"),
    "half yes": ("error", "returned 0.5"),
    "words yes": ("error", "returned 'right'"),
    "verdict yes": ("right", ""),
}


def test_each_misbehaviour_harms_its_own_answer_only(pool):
    pairs = [(ask(text), ask(f"be{number} yes")) for number, text in enumerate(EXPECTED)]
    verdicts = pool.grade([question for pair in pairs for question in pair])
    assert [verdict.outcome for verdict in verdicts[1::2]] == ["right"] * len(EXPECTED)
    for (outcome, detail), verdict in zip(EXPECTED.values(), verdicts[::2], strict=True):
        assert verdict.outcome == outcome
        assert detail in verdict.detail


def test_an_alarm_that_is_left_behind_does_not_ring_in_the_next_answer(pool):
    verdicts = pool.grade([ask(f"late_alarm {number}", str(number)) for number in range(40)])
    assert {verdict.outcome for verdict in verdicts} == {"right"}


def test_verdicts_come_in_order(pool):
    numbers = random.Random(1).choices(range(50), k=300)
    verdicts = pool.grade([Question("math", rf"\boxed{{{n}/7}}", "3") for n in numbers])
    assert [verdict.parsed for verdict in verdicts] == [
        f"{n // 7}" if n % 7 == 0 else f"{n}/7" for n in numbers
    ]
    assert [verdict.outcome == "right" for verdict in verdicts] == [n == 21 for n in numbers]


def test_equal_answers_are_checked_once(pool):
    start = time.monotonic()
    verdicts = pool.grade([ask("sleep yes")] * 50)
    assert {verdict.outcome for verdict in verdicts} == {"timeout"}
    assert time.monotonic() - start < 2 * SETTINGS.time_limit_s


def test_a_response_without_an_answer(pool):
    assert pool.grade([Question("exact", "<think>hm", "yes")])[0].outcome == "unparsed"
    assert pool.grade([]) == []


def test_metadata_that_cannot_be_sent_is_an_error(pool):
    (verdict,) = pool.grade([Question("exact", "yes", "yes", {"when": object()})])
    assert verdict.outcome == "error"
    assert "not JSON" in verdict.detail


def test_any_text_can_be_sent(pool):
    texts = ["\ud800", "\x00", "a" * 3_000_000, "\U0001f600"]
    verdicts = pool.grade([Question("exact", text, text) for text in texts])
    assert [verdict.outcome for verdict in verdicts] == ["right"] * len(texts)


def test_an_unknown_verifier_is_refused(pool):
    with pytest.raises(ValueError, match="'maths'; it has unruly, exact, math"):
        pool.grade([Question("maths", "1", "1")])


def test_references_are_checked(pool):
    problems = pool.check_references([Question("math", "", "1/2"), Question("math", "", "1/(")])
    assert problems[0] is None
    assert "cannot be read" in problems[1]


def test_two_threads_may_ask(pool):
    found = {}

    def grade(name: str) -> None:
        texts = [f"be {name}{number}" for number in range(100)]
        found[name] = pool.grade([ask(text, text.removeprefix("be ")) for text in texts])

    threads = [threading.Thread(target=grade, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("a", "b"):
        assert [verdict.outcome for verdict in found[name]] == ["right"] * 100


def test_no_verdict_is_lost_among_crashes():
    rng = random.Random(7)
    actions = ["be"] * 30 + ["exit", "segfault", "raise", "sleep", "fork", "print"]
    asked = [(rng.choice(actions), rng.random() < 0.5, number) for number in range(300)]
    expected = {"exit": "error", "segfault": "error", "raise": "error", "sleep": "timeout"}
    questions = [
        ask(f"{action} {number}", str(number) if right else "no") for action, right, number in asked
    ]
    with VerifierPool({"unruly": UNRULY}, PoolConfig(workers=3, time_limit_s=0.5)) as own:
        verdicts = own.grade(questions)
    for (action, right, _), verdict in zip(asked, verdicts, strict=True):
        assert verdict.outcome == expected.get(action, "right" if right else "wrong")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("rewards.unruli:check", "did you mean rewards.unruly"),
        ("rewards.unruly:chek", "did you mean 'check'"),
        ("rewards.unruly:NOT_A_FUNCTION", "is a int, not a function"),
        ("no_such_package:check", "No module named 'no_such_package'"),
    ],
)
def test_a_verifier_that_is_not_there_is_refused_at_the_start(path, message):
    with pytest.raises(ValueError, match=message):
        VerifierPool({"custom": CustomConfig(path=path)}, PoolConfig(workers=1))


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_close_ends_the_processes_even_in_the_middle():
    before = set(children(os.getpid()))
    own = VerifierPool({"unruly": UNRULY}, PoolConfig(workers=2))
    verdicts = []
    asking = threading.Thread(target=lambda: verdicts.extend(own.grade([ask("sleep yes")])))
    asking.start()
    time.sleep(0.3)
    mine = set(children(os.getpid())) - before
    assert mine
    own.close()
    own.close()
    asking.join(5)
    assert [verdict.outcome for verdict in verdicts] == ["error"]
    assert not any(alive(pid) for pid in mine)


ORPHANED = """
import os, signal, sys, threading
from megatron_credit.rewards.config import CustomConfig, PoolConfig
from megatron_credit.rewards.pool import Question, VerifierPool
pool = VerifierPool({"u": CustomConfig(path="rewards.unruly:check")}, PoolConfig(workers=2))
threading.Thread(target=pool.grade, args=([Question("u", "spin yes", "yes")],)).start()
threading.Event().wait(0.5)
print(*[c for t in os.listdir("/proc/self/task")
        for c in open(f"/proc/self/task/{t}/children").read().split()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_processes_die_with_a_killed_parent():
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", ORPHANED],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) >= 3, done.stderr
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


def test_the_shares_of_the_outcomes():
    verdicts = [Verdict("right"), Verdict("wrong"), Verdict("wrong"), Verdict("error")]
    assert count_outcomes(verdict.outcome for verdict in verdicts) == {
        "reward/right": 0.25, "reward/wrong": 0.5, "reward/unparsed": 0.0,
        "reward/timeout": 0.0, "reward/error": 0.25,
    }  # fmt: skip
    assert len(OUTCOMES) == 5
    assert count_outcomes([]) == {}
