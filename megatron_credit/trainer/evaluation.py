"""What the graded answers to held-out prompts say: pass@k, maj@k, Verification@k, shares; pure.

Every quantity is first computed of one prompt, from its n answers, then averaged over prompts, so
each prompt weighs the same. Answers without a verdict (the verifier timed out or failed) are left
out of pass@k, maj@k and Verification@k, not counted as wrong: the n of such a prompt is smaller.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from megatron_credit.batch.rollout import Rollout
from megatron_credit.rewards.verdict import OUTCOMES
from megatron_credit.trainer.attempts import verdict_within

Z_95 = 1.959963984540054
"""Two-sided 95 % of the normal distribution lies within this many standard deviations."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its 95 % interval; all NaN where no prompt has a value."""

    mean: float
    low: float
    high: float
    num_prompts: int
    """Prompts with enough answers to have a value."""


def summarise(
    groups: Sequence[Sequence[Rollout]], ks: Sequence[int], *, max_attempts: int = 1
) -> dict[str, Estimate]:
    """The estimates of all metrics by name, from the answers to each prompt.

    Of several attempts pass@k takes the first, as a run without attempts has it, and the shares of
    outcomes the last; there is no maj@k, as records do not say what the first ones answered.
    """
    shares = {f"pass@{k}": shares_of(groups, lambda group, k=k: prompt_pass(group, k)) for k in ks}
    shares |= {
        f"maj@{k}": shares_of(groups, lambda group, k=k: prompt_majority(group, k))
        for k in ks
        if k > 1 and max_attempts == 1  # of one answer, the majority is the answer
    }
    shares |= {
        f"verification@{k}": shares_of(groups, lambda group, k=k: prompt_verification(group, k))
        for k in range(2, max_attempts + 1)
    }
    shares |= {
        outcome: shares_of(groups, lambda group, o=outcome: mean([r.outcome == o for r in group]))
        for outcome in OUTCOMES
    }
    shares["truncated"] = shares_of(
        groups, lambda group: mean([rollout.finish_reason == "length" for rollout in group])
    )
    lengths = [mean([len(rollout.response_ids) for rollout in group]) for group in groups]
    return shares | {"length": mean_interval(lengths)}


def shares_of(
    groups: Sequence[Sequence[Rollout]], value: Callable[[Sequence[Rollout]], float | None]
) -> Estimate:
    """The mean of a value in [0, 1] over the prompts that have one."""
    return share_interval([found for group in groups if (found := value(group)) is not None])


def prompt_pass(group: Sequence[Rollout], k: int) -> float | None:
    """pass@k of one prompt; None where fewer than k of its answers have a verdict."""
    verdicts = verdicts_within(group, 1)
    return pass_at_k(len(verdicts), sum(verdicts), k) if len(verdicts) >= k else None


def prompt_verification(group: Sequence[Rollout], num_attempts: int) -> float | None:
    """The share of the answers to one prompt that passed within so many attempts; None where none
    has a verdict."""
    verdicts = verdicts_within(group, num_attempts)
    return mean(verdicts) if verdicts else None


def verdicts_within(group: Sequence[Rollout], num_attempts: int) -> list[bool]:
    """For each answer whether it passed within the first attempts; those are left out of which
    that is not known."""
    known = (verdict_within(rollout, num_attempts) for rollout in group)
    return [passed for passed in known if passed is not None]


def prompt_majority(group: Sequence[Rollout], k: int) -> float | None:
    """maj@k of one prompt.

    None where fewer than k of its answers have a verdict, or where an answer was compared but has
    no normal form to vote with.
    """
    judged = [rollout for rollout in group if not math.isnan(rollout.reward)]
    if len(judged) < k or any(r.parsed is None and r.outcome != "unparsed" for r in judged):
        return None
    votes = Counter(rollout.parsed for rollout in judged if rollout.parsed is not None)
    right = {rollout.parsed for rollout in judged if rollout.reward == 1}
    return majority_at_k(
        right=tuple(sorted(count for answer, count in votes.items() if answer in right)),
        wrong=tuple(sorted(count for answer, count in votes.items() if answer not in right)),
        silent=len(judged) - votes.total(),
        k=k,
    )


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """The share of the sets of k out of n answers that hold a right one, 1 - C(n-c,k) / C(n,k).

    That of 2107.03374, whose expectation is 1 - (1 - p)^k. Exact integers, rounded once.
    """
    if not 1 <= k <= num_answers:
        raise ValueError(f"pass@{k} of {num_answers} answers; expected 1 <= k <= answers")
    sets = math.comb(num_answers, k)
    return (sets - math.comb(num_answers - num_right, k)) / sets


@lru_cache(maxsize=4096)
def majority_at_k(
    *, right: tuple[int, ...], wrong: tuple[int, ...], silent: int, k: int
) -> float:
    """The chance that the most frequent answer among k out of n is right; exact.

    `right` and `wrong` hold how often each different answer was given, `silent` how many answers
    hold none and vote for nothing. Among answers that lead with equally many votes one is drawn; of
    k answers that are all silent none is right.
    """
    num_answers = sum(right) + sum(wrong) + silent
    if not 1 <= k <= num_answers:
        raise ValueError(f"maj@{k} of {num_answers} answers; expected 1 <= k <= answers")
    won = Fraction(0)
    for place, count in enumerate(right):
        others = right[:place] + right[place + 1 :] + wrong
        for votes in range(1, min(count, k) + 1):
            sets = sets_led(others, silent, votes=votes, remaining=k - votes)
            won += math.comb(count, votes) * sets
    return float(won / math.comb(num_answers, k))


def sets_led(others: Sequence[int], silent: int, *, votes: int, remaining: int) -> Fraction:
    """In how many ways `remaining` answers of the others leave one with `votes` in the lead.

    A way in which t others have as many votes counts 1 / (t + 1).
    """
    ways = Counter({(0, 0): 1})  # (answers taken, others with as many votes) -> ways
    for count in others:
        longer: Counter[tuple[int, int]] = Counter()
        for (taken, tied), number in ways.items():
            for more in range(min(count, votes, remaining - taken) + 1):
                longer[taken + more, tied + (more == votes)] += number * math.comb(count, more)
        ways = longer
    return sum(
        (
            Fraction(number * math.comb(silent, remaining - taken), tied + 1)
            for (taken, tied), number in ways.items()
        ),
        Fraction(0),
    )


def share_interval(values: Sequence[float]) -> Estimate:
    """The mean of values in [0, 1] with the interval of Agresti and Coull.

    The normal interval of the values with two prompts of value 0 and two of value 1 added: it keeps
    its level for few prompts, and does not shrink to a point where all values are equal.
    """
    if not values:
        return Estimate(math.nan, math.nan, math.nan, 0)
    padded = mean_interval([*values, 0.0, 0.0, 1.0, 1.0])
    return Estimate(mean(values), max(0.0, padded.low), min(1.0, padded.high), len(values))


def mean_interval(values: Sequence[float]) -> Estimate:
    """The mean with its normal interval, whose bounds are NaN for fewer than two values."""
    if len(values) < 2:
        centre = values[0] if values else math.nan
        return Estimate(centre, math.nan, math.nan, len(values))
    centre = mean(values)
    variance = math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)
    half = Z_95 * math.sqrt(variance / len(values))
    return Estimate(centre, centre - half, centre + half, len(values))


def mean(values: Sequence[float]) -> float:
    """The sum, rounded once, over the number."""
    return math.fsum(values) / len(values)
