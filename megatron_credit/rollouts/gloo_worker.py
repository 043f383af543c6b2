"""The `gloo` backend of vLLM's weight transfer, on the engine's side. Runs in vLLM's workers only.

Named as the engine's worker extension, this module is imported by every worker before it loads its
model, which registers the backend.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_credit.rollouts.buckets import Piece, bucket_bytes, plan_buckets, unpack
from megatron_credit.rollouts.gloo_group import GlooGroup

BACKEND = "gloo"


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the group meets, and the sizes that both sides must share."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    token: str
    bucket_bytes: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors that will come, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives full Hugging Face tensors in buckets and loads each bucket as it comes."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: GlooGroup | None = None
    _is_updating = False

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Joins the group; a second call joins a new one."""
        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._bucket_bytes = init_info.bucket_bytes
        self._group = GlooGroup(
            init_info.master_address,
            init_info.master_port,
            rank=init_info.rank_offset + rank,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
            token=init_info.token,
        )
        self._group.join()

    def start_weight_update(self) -> None:
        """Makes the layers ready to be loaded again.

        On a CPU, linear weights live in packed handles after loading, so plain load_weights fails.
        RuntimeError after an update that was not finished: what was loaded then is mixed with what
        would come now.
        """
        if self._is_updating:
            raise RuntimeError(
                "an earlier weight update broke off, so these weights are neither old nor new; "
                "restart the engine"
            )
        self._is_updating = True
        unpack_experts(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        """As the base class, without its accelerator synchronisation: there is none on a CPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Loads the announced tensors. RuntimeError: one that the model does not know, or whose
        shape is not the model's."""
        pieces = [
            Piece(name, torch_dtype(dtype), tuple(shape))
            for name, dtype, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            )
        ]
        with ExitStack() as failed:
            failed.callback(self.shutdown)  # the sender must not wait for us to take the rest
            arriving: deque[tuple[list[Piece], torch.Tensor]] = deque()
            for bucket in plan_buckets(pieces, self._bucket_bytes):
                data = torch.empty(bucket_bytes(bucket), dtype=torch.uint8)
                self._group.start_broadcast(data)
                arriving.append((bucket, data))
                if len(arriving) > 1:  # one is loaded while the next is on its way
                    self._load(*arriving.popleft())
            for bucket, data in arriving:
                self._load(bucket, data)
            failed.pop_all()

    def _load(self, bucket: list[Piece], data: torch.Tensor) -> None:
        """Waits for a bucket and loads it."""
        self._group.finish_broadcast()
        load_named(self.model, unpack(bucket, data))

    def finish_weight_update(self) -> None:
        """Packs the layers for computing again. RuntimeError: layers that got too little."""
        require_complete(self.model, has_tied_head=self._has_tied_head())
        finalize_layerwise_reload(self.model, self.model_config)
        pack_output_heads(self.model)
        self._is_updating = False

    def _has_tied_head(self) -> bool:
        return self.model_config.hf_text_config.tie_word_embeddings

    def shutdown(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


def torch_dtype(name: str) -> torch.dtype:
    """The type called `name`; ValueError for other attributes of torch."""
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def load_named(model: torch.nn.Module, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Loads the tensors; a RuntimeError names the one that the model refuses."""
    name = "no tensor"

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal name
        for one, tensor in tensors:
            name = f"{one} {tuple(tensor.shape)}"
            yield one, tensor

    try:
        model.load_weights(watched())
    except (AssertionError, AttributeError, LookupError, RuntimeError, ValueError) as error:
        # vLLM's loaders say with a bare assert that a shape is not theirs.
        raise RuntimeError(f"the engine cannot load {name}: {error!r}") from error


def require_complete(model: torch.nn.Module, *, has_tied_head: bool) -> None:
    """RuntimeError where a layer did not get all its weights.

    vLLM 0.32 says nothing then: the layer keeps its old weights, or has what was in memory in place
    of a part of a fused one.
    """
    incomplete = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or not any(True for _ in layer.parameters(recurse=False)):
            continue
        if isinstance(layer, ParallelLMHead) and has_tied_head:
            continue
        # Embeddings are padded to rows that no checkpoint has.
        wanted = 1 if isinstance(layer, VocabParallelEmbedding) else info.load_numel_total
        if info.load_numel < wanted:
            incomplete.append(f"{name} ({info.load_numel} of {info.load_numel_total} numbers)")
    if incomplete:
        raise RuntimeError(f"the weight update left out parts of {', '.join(incomplete[:8])}")


def unpack_experts(model: torch.nn.Module) -> None:
    """Makes mixture-of-experts layers pack their weights again after the coming reload.

    vLLM 0.32 prepacks CPU experts only while the layer has no kernel yet, so a reload would leave
    plain weights where the kernel reads packed ones: wrong outputs, no error.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None


def pack_output_heads(model: torch.nn.Module) -> None:
    """Packs the output weight for computing again.

    A head that shares the embedding's weight has nothing to load, so vLLM 0.32 leaves the packed
    copy that its CPU matrix product reads as it was: the old head over new layers.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Nothing but the reason for workers to import this module."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)
