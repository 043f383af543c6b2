"""Sequences as flat tensors and back; between processes, see test_parity."""

from dataclasses import replace

import pytest
import torch
from mcore.parity_worker import MODELS, make_batch
from mcore.replay_checks import with_experts
from safetensors.torch import load, save

from megatron_credit.mcore.exchange import broadcast_payload, decode_sequences, encode_sequences


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(vars(one), vars(other), rtol=0, atol=0, equal_nan=True)


def test_round_trip_through_bytes():
    batch = make_batch("mixed", 134)
    assert_same(decode_sequences(load(save(encode_sequences(batch)))), batch)


def test_round_trip_without_optional_fields():
    batch = [
        replace(sequence, old_logprob_T=None, reference_logprob_T=None)
        for sequence in make_batch("mixed", 134)
    ]
    assert_same(decode_sequences(encode_sequences(batch)), batch)


def test_round_trip_with_experts():
    batch = with_experts(make_batch("mixed", 134), MODELS["moe"])
    assert_same(decode_sequences(load(save(encode_sequences(batch)))), batch)


def test_no_sequences():
    assert decode_sequences(encode_sequences([])) == []


def test_alone_the_payload_comes_back():
    header, tensors = broadcast_payload({"a": [1, None]}, {"b": torch.tensor([1.5])})
    assert header == {"a": [1, None]}
    assert tensors["b"].tolist() == [1.5]


def test_a_header_that_is_not_json_is_refused():
    with pytest.raises(TypeError, match="not JSON serializable"):
        broadcast_payload({"a": torch.zeros(1)})
