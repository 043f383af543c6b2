"""The experts that the tokens of a rollout went to in the engine, between text and tensor."""

import base64
import binascii
import io

import numpy as np
import torch
from torch import Tensor


def decode_experts(text: str, *, num_tokens: int) -> Tensor:
    """int16, [tokens, layers, experts per token], of a base64 text of a .npy file, as vLLM answers.

    The engine never reads the last token that it samples, which therefore has -1. ValueError: the
    text is no such thing, or has not one row for each other token.
    """
    try:
        found_LDK = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        raise ValueError(f"routed_experts is not the base64 text of an array: {error}") from None
    if found_LDK.ndim != 3 or found_LDK.dtype.kind not in "iu" or len(found_LDK) != num_tokens - 1:
        raise ValueError(
            f"routed_experts has shape {found_LDK.shape} and type {found_LDK.dtype}; expected "
            f"whole numbers for {num_tokens - 1} tokens x layers x experts per token"
        )
    expert_LDK = torch.full((num_tokens, *found_LDK.shape[1:]), -1, dtype=torch.int16)
    expert_LDK[:-1] = torch.from_numpy(found_LDK.astype(np.int16))
    return expert_LDK
