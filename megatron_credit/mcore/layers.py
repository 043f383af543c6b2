"""Our own norm and attention, in plain torch, for where Transformer Engine is not installed.

They plug into megatron's layer specification. The attention takes packed sequences and context
parallelism, which megatron's own torch attention refuses.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_credit.batch.packing import context_positions
from megatron_credit.batch.sight import Sight
from megatron_credit.mcore.routing import RoutedPack


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, computed in float32.

    Its weight carries megatron's `sequence_parallel` flag, by which its gradient is summed over the
    tensor ranks; megatron's own torch norm refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(ones)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """The normalised `hidden`, in its dtype."""
        normalised = F.rms_norm(hidden.float(), hidden.shape[-1:], self.weight.float(), self.eps)
        return normalised.to(hidden.dtype)


class RotaryAttention(torch.nn.Module):
    """Causal grouped-query attention that applies the rotary embedding itself.

    megatron's rotary embedding of packed sequences goes sequence by sequence, and its backward
    copies the pack for each: over 200 sequences of 45 tokens that costs twice the attention.
    Context ranks hold megatron's zig-zag chunks of each sequence; keys and values are gathered over
    them, so each context rank holds all keys of its micro-batch for the duration of a layer.
    A `RoutedPack` may say that its sequences are trees, or that they go on from others.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None,
        softmax_scale: float | None,
        pg_collection: ProcessGroupCollection,
        *,
        frequency_F: Tensor,
    ) -> None:
        super().__init__()
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise ValueError(f"only causal self-attention, got {attn_mask_type} {attention_type}")
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale
        # No buffer: a model that turns to bfloat16 would round it.
        self.frequency_F = frequency_F

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None,
        packed_seq_params: PackedSeqParams | None,
    ) -> Tensor:
        """[T, N x D] for packed query [T, N, D], key and value [T, G, D]; [L, B, N x D] for padded
        query [L, B, N, D]. Padding must be on the right, where causality hides it: ValueError for
        an explicit mask or bias."""
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                "attention takes no explicit mask or bias; pad on the right or pack the sequences"
            )
        cp_size = self.cp_group.size()
        if packed_seq_params is not None:
            told = packed_seq_params.sight if isinstance(packed_seq_params, RoutedPack) else None
            sight = told or self._sight(_lengths(packed_seq_params), query.device)
            return self._attend(query, key, value, sight).flatten(1)
        length, batch = query.shape[:2]
        flat = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        sight = self._sight((length * cp_size,) * batch, query.device)
        output_TND = self._attend(*flat, sight)
        return output_TND.view(batch, length, -1).transpose(0, 1).contiguous()

    def _sight(self, lengths: tuple[int, ...], device: torch.device) -> Sight:
        return _causal(lengths, self.cp_group.size(), self.cp_group.rank(), device)

    def _attend(
        self, query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, sight: Sight
    ) -> Tensor:
        if len(sight.position_P) != query_TND.shape[0]:
            cp_size = self.cp_group.size()
            raise ValueError(
                f"cu_seqlens end at {len(sight.position_P) * cp_size} tokens over {cp_size} "
                f"context ranks, but this rank's pack has {query_TND.shape[0]}"
            )
        cos_TD, sin_TD = _rotary(sight.position_P, self.frequency_F)
        query_TND = _rotate(query_TND, cos_TD, sin_TD)
        key_TGD = _rotate(key_TGD, cos_TD, sin_TD)
        both_TCGE = _keys_and_values(key_TGD, value_TGD, self.cp_group)
        outputs = []
        # One call per sequence: padding them into batches was measured to gain nothing on a CPU.
        for query, both, num_causal, mask, before in zip(
            query_TND.split(sight.lengths),
            both_TCGE.split(sight.lengths),
            sight.num_causal,
            sight.masks,
            sight.before or (None,) * len(sight.lengths),
            strict=True,
        ):
            if before is not None:
                both = torch.cat([both_TCGE[before], both])
            key, value = both.transpose(0, 1).flatten(0, 1).chunk(2, dim=-1)
            if num_causal:
                first = (tensor[:num_causal] for tensor in (query, key, value))
                outputs.append(_attention(*first, None, self.scale))
            if mask is not None:
                outputs.append(_attention(query[num_causal:], key, value, mask, self.scale))
        return torch.cat(outputs)


@functools.lru_cache(maxsize=16)
def _causal(lengths: tuple[int, ...], cp_size: int, cp_rank: int, device: torch.device) -> Sight:
    """What is seen in plain sequences of these lengths over all context ranks.

    Cached, because all layers of a micro-batch ask for the same one.
    """
    multiple = 2 * cp_size if cp_size > 1 else 1
    wrong = [length for length in lengths if length % multiple]
    if wrong:
        raise ValueError(
            f"sequence lengths {wrong[:5]} are no multiples of {multiple} (2 x context); "
            "pad each sequence"
        )
    position_T = torch.cat([_positions(length, cp_size, cp_rank) for length in lengths])
    masks = tuple(_mask(length, cp_size, cp_rank, device) for length in lengths)
    return Sight(
        lengths=tuple(length // cp_size for length in lengths),
        position_P=position_T.to(device),
        num_causal=lengths if cp_size == 1 else (0,) * len(lengths),
        masks=masks,
    )


def _positions(length: int, cp_size: int, cp_rank: int) -> Tensor:
    return context_positions(torch.tensor([0, length]), rank=cp_rank, size=cp_size)


def _mask(length: int, cp_size: int, cp_rank: int, device: torch.device) -> Tensor | None:
    if cp_size == 1:
        return None
    key = torch.cat([_positions(length, cp_size, rank) for rank in range(cp_size)])
    return (_positions(length, cp_size, cp_rank)[:, None] >= key).to(device)


def _lengths(packed: PackedSeqParams) -> tuple[int, ...]:
    """Lengths of the sequences over all context ranks, padding included."""
    ends = packed.cu_seqlens_q_padded
    ends = packed.cu_seqlens_q if ends is None else ends
    return tuple((ends[1:] - ends[:-1]).tolist())


def _rotary(position_T: Tensor, frequency_F: Tensor) -> tuple[Tensor, Tensor]:
    angle_TD = torch.outer(position_T.float(), frequency_F.to(position_T.device)).repeat(1, 2)
    return angle_TD.cos(), angle_TD.sin()


def _rotate(heads_TND: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = heads_TND.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    cos, sin = (table[:, None].to(heads_TND.dtype) for table in (cos_TD, sin_TD))
    return heads_TND * cos + turned * sin


def _keys_and_values(key_TGD: Tensor, value_TGD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, C, G, 2 x D]: at [t, c], key and value of context rank c's token t."""
    both = torch.cat([key_TGD, value_TGD], dim=-1)
    if group.size() == 1:
        return both[:, None]
    gathered = gather_from_sequence_parallel_region(both, group=group)
    return gathered.unflatten(0, (group.size(), -1)).transpose(0, 1)


def _attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    output = F.scaled_dot_product_attention(
        *(tensor.transpose(0, 1)[None] for tensor in (query_TND, key_TGD, value_TGD)),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)
