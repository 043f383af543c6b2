"""Experts of a rollout from the text in which engines send them."""

import base64
import io

import numpy as np
import pytest

from megatron_credit.batch.routing import decode_experts


def encoded(array: np.ndarray) -> str:
    """As vLLM answers."""
    with io.BytesIO() as buffer:
        np.save(buffer, array)
        return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32"])
def test_the_last_token_has_none(dtype):
    # Two tokens that were read, one layer, two experts a token.
    found_LDK = decode_experts(encoded(np.array([[[3, 1]], [[0, 200]]], dtype)), num_tokens=3)
    assert found_LDK.tolist() == [[[3, 1]], [[0, 200]], [[-1, -1]]]
    assert str(found_LDK.dtype) == "torch.int16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no base64!", "not the base64 text of an array"),
        (base64.b64encode(b"no array").decode(), "not the base64 text of an array"),
        (encoded(np.zeros((3, 1, 2), np.uint8)), r"shape \(3, 1, 2\) .* for 2 tokens x layers"),
        (encoded(np.zeros((2, 2), np.uint8)), r"shape \(2, 2\) and type uint8"),
        (encoded(np.zeros((2, 1, 2))), "type float64; expected whole numbers"),
    ],
)
def test_anything_else_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        decode_experts(text, num_tokens=3)


def test_pickles_are_never_opened():
    with pytest.raises(ValueError, match="not the base64 text of an array"):
        decode_experts(encoded(np.array([{}], dtype=object)), num_tokens=2)
