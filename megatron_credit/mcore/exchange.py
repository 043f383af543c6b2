"""From the rank that talks to the engines to all others: JSON and tensors, never pickles."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence, all_or_none

_RESPONSE_FIELDS = ("mask_T", "rollout_logprob_T", "advantage_T")
_OPTIONAL_FIELDS = ("old_logprob_T", "reference_logprob_T")
_EXPERTS = "routed_experts_LDK"


def broadcast_payload(
    header: Mapping[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Global rank 0's header (a JSON object) and CPU tensors, on every rank.

    Collective over the world. Rank 0 gives them, the others nothing. TypeError, on rank 0 and
    before anything is sent, where the header is not JSON.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        text = json.dumps(dict(header or {})).encode()
        body = save({name: tensor.contiguous() for name, tensor in (tensors or {}).items()})
        _broadcast(torch.tensor([len(text), len(body)]))
        _broadcast(torch.frombuffer(bytearray(text + body), dtype=torch.uint8))
        # Decoded like everywhere else, so that rank 0 cannot know more than the others do.
        return json.loads(text), load(body)
    text_size, body_size = _broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
    empty = torch.empty(text_size + body_size, dtype=torch.uint8)
    data = _broadcast(empty).numpy().tobytes()
    return json.loads(data[:text_size]), load(data[text_size:])


def _broadcast(data: Tensor) -> Tensor:
    """Rank 0's `data` on the CPU of every rank; NCCL carries it over the devices."""
    if not dist.is_initialized():
        return data
    on_device = data.to(collective_device())
    dist.broadcast(on_device, src=0)
    return on_device.cpu()


def collective_device() -> torch.device:
    """Where tensors must lie for the world's collectives."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another process was gone: the cause is elsewhere."""
    # Gloo's errors have no type of their own; those of ours that quote a log are of others.
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and "gloo" in str(error)
    )


def encode_sequences(sequences: Sequence[TrainSequence]) -> dict[str, Tensor]:
    """The sequences as a few flat tensors; inverse of `decode_sequences`.

    ValueError where only some sequences have old or reference log-probs or routed experts.
    """
    payload = {
        "num_tokens": torch.tensor([len(s.token_ids_L) for s in sequences], dtype=torch.int64),
        "num_prompt": torch.tensor([s.num_prompt for s in sequences], dtype=torch.int64),
    }
    if sequences:
        payload["token_ids_L"] = torch.cat([s.token_ids_L for s in sequences])
    for name in (*_RESPONSE_FIELDS, *_OPTIONAL_FIELDS, _EXPERTS):
        values = [vars(s)[name] for s in sequences]
        if all_or_none(values, name):
            payload[name] = torch.cat(values)
    return payload


def decode_sequences(payload: Mapping[str, Tensor]) -> list[TrainSequence]:
    """The sequences that `encode_sequences` was given."""
    num_prompt = payload["num_prompt"].tolist()
    num_tokens = payload["num_tokens"].tolist()
    if not num_tokens:
        return []
    num_response = [total - prompt for total, prompt in zip(num_tokens, num_prompt, strict=True)]
    columns: dict[str, Sequence[Tensor | int | None]] = {
        "num_prompt": num_prompt,
        "token_ids_L": payload["token_ids_L"].split(num_tokens),
    }
    for name in _RESPONSE_FIELDS:
        columns[name] = payload[name].split(num_response)
    parts = dict.fromkeys(_OPTIONAL_FIELDS, num_response) | {_EXPERTS: num_tokens}
    for name, sizes in parts.items():
        given = name in payload
        columns[name] = payload[name].split(sizes) if given else [None] * len(num_tokens)
    return [
        TrainSequence(**dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]
