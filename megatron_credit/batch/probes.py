"""What answer probes ask: how likely is each answer, if a rollout stopped at each of its states?

Behind every state stand the same tokens, those of all answers, as branches that share what they
begin with. The last token of an answer is only predicted, so it is not among them.

Shape letters: K tokens behind a state, E scored edges behind a state (an edge leads from the token
where a prediction is made to the token that is predicted), P states, Y continuations.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence, check_token_ids

STATE = -1
"""In place of a token's number: the last token of the state, not one behind it."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What is appended to a state: the answer's opening, and the answer up to its closing, which is
    scored. ValueError without a token to score."""

    opening_ids: tuple[int, ...]
    """Such as the end of thinking and what comes before a final answer; may be empty."""
    answer_ids: tuple[int, ...]
    """The answer and its closing."""

    def __post_init__(self) -> None:
        if not self.answer_ids:
            raise ValueError("a continuation has no answer_ids; expected at least the closing")

    @property
    def read_ids(self) -> tuple[int, ...]:
        """Everything but the last token."""
        return (*self.opening_ids, *self.answer_ids)[:-1]

    @property
    def num_tokens(self) -> int:
        """Tokens of opening and answer."""
        return len(self.opening_ids) + len(self.answer_ids)


@dataclass(frozen=True, kw_only=True)
class ProbedRollout:
    """A rollout, and where which answers are tried. ValueError for states that are not its own."""

    sequence: TrainSequence
    states: tuple[int, ...]
    """Response tokens in each state, ascending; 0: the prompt alone."""
    continuations: tuple[Continuation, ...]

    def __post_init__(self) -> None:
        bounds = (-1, *self.states, self.sequence.num_response + 1)
        if any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(
                f"states={self.states} of a response of {self.sequence.num_response} tokens; "
                f"expected ascending numbers of 0 .. {self.sequence.num_response}"
            )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked."""
        return not self.states or not self.continuations

    @property
    def num_trunk(self) -> int:
        """Tokens of prompt and response up to the last state."""
        return self.sequence.num_prompt + self.states[-1]

    @property
    def longest(self) -> int:
        """Tokens of its longest probe."""
        return self.num_trunk + max(one.num_tokens for one in self.continuations)

    def plain(self, state: int, continuation: Continuation) -> TrainSequence:
        """One probe as a sequence of its own, whose response is the answer."""
        prefix_L = self.sequence.token_ids_L[: self.sequence.num_prompt + state]
        opening, answer = continuation.opening_ids, continuation.answer_ids
        return untrained(
            torch.cat([prefix_L, torch.tensor((*opening, *answer))]), num_response=len(answer)
        )


@dataclass(frozen=True, eq=False)
class Questions:
    """What a list of rollouts asks, each question once. The rollouts of a group ask the same behind
    their prompt, and behind all that they begin with alike."""

    rollouts: tuple[ProbedRollout, ...]
    """Those that ask something new, with the states that do."""
    places: tuple[tuple[tuple[int, int], ...], ...]
    """For each rollout of the list and each of its states: rollout and state that ask for it."""

    @classmethod
    def of(cls, rollouts: Sequence[ProbedRollout]) -> Self:
        """The questions of this list."""
        asking: list[ProbedRollout] = []
        places: list[tuple[tuple[int, int], ...]] = []
        known: dict[tuple[bytes, tuple[Continuation, ...]], tuple[int, int]] = {}
        for rollout in rollouts:
            keys = [] if rollout.is_empty else _keys(rollout)
            states = []
            for state, key in zip(rollout.states, keys, strict=False):
                if key not in known:
                    known[key] = len(asking), len(states)
                    states.append(state)
            places.append(tuple(known[key] for key in keys))
            if states:
                asking.append(replace(rollout, states=tuple(states)))
        return cls(tuple(asking), tuple(places))


def _keys(rollout: ProbedRollout) -> list[tuple[bytes, tuple[Continuation, ...]]]:
    """What is asked at each state."""
    seen, start, keys = hashlib.sha256(), 0, []
    for state in rollout.states:
        stop = rollout.sequence.num_prompt + state
        seen.update(rollout.sequence.token_ids_L[start:stop].numpy().tobytes())
        keys.append((seen.digest(), rollout.continuations))
        start = stop
    return keys


def untrained(token_ids_L: Tensor, *, num_response: int) -> TrainSequence:
    """Tokens without a history, the last `num_response` of which are scored."""
    zero_T = torch.zeros(num_response)
    return TrainSequence(
        token_ids_L=token_ids_L,
        num_prompt=len(token_ids_L) - num_response,
        mask_T=zero_T != 0,
        rollout_logprob_T=zero_T,
        advantage_T=zero_T,
        old_logprob_T=None,
        reference_logprob_T=None,
    )


@dataclass(frozen=True, eq=False)
class Branches:
    """The tokens behind a state; each stands before those that follow it, and these before all
    that do not."""

    token_ids: tuple[int, ...]
    """[K]"""
    depths: tuple[int, ...]
    """[K]: tokens between the state and it."""
    ends: tuple[int, ...]
    """[K]: number of the first token after it that does not follow it, directly or not."""
    edges: tuple[tuple[int, int], ...]
    """[E]: (number of the token where it is predicted or STATE, token id that is predicted)."""
    paths: tuple[tuple[int, ...], ...]
    """[Y]: numbers of the edges whose log-probs add up to that of the answer."""

    def answers_PY(self, logprob_PE: Tensor) -> Tensor:
        """Log-prob of each answer behind each state, from those of the scored edges."""
        return torch.stack([logprob_PE[:, list(path)].sum(1) for path in self.paths], 1)


@functools.lru_cache(maxsize=1024)
def grow(continuations: tuple[Continuation, ...]) -> Branches:
    """The branches of these continuations. Cached: the rollouts of a group have the same."""
    token_ids: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    number_of: dict[tuple[int, ...], list[int]] = {}
    previous: tuple[int, ...] = ()
    path: list[int] = []
    # Sorted, those that begin alike follow each other.
    for read_ids in sorted({one.read_ids for one in continuations}):
        shared = _num_shared(previous, read_ids)
        added = range(len(token_ids), len(token_ids) + len(read_ids) - shared)
        token_ids += read_ids[shared:]
        depths += range(shared, len(read_ids))
        ends += [0] * len(added)
        previous, path = read_ids, [*path[:shared], *added]
        number_of[read_ids] = path
        for number in path:
            ends[number] = len(token_ids)
    edges: dict[tuple[int, int], int] = {}
    paths = []
    for one in continuations:
        predicted_at = [STATE, *number_of[one.read_ids]][len(one.opening_ids) :]
        steps = zip(predicted_at, one.answer_ids, strict=True)
        paths.append(tuple(edges.setdefault(step, len(edges)) for step in steps))
    return Branches(tuple(token_ids), tuple(depths), tuple(ends), tuple(edges), tuple(paths))


def _num_shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    differs = (number for number, (one, other) in pairs if one != other)
    return next(differs, min(len(left), len(right)))


def check_probe(name: str, rollout: ProbedRollout, *, vocab_size: int, max_positions: int) -> None:
    """ValueError where a model of this size cannot read the rollout called `name`."""
    if rollout.is_empty:
        return
    check_token_ids(name, rollout.sequence.token_ids_L, vocab_size)
    for number, one in enumerate(rollout.continuations):
        ids_L = torch.tensor((*one.opening_ids, *one.answer_ids))
        check_token_ids(f"{name}, continuation {number}", ids_L, vocab_size)
    if rollout.longest > max_positions:
        raise ValueError(
            f"{name}: its longest probe has {rollout.longest} tokens, the model {max_positions} "
            "positions; leave out late states or long answers, or shorten the responses"
        )
