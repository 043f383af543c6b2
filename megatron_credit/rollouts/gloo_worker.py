"""The `gloo` backend of vLLM's weight transfer, on the engine's side. Runs in vLLM's workers only.

Named as the engine's worker extension, this module is imported by every worker before it loads its
model, which registers the backend.
"""

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

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
        )
        self._group.join()

    def start_weight_update(self) -> None:
        """Makes the layers ready to be loaded again.

        On a CPU, linear weights live in packed handles after loading, so plain load_weights fails.
        """
        unpack_experts(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        """As the base class, without its accelerator synchronisation: there is none on a CPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Loads the announced tensors. RuntimeError: a name that the model does not know."""
        pieces = [
            Piece(name, torch_dtype(dtype), tuple(shape))
            for name, dtype, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            )
        ]
        for bucket in plan_buckets(pieces, self._bucket_bytes):
            data = torch.empty(bucket_bytes(bucket), dtype=torch.uint8)
            self._group.broadcast(data)
            self.model.load_weights(unpack(bucket, data))

    def finish_weight_update(self) -> None:
        """Packs the layers for computing again."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_output_heads(self.model)

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


def unpack_experts(model: torch.nn.Module) -> None:
    """Makes mixture-of-experts layers pack their weights again after the coming reload.

    vLLM 0.32 prepacks CPU experts only while the layer has no kernel yet, so a reload would leave
    plain weights where the kernel reads packed ones: wrong outputs, no error.
    """
    for module in model.modules():
        method = vars(module).get("quant_method")
        if method is not None and vars(method).get("moe_kernel") is not None:
            method.moe_kernel = None


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
