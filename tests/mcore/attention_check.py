"""Our attention, forward and backward, against a float64 computation with explicit matrices."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, THETA = 4, 2, 6, 100.0
# Multiples of 4 for two context ranks; the longest is neither first nor last.
LENGTHS = (4, 20, 8, 12)


def errors(ranks: Any) -> dict[str, dict[str, float]]:
    """Largest absolute error of output and input gradients on this rank, packed and as a batch of
    equally long sequences."""
    return {
        "packed": _errors(ranks, LENGTHS, packed=True),
        "batch": _errors(ranks, (12, 12, 12), packed=False),
    }


def _errors(ranks: Any, lengths: tuple[int, ...], *, packed: bool) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    total = sum(lengths)
    inputs = [
        torch.randn(total, heads, HEAD_DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    cotangent = torch.randn(total, HEADS * HEAD_DIM, generator=generator, dtype=torch.float64)
    truth = _gradients(lambda *leaves: _truth(*leaves, lengths), inputs, cotangent)
    part = _held_tokens(lengths, ranks)
    found = _gradients(
        lambda *leaves: _ours(*leaves, lengths, ranks, packed=packed),
        [tensor[part].float() for tensor in inputs],
        cotangent[part].float(),
    )
    names = ("output", "query", "key", "value")
    return {
        name: (ours.double() - expected[part]).abs().max().item()
        for name, ours, expected in zip(names, found, truth, strict=True)
    }


def _gradients(function: Any, inputs: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, cotangent)]


def _held_tokens(lengths: tuple[int, ...], ranks: Any) -> Tensor:
    """Places in the whole pack of the tokens on this context rank."""
    held = []
    for tokens in torch.arange(sum(lengths)).split(lengths):
        chunks = tokens.chunk(2 * ranks.cp_size)
        pair = [chunks[ranks.cp_rank], chunks[-1 - ranks.cp_rank]]
        held.append(tokens if ranks.cp_size == 1 else torch.cat(pair))
    return torch.cat(held)


def _ours(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], ranks: Any, *, packed: bool
) -> Tensor:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_credit.mcore.layers import RotaryAttention

    attention = RotaryAttention(
        config=None,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=None,
        softmax_scale=None,
        pg_collection=SimpleNamespace(cp=ranks.cp_group),
        frequency_F=1 / THETA ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM),
    )
    params = None
    tensors = query, key, value
    if packed:
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    else:
        tensors = tuple(x.unflatten(0, (len(lengths), -1)).transpose(0, 1) for x in tensors)
    output = attention(
        *tensors,
        None,
        attn_mask_type=AttnMaskType.causal,
        attention_bias=None,
        packed_seq_params=params,
    )
    return output if packed else output.transpose(0, 1).flatten(0, 1)


def _truth(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
    parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    return torch.cat([_one_sequence(*part) for part in parts])


def _one_sequence(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    length = query.shape[0]
    position = torch.arange(length, dtype=torch.float64)
    key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
    score = torch.einsum("qhd,khd->hqk", _turn(query, position), _turn(key, position))
    hidden = position[None, :] > position[:, None]
    weight = (score / HEAD_DIM**0.5).masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weight, value).flatten(1)


def _turn(heads: Tensor, position: Tensor) -> Tensor:
    """The rotary embedding as products of complex numbers."""
    half = HEAD_DIM // 2
    angle = position[:, None] * THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(heads[..., :half], heads[..., half:])
    turned = turned * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)
