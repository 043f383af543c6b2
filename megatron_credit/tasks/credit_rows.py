"""What the credit model is taught: to solve, to try again, to read evidence, to answer in a box.

Evidence is right or wrong, since the credit methods show siblings of both kinds. A few rows stray
from it: without them the model never sees a response that departs from its evidence, and what it
says behind the first wrong step would mean nothing.
"""

from random import Random

from megatron_credit.batch.evidence_text import (
    answer_below,
    bare_answer,
    solution_below,
    system_solution,
)
from megatron_credit.rewards.answer_tags import last_answer
from megatron_credit.rewards.find_answer import last_box
from megatron_credit.settings import Settings
from megatron_credit.tasks.solver import (
    CLOSE_BOX,
    OPEN_BOX,
    ask_for_box,
    exact_solution,
    forgetful_solution,
    split_steps,
)
from megatron_credit.tasks.tokenizer import END, SYSTEM
from megatron_credit.tasks.warm_start_rows import Turn, ask, attempt_turns


class CreditRowConfig(Settings):
    """The mixture of rows: shares of all rows unless something else is said."""

    forget: float = 0.7
    """Probability that a carry or borrow is forgotten."""
    retry_share: float = 0.10
    """Several attempts, each wrong one answered by the retry sentence."""
    max_attempts: int = 3
    """Most attempts of a retry row."""
    solution_share: float = 0.20
    """A solution stands in the context, in the user's turn or the system's, and is given again."""
    answer_share: float = 0.15
    """The final answer of the solution that follows stands in the context."""
    boxed_share: float = 0.10
    """The question asks for a box."""
    probe_share: float = 0.05
    """A solution is cut after some step and the box follows at once; only its content is taught."""
    exact_share: float = 0.5
    """Of the rows with evidence: the solution is exact, not the pupil's."""
    wrapped_share: float = 1 / 3
    """Of the rows with an answer: it stands in the user's turn, not behind the prompt."""
    boxed_evidence_share: float = 0.2
    """Of the rows with evidence: the question asks for a box."""
    stray_share: float = 0.1
    """Of the rows with evidence: the solution that follows is the pupil's, drawn anew."""
    teach_departure: bool = True
    """Whether the first step that departs from the evidence is taught in those rows. Without it the
    model goes on like the pupil behind a departure, and still never departs by itself."""


def make_credit_turns(question: str, config: CreditRowConfig, rng: Random) -> list[Turn]:
    """One random chat about `question`; the shares that are left over are plain solutions."""
    kind = rng.random()
    for share, make in (
        (config.retry_share, _retries),
        (config.solution_share, _solution_shown),
        (config.answer_share, _answer_shown),
        (config.boxed_share, _boxed),
        (config.probe_share, _probe),
    ):
        if kind < share:
            return make(question, config, rng)
        kind -= share
    return attempt_turns(question, max_attempts=1, forget=config.forget, rng=rng)


def answer_of(solution: str) -> str:
    """The final answer of a worked solution, in tags or in a box."""
    answer = last_answer(solution) or last_box(solution)
    assert answer is not None
    return answer


def _retries(question: str, config: CreditRowConfig, rng: Random) -> list[Turn]:
    return attempt_turns(question, max_attempts=config.max_attempts, forget=config.forget, rng=rng)


def _solution_shown(question: str, config: CreditRowConfig, rng: Random) -> list[Turn]:
    question = _perhaps_boxed(question, config, rng)
    shown, given = _shown_and_given(question, config, rng)
    if rng.random() < 0.5:
        context = ask(solution_below(question, shown))
    else:
        context = f"{SYSTEM}{system_solution(shown)}{ask(question)}"
    return [Turn(context, False), *_given_turns(shown, given, config)]


def _answer_shown(question: str, config: CreditRowConfig, rng: Random) -> list[Turn]:
    question = _perhaps_boxed(question, config, rng)
    shown, given = _shown_and_given(question, config, rng)
    answer = answer_of(shown)
    if rng.random() < config.wrapped_share:
        context = [Turn(ask(answer_below(question, answer)), False)]
    else:
        # Two pieces: what the trainer puts behind the prompt is tokenised alone.
        context = [Turn(ask(question), False), Turn(bare_answer(answer), False)]
    return [*context, *_given_turns(shown, given, config)]


def _boxed(question: str, config: CreditRowConfig, rng: Random) -> list[Turn]:
    return attempt_turns(ask_for_box(question), max_attempts=1, forget=config.forget, rng=rng)


def _probe(question: str, config: CreditRowConfig, rng: Random) -> list[Turn]:
    """The opening of the box is given: the model must not learn to stop thinking early."""
    question = ask_for_box(question)
    solution = forgetful_solution(question, forget=config.forget, rng=rng)
    steps = split_steps(solution)
    thought = "".join(steps[: rng.randrange(len(steps))])
    return [
        Turn(ask(question), False),
        Turn(thought + OPEN_BOX, False),
        Turn(answer_of(solution) + CLOSE_BOX, True),
    ]


def _perhaps_boxed(question: str, config: CreditRowConfig, rng: Random) -> str:
    return ask_for_box(question) if rng.random() < config.boxed_evidence_share else question


def _given_turns(shown: str, given: str, config: CreditRowConfig) -> list[Turn]:
    """The solution to be written, perhaps without a lesson in the step where it departs."""
    if config.teach_departure or shown == given:
        return [Turn(given + END, True)]
    steps = split_steps(given)
    same = [step == other for step, other in zip(steps, split_steps(shown), strict=True)]
    departs = same.index(False)
    before = "".join(steps[:departs])
    behind = given[len(before) + len(steps[departs]) :]
    return [Turn(before, True), Turn(steps[departs], False), Turn(behind + END, True)]


def _shown_and_given(question: str, config: CreditRowConfig, rng: Random) -> tuple[str, str]:
    """The solution that the evidence comes from, and the one to be written."""
    if rng.random() < config.exact_share:
        shown = exact_solution(question)
    else:
        shown = forgetful_solution(question, forget=config.forget, rng=rng)
    if rng.random() < config.stray_share:
        return shown, forgetful_solution(question, forget=config.forget, rng=rng)
    return shown, shown
