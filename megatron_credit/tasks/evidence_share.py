"""Does the model read evidence? How much of a signal lies on the first wrong step of a response.

Evidence-conditioned credit is worth something only where the signal points at the mistake. Here the
mistake is known exactly. A model that never learned to read evidence spreads the signal evenly.

Shape letters: T tokens of a response, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from megatron_credit.batch.evidence_text import (
    answer_below,
    bare_answer,
    solution_below,
    system_solution,
)
from megatron_credit.tasks.sample import logprobs, write_chat
from megatron_credit.tasks.solver import exact_solution, first_wrong_step, split_steps


class WrongResponse(NamedTuple):
    """A response that the verifier refused, and another answer that it would have refused."""

    question: str
    token_ids: list[int]
    text: str
    answer: str
    """The right answer."""
    wrong_answer: str
    """The wrong answer that contrastive evidence shows."""


class EvidenceShares(NamedTuple):
    """Mean over responses of the share of a signal that lies on the first wrong step."""

    solution_in_user_turn: float
    """KL(with the exact solution in context || plain)."""
    solution_in_system_turn: float
    bare_answer: float
    """|log p(y | right answer) - log p(y | wrong answer)|."""
    wrapped_answer: float
    uniform: float
    """The step's share of the tokens: what a signal without meaning has."""


def measure_evidence_shares(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, wrong: Sequence[WrongResponse]
) -> EvidenceShares:
    """The shares of `wrong`, whose responses must all have a wrong step."""
    spans = [_wrong_span(response, tokenizer) for response in wrong]
    responses = [response.token_ids for response in wrong]

    def score(contexts: list[list[int]]) -> list[Tensor]:
        return logprobs(model, contexts, responses)

    plain = score([_chat_ids(tokenizer, _user(r.question)) for r in wrong])
    shown = [exact_solution(r.question) for r in wrong]
    in_user = score(
        [
            _chat_ids(tokenizer, _user(solution_below(r.question, solution)))
            for r, solution in zip(wrong, shown, strict=True)
        ]
    )
    in_system = score(
        [
            _chat_ids(tokenizer, _system(system_solution(solution)), _user(r.question))
            for r, solution in zip(wrong, shown, strict=True)
        ]
    )
    bare, wrapped = (
        [
            _gap_T(right_TV, wrong_TV, response)
            for right_TV, wrong_TV, response in zip(
                score([context(tokenizer, r, r.answer) for r in wrong]),
                score([context(tokenizer, r, r.wrong_answer) for r in wrong]),
                responses,
                strict=True,
            )
        ]
        for context in (_bare_ids, _wrapped_ids)
    )
    return EvidenceShares(
        _mean_share(list(map(_kl_T, in_user, plain)), spans),
        _mean_share(list(map(_kl_T, in_system, plain)), spans),
        _mean_share(bare, spans),
        _mean_share(wrapped, spans),
        _mean_share([prediction_TV.new_ones(len(prediction_TV)) for prediction_TV in plain], spans),
    )


def _wrong_span(response: WrongResponse, tokenizer: PreTrainedTokenizerBase) -> slice:
    """Tokens of the first wrong step; of all that follows the steps where they are all right."""
    step = first_wrong_step(response.text, response.question)
    assert step is not None
    steps = split_steps(response.text)
    start = sum(len(tokenizer(text)["input_ids"]) for text in steps[:step])
    if step >= len(steps):
        return slice(start, len(response.token_ids))
    return slice(start, start + len(tokenizer(steps[step])["input_ids"]))


def _kl_T(evidence_TV: Tensor, plain_TV: Tensor) -> Tensor:
    return (evidence_TV.exp() * (evidence_TV - plain_TV)).sum(-1).clamp(min=0)


def _gap_T(right_TV: Tensor, wrong_TV: Tensor, response: list[int]) -> Tensor:
    rows = range(len(response))
    return (right_TV[rows, response] - wrong_TV[rows, response]).abs()


def _mean_share(signals: list[Tensor], spans: list[slice]) -> float:
    shares = [
        float(signal_T[span].sum() / signal_T.sum().clamp(min=1e-12))
        for signal_T, span in zip(signals, spans, strict=True)
    ]
    return sum(shares) / len(shares)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def _chat_ids(tokenizer: PreTrainedTokenizerBase, *messages: dict[str, str]) -> list[int]:
    return tokenizer(write_chat(tokenizer, list(messages)), add_special_tokens=False)["input_ids"]


def _bare_ids(
    tokenizer: PreTrainedTokenizerBase, response: WrongResponse, answer: str
) -> list[int]:
    evidence = tokenizer(bare_answer(answer), add_special_tokens=False)["input_ids"]
    return _chat_ids(tokenizer, _user(response.question)) + evidence


def _wrapped_ids(
    tokenizer: PreTrainedTokenizerBase, response: WrongResponse, answer: str
) -> list[int]:
    return _chat_ids(tokenizer, _user(answer_below(response.question, answer)))
