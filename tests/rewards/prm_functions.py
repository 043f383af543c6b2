"""Process reward models for the tests: a good one, and one that misbehaves when a step says so."""

import ctypes
import os
import signal
import time


def lengths(prompt: str, steps: list[str]) -> list[float]:
    """Of each step its share of the prompt's length."""
    return [len(step) / len(prompt) for step in steps]


def known(prompt: str, steps: list[str], metadata: dict) -> tuple[float, ...]:
    """1 for the steps that the metadata lists."""
    return tuple(float(step in metadata["right"]) for step in steps)


def unruly(prompt: str, steps: list[str]) -> object:
    """Half marks, after doing what the prompt says; some prompts are returned as scores."""
    if prompt in ACTIONS:
        ACTIONS[prompt]()
    return RETURNED.get(prompt, [0.5] * len(steps))


LEAK: list[bytearray] = []

ACTIONS = {
    "raise": lambda: 1 / 0,
    "exit": lambda: os._exit(3),
    "quit": lambda: exit(),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "sleep": lambda: time.sleep(60),
    "spin": lambda: 9**9**9,
    "memory": lambda: bytearray(2**36),
    "leak": lambda: LEAK.append(bytearray(40 * 2**20)),
    "fork": lambda: os.fork(),
    "print": lambda: os.write(1, b"noise\n"),
}
RETURNED = {
    "few": [0.5],
    "many": [0.5, 0.5, 0.5],
    "none": None,
    "text": "11",
    "large": [0.5, 1.5],
    "negative": [-0.1, 0.5],
    "nan": [0.5, float("nan")],
    "words": [0.5, "0.5"],
}


def one_argument(prompt: str) -> list[float]:
    return []


NOT_A_FUNCTION = 3
