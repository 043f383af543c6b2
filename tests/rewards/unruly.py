"""Verifiers that misbehave when the response says so, for the tests of the pool."""

import ctypes
import os
import signal
import sys
import time

from megatron_credit.rewards.verdict import Verdict


def check(text: str, answer: str, metadata: dict) -> bool | float | str | Verdict:
    """Right when the last word is the answer, after doing what the first word says."""
    action, _, word = text.partition(" ")
    if action in ACTIONS:
        ACTIONS[action]()
    if action == "half":
        return 0.5
    if action == "words":
        return "right"
    if action == "verdict":
        return Verdict("right", parsed=word)
    return word == answer


def fork() -> None:
    if os.fork() == 0:
        raise RuntimeError("a copy of the worker goes on")


def alarm() -> None:
    def ring(*_: object) -> None:
        raise TimeoutError("the verifier's own alarm")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(1)
    time.sleep(5)


def late_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.05)


ACTIONS = {
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(0),
    "raise": lambda: 1 / 0,
    "segfault": lambda: ctypes.string_at(0),
    "sleep": lambda: time.sleep(60),
    "spin": lambda: 9**9**9,
    "memory": lambda: bytearray(2**36),
    "print": lambda: os.write(1, b"noise\n"),
    "input": input,
    "recurse": lambda: recurse(0),
    "fork": fork,
    "alarm": alarm,
    "late_alarm": late_alarm,
}


def recurse(depth: int) -> int:
    return recurse(depth + 1) + 1


NOT_A_FUNCTION = 3
