"""This rank's part of a model with the weights of a Hugging Face directory."""

from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from megatron_credit.mcore.architecture import Architecture
from megatron_credit.mcore.config import ParallelConfig
from megatron_credit.mcore.convert import Converter
from megatron_credit.mcore.hf_files import open_checkpoint, refuse_unread
from megatron_credit.mcore.model import build_model
from megatron_credit.mcore.parallel import Ranks


def load_model(
    directory: Path,
    architecture: Architecture,
    parallel: ParallelConfig,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    recompute: str = "none",
    seed: int | None = None,
) -> tuple[list[GPTModel], Converter]:
    """The chunks of the model in `directory`, which is of this architecture, and their converter.

    `seed`: weights are drawn from it, and those of the directory are not read. ValueError where
    they cannot be.
    """
    chunks = build_model(architecture, parallel, dtype=dtype, seed=seed, recompute=recompute)
    converter = Converter(architecture, chunks, ranks)
    if seed is None:
        converter.load(open_checkpoint(directory))
        refuse_unread(directory, [meta.name for meta in converter.metadata()])
    return chunks, converter
