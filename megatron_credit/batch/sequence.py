"""One rollout as the policy trains on it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """Token ids of prompt and response, and what is known of each response token.

    ValueError where the fields do not fit together. Values of tokens whose mask is False are never
    used and may be NaN.
    """

    token_ids_L: Tensor
    """int64: prompt, then response."""
    num_prompt: int
    """Prompt tokens, at least one: the first response token needs a token to be predicted from."""
    mask_T: Tensor
    """bool: the policy sampled this token and trains on it."""
    rollout_logprob_T: Tensor
    """float32: log-prob in nats at sampling time, after the temperature."""
    advantage_T: Tensor
    """float32: credit of each token."""
    old_logprob_T: Tensor | None
    """float32: log-prob under the policy that the ratio refers to; None: the policy as it is when
    the update begins, whose log-prob the update's own forward pass gives."""
    reference_logprob_T: Tensor | None
    """float32: log-prob under the reference policy; None where no KL is asked for."""
    routed_experts_LDK: Tensor | None = None
    """int16, [tokens, decoder layers, experts per token]: the experts that each token went to in
    the engine, which the policy is then computed with; None: the policy's own router decides. It
    also does for tokens whose experts are -1: the last one sampled, which the engine never reads,
    and those whose routing it cannot tell."""
    selected_T: Tensor | None = None
    """bool: the tokens whose mean the policy loss takes apart from that of the others, see
    `batch.weights`; None: one mean over all. It is made on every rank, so it never travels."""

    def __post_init__(self) -> None:
        if self.token_ids_L.dim() != 1 or self.token_ids_L.dtype != torch.int64:
            raise ValueError(
                f"token_ids_L has shape {tuple(self.token_ids_L.shape)} and type "
                f"{self.token_ids_L.dtype}; expected one dimension of int64"
            )
        if not 1 <= self.num_prompt <= len(self.token_ids_L):
            raise ValueError(
                f"num_prompt={self.num_prompt} with {len(self.token_ids_L)} tokens; "
                "expected 1 <= num_prompt <= tokens"
            )
        for name, value in (("mask_T", self.mask_T), ("selected_T", self.selected_T)):
            if value is not None:
                _check_response(name, value, torch.bool, self.num_response)
        for name, value in (
            ("rollout_logprob_T", self.rollout_logprob_T),
            ("advantage_T", self.advantage_T),
            ("old_logprob_T", self.old_logprob_T),
            ("reference_logprob_T", self.reference_logprob_T),
        ):
            if value is not None:
                _check_response(name, value, torch.float32, self.num_response)
        _check_experts(self.routed_experts_LDK, len(self.token_ids_L))

    @property
    def num_response(self) -> int:
        """Response tokens, T; the rollout may have none."""
        return len(self.token_ids_L) - self.num_prompt

    @property
    def num_trained(self) -> int:
        """Tokens whose mask is True."""
        return int(self.mask_T.sum())

    @property
    def num_selected(self) -> int:
        """Trained tokens that are selected."""
        return 0 if self.selected_T is None else int((self.mask_T & self.selected_T).sum())


def _check_response(name: str, value: Tensor, dtype: torch.dtype, num_response: int) -> None:
    if value.shape != (num_response,) or value.dtype != dtype:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} and type {value.dtype}; expected "
            f"({num_response},) and {dtype}, one value for each response token"
        )


def _check_experts(experts_LDK: Tensor | None, num_tokens: int) -> None:
    if experts_LDK is None:
        return
    shape, dtype = tuple(experts_LDK.shape), experts_LDK.dtype
    if experts_LDK.dim() != 3 or shape[0] != num_tokens or dtype != torch.int16:
        raise ValueError(
            f"routed_experts_LDK has shape {shape} and type {dtype}; expected {num_tokens} tokens "
            "x decoder layers x experts per token of torch.int16"
        )


def all_or_none(values: list[Tensor | None], name: str) -> bool:
    """Whether every sequence has the field; ValueError where only some do."""
    given = sum(value is not None for value in values)
    if 0 < given < len(values):
        raise ValueError(
            f"{given} of {len(values)} sequences have {name}; expected all of them or none"
        )
    return given > 0


def check_token_ids(name: str, token_ids_L: Tensor, vocab_size: int) -> None:
    """ValueError where a token of what is called `name` is not in the vocabulary."""
    if int(token_ids_L.max()) >= vocab_size or int(token_ids_L.min()) < 0:
        raise ValueError(
            f"{name} has token ids outside of 0 .. {vocab_size - 1}; tokenizer and model do not "
            "match"
        )
