"""A backward pass down to the activations, which leaves no trace on parameters or their gradients.

megatron's own schedule carries it, so that gradients cross pipeline stages, tensor, context and
expert ranks as they do in training. What differs, and for the pass only: no parameter asks for a
gradient, the embedded tokens do, and megatron reduces no gradients at the end.

Shape letters: Q the positions of a micro-batch that are on this rank: P, those of its context rank,
or under sequence parallelism its tensor rank's share of them. H hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_credit.batch.packing import PackedBatch

Leaf = Literal["embedding", "first", "middle", "last"]
"""Whose gradient: the embedded tokens that go into the first layer, or the hidden states that come
out of layer 1, max(1, L // 2) or L of L, residual included and before the final norm."""
Keep = Callable[[PackedBatch, Tensor, Tensor], None]
"""Takes (micro-batch, activation [Q, H], its gradient [Q, H]), once a micro-batch."""


@contextmanager
def activation_gradients(
    chunks: Sequence[GPTModel], batches: Sequence[PackedBatch], leaf: Leaf, keep: Keep
) -> Iterator[None]:
    """Within, a pass of `batches` that goes backward hands each one's gradient at `leaf` to `keep`,
    on the ranks that hold that layer, and computes no other gradient.

    `chunks` are this rank's, not wrapped for data parallelism. Afterwards they are as before,
    after an exception too. The graph of a micro-batch lives no longer than in training.
    """
    with ExitStack() as stack:
        stack.enter_context(_frozen(chunks))
        stack.enter_context(_without_reductions(chunks[0].config))
        for chunk in chunks:
            if chunk.pre_process:
                stack.enter_context(chunk.embedding.register_forward_hook(_start_graph))
            for layer in chunk.decoder.layers:
                if layer.layer_number == _number(leaf, chunk.config.num_layers):
                    watch = _watcher(batches, keep, at_input=leaf == "embedding")
                    hook = layer.register_forward_hook(watch, with_kwargs=True)
                    stack.enter_context(hook)
        yield


def _number(leaf: Leaf, num_layers: int) -> int:
    """The layer, counted from 1, at which `leaf` is seen."""
    numbers = {"embedding": 1, "first": 1, "middle": max(1, num_layers // 2), "last": num_layers}
    return numbers[leaf]


@contextmanager
def _frozen(chunks: Sequence[GPTModel]) -> Iterator[None]:
    """Within, no parameter asks for a gradient."""
    trained = [each for chunk in chunks for each in chunk.parameters() if each.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _without_reductions(config: TransformerConfig) -> Iterator[None]:
    """Within, megatron's schedule leaves gradients alone: there are none of this pass to reduce,
    and the reduction would add up again those of the last step."""
    functions = config.finalize_model_grads_func, config.grad_sync_func, config.no_sync_func
    try:
        _set_reductions(config, None, None, None)
        yield
    finally:
        _set_reductions(config, *functions)


def _set_reductions(config: TransformerConfig, finalize: Any, grad_sync: Any, no_sync: Any) -> None:
    config.finalize_model_grads_func = finalize
    config.grad_sync_func = grad_sync
    config.no_sync_func = no_sync


def _start_graph(_embedding: torch.nn.Module, _args: Any, embedded: Tensor) -> Tensor:
    """The embedded tokens as the leaf that a backward pass ends at."""
    return embedded.detach().requires_grad_()


def _watcher(
    batches: Sequence[PackedBatch], keep: Keep, *, at_input: bool
) -> Callable[[TransformerLayer, tuple[Any, ...], dict[str, Any], tuple[Tensor, Any]], None]:
    """Hook of a layer that waits for the gradient of what goes in, or comes out."""
    # The boundaries that megatron hands to every layer, and again when it recomputes, say which of
    # the micro-batches in flight this is.
    batch_of = {id(batch.boundaries_B1): batch for batch in batches}

    def watch(
        _layer: TransformerLayer,
        _args: tuple[Any, ...],
        options: dict[str, Any],
        outputs: tuple[Tensor, Any],
    ) -> None:
        if not torch.is_grad_enabled():
            # Full recompute keeps no graph of this pass and calls the layer again.
            return
        hidden = options["hidden_states"] if at_input else outputs[0]
        batch = batch_of[id(options["packed_seq_params"].cu_seqlens_q)]
        value_QH = hidden.detach()[:, 0]
        hidden.register_hook(lambda gradient: keep(batch, value_QH, gradient[:, 0]))

    return watch
