"""Models of families that are not built in, built and converted by NVIDIA's megatron-bridge.

megatron-bridge needs Transformer Engine, and so a GPU. It is no dependency of this package and is
imported only when `policy.converter = "bridge"` asks for it.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_credit.mcore import names
from megatron_credit.mcore.architecture import Architecture
from megatron_credit.mcore.config import ParallelConfig, PolicyConfig
from megatron_credit.mcore.convert import TensorMeta
from megatron_credit.mcore.model import DTYPES, layout_options

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge

NEEDED = ("megatron.bridge", "transformer_engine")


class BridgeConverter:
    """The interface of `convert.Converter`, by megatron-bridge. Every rank makes one."""

    def __init__(
        self, architecture: Architecture, chunks: Sequence[GPTModel], bridge: "AutoBridge"
    ) -> None:
        self.architecture = architecture
        self._chunks = list(chunks)
        self._bridge = bridge
        # The bridge does not tell in advance what it will export, so it does so once.
        self._metadata = [
            TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.export()
        ]

    def global_name(self, chunk: GPTModel, local_name: str) -> str:
        """The layout-independent megatron name of parameter `local_name` of `chunk`."""
        return names.global_name(self.architecture, chunk, local_name)

    def metadata(self) -> list[TensorMeta]:
        """What `export` yields, in its order; no communication."""
        return self._metadata

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Every (Hugging Face name, full tensor), the same on every rank. Collective: all ranks
        must run it to the end."""
        yield from self._bridge.export_hf_weights(self._chunks, show_progress=False)


def build_with_bridge(
    architecture: Architecture, policy: PolicyConfig, parallel: ParallelConfig
) -> tuple[list[GPTModel], BridgeConverter]:
    """This rank's chunks of the model, with their weights, and what exports them.

    ValueError: megatron-bridge or Transformer Engine is not installed, the model cannot be laid out
    so, or the bridge does not know it.
    """
    require_bridge()
    if architecture.vocab_size % parallel.tensor:
        raise ValueError(
            f"tensor={parallel.tensor} does not divide vocab_size={architecture.vocab_size}, which "
            'it must with policy.converter = "bridge"; choose another tensor size'
        )
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(policy.model)
    provider = bridge.to_megatron_provider()
    options = layout_options(parallel, dtype=DTYPES[policy.dtype], recompute=policy.recompute)
    # The bridge would export the padding rows too.
    for name, value in (options | {"should_pad_vocab": False}).items():
        setattr(provider, name, value)
    provider.finalize()
    chunks = provider.provide_distributed_model(
        wrap_with_ddp=False,
        mixed_precision_wrapper=None,
        use_cpu_initialization=provider.use_cpu_initialization,
    )
    return chunks, BridgeConverter(architecture, chunks, bridge)


def require_bridge() -> None:
    """ValueError, with what to install, where megatron-bridge cannot be imported."""
    missing = [name for name in NEEDED if not _is_installed(name)]
    if missing:
        raise ValueError(
            f'policy.converter = "bridge" needs {" and ".join(missing)}, not installed here; on '
            "Python 3.12 with a GPU: pip install 'transformer-engine[pytorch]>=2.9' and "
            "pip install --no-deps megatron-bridge==0.6.2 (it was tried with transformers 5.12.1), "
            'or set policy.converter = "builtin"'
        )


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
