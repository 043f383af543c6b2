"""The answer a response commits to: what stands in its last <answer>..</answer>."""

from collections.abc import Callable

OPEN_TAG = "<answer>"
CLOSE_TAG = "</answer>"
# Number parsing is quadratic in the length, and no answer that can be right is this long.
MAX_ANSWER_CHARS = 64


def last_answer(text: str) -> str | None:
    """The stripped content of the last complete answer tag; None when there is none."""
    last_close = text.rfind(CLOSE_TAG)
    opened = text.rfind(OPEN_TAG, 0, max(last_close, 0))
    if opened < 0:
        return None
    start = opened + len(OPEN_TAG)
    return text[start : text.index(CLOSE_TAG, start)].strip()


def exact_reward(text: str, score: Callable[[str], float]) -> float:
    """1.0 when `score` gives the last answer full marks (>= 1), else 0.0.

    Scorers that hand out partial marks for containing the right digits stay binary this way.
    Answers that are empty, not ASCII or longer than `MAX_ANSWER_CHARS` are not scored.
    """
    answer = last_answer(text)
    if not answer or not answer.isascii() or len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    return float(score(answer) >= 1.0)
