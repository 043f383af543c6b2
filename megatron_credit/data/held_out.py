"""What keeps held-out prompts out of training.

Shape letters: R rows of a table, A rows of all tables together.
"""

from collections.abc import Sequence

import numpy as np

from megatron_credit.data.order import shuffled
from megatron_credit.data.source import LoadedSource, first_with_same


def hold_out(train: Sequence[LoadedSource], size: int, seed: int) -> list[LoadedSource]:
    """Sources with `size` different questions of the training rows, the same for a seed.

    Raises ValueError when that is more than half of the questions.
    """
    question_A = np.concatenate([source.column_R("question_hash") for source in train])
    num_questions = len(np.unique(question_A))
    if 2 * size > num_questions:
        raise ValueError(
            f"data.eval_size = {size} would hold out more than half of the {num_questions} "
            f"different questions in data.train; use at most {num_questions // 2}"
        )
    picked_A = pick(question_A, size, f"held out/{seed}")
    ends = np.cumsum([len(source.table) for source in train])[:-1]
    held_out = []
    for source, picked_R in zip(train, np.split(picked_A, ends), strict=True):
        source.report.held_out = int(picked_R.sum())
        if picked_R.any():
            held_out.append(source.as_held_out(picked_R))
    return held_out


def pick(question_A: np.ndarray, size: int, key: str) -> np.ndarray:
    """True for the rows of `size` different questions, drawn by `key`: [A] bool."""
    picked_A = np.zeros(len(question_A), dtype=bool)
    seen: set[int] = set()
    for place in range(len(question_A)):
        number = shuffled(place, len(question_A), key)
        question = int(question_A[number])
        if question not in seen:
            seen.add(question)
            picked_A[number] = True
        if len(seen) == size:
            break
    return picked_A


def drop_repeated(source: LoadedSource) -> LoadedSource:
    """A held-out source in which each question stands once: an average counts it once."""
    question_R = source.column_R("question_hash")
    new_R = first_with_same(question_R) == np.arange(len(question_R))
    source.report.repeated = int((~new_R).sum())
    return source.only(new_R)


def drop_leaks(source: LoadedSource, held_out: Sequence[LoadedSource]) -> LoadedSource:
    """A training source without the questions that are held out."""
    question_R = source.column_R("question_hash")
    held_out_A = [other.column_R("question_hash") for other in held_out]
    leaked_R = np.isin(question_R, np.concatenate([np.empty(0, np.uint64), *held_out_A]))
    source.report.overlap = int(leaked_R.sum()) - source.report.held_out
    kept_R = question_R[~leaked_R]
    source.report.repeated_kept = len(kept_R) - len(np.unique(kept_R))
    return source.only(~leaked_R)
