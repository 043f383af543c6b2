"""Which experts a token goes to: those with the largest router scores, or those it went to in the
engine (router replay).

An engine computes with other kernels, so a token near the border between two experts may go to one
there and to the other here. The log-probs then differ by far more than rounding, and the importance
ratio with them. Replayed, both compute with the same experts (arXiv 2510.11370); how much each of
them counts is still decided, and learnt, by the trainer's router.

Shape letters: P positions of a packed micro-batch on this rank, D decoder layers of the whole
model, E experts of a layer, K experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.batch.sight import Sight
from megatron_credit.mcore.architecture import Architecture


@dataclass
class RoutedPack(PackedSeqParams):
    """Where the sequences of a micro-batch lie, where their tokens went in the engine, and what
    they see of each other.

    megatron hands it to every layer, and to the same layer again when it recomputes, so that no
    schedule can mix up micro-batches.
    """

    routed_experts_PDK: Tensor | None = None
    """-1: not known, the router decides."""
    sight: Sight | None = None
    """None: in each sequence, what came before. Only our own attention goes by it."""


def take_over_routing(chunk: GPTModel) -> None:
    """Makes the routers of `chunk` go by the `RoutedPack` of each micro-batch.

    For all other tokens they choose as before, but always in descending order: megatron leaves the
    order open when it needs no gradients, and the order decides the last bit of weights that are
    scaled to add up to 1. Scoring and training would see different bits.
    """
    for layer in chunk.decoder.layers:
        choice = _Choice()
        layer.mlp.router.router_replay = choice
        layer.register_forward_pre_hook(choice.look_up, with_kwargs=True)


class _Choice:
    """Stands in the place of megatron's RouterReplay, which is one queue for all micro-batches."""

    def __init__(self) -> None:
        self._known_PK: Tensor | None = None

    def look_up(
        self, layer: TransformerLayer, _args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Takes what the micro-batch that comes next says of this layer."""
        packed = options["packed_seq_params"]
        self._known_PK = None
        if isinstance(packed, RoutedPack) and packed.routed_experts_PDK is not None:
            known_PK = packed.routed_experts_PDK[:, layer.layer_number - 1]
            if layer.config.sequence_parallel:
                size = parallel_state.get_tensor_model_parallel_world_size()
                rank = parallel_state.get_tensor_model_parallel_rank()
                known_PK = known_PK.chunk(size)[rank]
            self._known_PK = known_PK.long()

    def get_replay_topk(
        self, scores_PE: Tensor, num_chosen: int, *_options: Any
    ) -> tuple[Tensor, Tensor]:
        """(score, number) of each token's experts."""
        score_PK, expert_PK = torch.topk(scores_PE, num_chosen, dim=1)
        if self._known_PK is None:
            return score_PK, expert_PK
        expert_PK = torch.where(self._known_PK >= 0, self._known_PK, expert_PK)
        return scores_PE.gather(1, expert_PK), expert_PK


def with_replay(
    sequences: Sequence[TrainSequence], architecture: Architecture
) -> Sequence[TrainSequence]:
    """The sequences, each of which says which experts of this architecture its tokens went to.

    ValueError for one that does not: it would be computed with other experts, silently.
    """
    for number, sequence in enumerate(sequences):
        if sequence.routed_experts_LDK is None:
            raise ValueError(
                f"sequence {number} does not say which experts its tokens went to, which "
                "policy.router_replay needs; start the engine with routed experts, or turn "
                "policy.router_replay off"
            )
        try:
            _check_experts(sequence.routed_experts_LDK, architecture)
        except ValueError as error:
            raise ValueError(f"sequence {number}: {error}") from None
    return sequences


def without_replay(sequences: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
    """The sequences with nothing said of experts: the routers decide."""
    return [
        sequence
        if sequence.routed_experts_LDK is None
        else replace(sequence, routed_experts_LDK=None)
        for sequence in sequences
    ]


def _check_experts(expert_LDK: Tensor, architecture: Architecture) -> None:
    sizes = (architecture.num_layers, architecture.experts_per_token)
    if tuple(expert_LDK.shape[1:]) != sizes:
        raise ValueError(
            f"routed in {expert_LDK.shape[1]} layers to {expert_LDK.shape[2]} experts a token, but "
            f"this model has {sizes[0]} layers and {sizes[1]} experts a token; the rollouts are of "
            "another model"
        )
    ordered_LDK = expert_LDK.sort(dim=-1).values
    differ_LD = (ordered_LDK.diff(dim=-1) > 0).all(-1)
    exist_LD = (ordered_LDK[..., 0] >= 0) & (ordered_LDK[..., -1] < architecture.num_experts)
    unknown_LD = (expert_LDK == -1).all(-1)
    wrong_LD = ~(unknown_LD | (differ_LD & exist_LD))
    if wrong_LD.any():
        token, layer = wrong_LD.nonzero()[0].tolist()
        raise ValueError(
            f"token {token} was routed in layer {layer} to experts "
            f"{expert_LDK[token, layer].tolist()}; expected different ones of 0 .. "
            f"{architecture.num_experts - 1}, or -1 for all where that is not known"
        )
