"""What every rank of the converter tests runs: one world of four, one layout after another."""

import hashlib
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mcore import attention_check
from torch import Tensor

from megatron_credit.mcore import cpu_mode

WORLD_SIZE = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor": 2},
    "tp2_sp": {"tensor": 2, "sequence_parallel": True},
    "pp2": {"pipeline": 2},
    "pp2_vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp2_sp_pp2_vpp2": {
        "tensor": 2,
        "sequence_parallel": True,
        "pipeline": 2,
        "virtual_pipeline": 2,
    },
    "cp2": {"context": 2},
    "tp2_sp_cp2": {"tensor": 2, "sequence_parallel": True, "context": 2},
    "pp2_cp2": {"pipeline": 2, "context": 2},
    # Expert ranks come out of data, tensor or context ranks.
    "ep4": {"expert": 4},
    "ep2_tp2_sp": {"expert": 2, "tensor": 2, "sequence_parallel": True},
    "ep2_cp2": {"expert": 2, "context": 2},
    "ep2_pp2": {"expert": 2, "pipeline": 2},
    "ep2_pp2_vpp2": {"expert": 2, "pipeline": 2, "virtual_pipeline": 2},
    "etp2_ep2": {"expert_tensor": 2, "expert": 2},
    "etp2_tp2_sp": {"expert_tensor": 2, "tensor": 2, "sequence_parallel": True},
    "etp2_pp2": {"expert_tensor": 2, "pipeline": 2},
    "etp4": {"expert_tensor": 4},
}
# Layouts whose export is also written to disk.
WRITTEN = ("tp1", "tp2_sp_pp2_vpp2", "ep2_pp2_vpp2")
# Multiples of 4, so that two context ranks can cut each into four chunks.
LENGTHS = (12, 24, 4, 16, 8)


def run(rank: int, rendezvous: str, directory: str, kinds: list[str]) -> None:
    """Checks every kind under every layout; rank 0 writes `results.json`."""
    torch.set_num_threads(1)
    cpu_mode.enable()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=120),
    )
    results: dict[str, Any] = {}
    for layout, options in LAYOUTS.items():
        fitting = [kind for kind in kinds if fits(kind, layout)]
        for kind, result in _check_layout(Path(directory), fitting, layout, options).items():
            results[f"{kind}/{layout}"] = result
    gathered: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(gathered, results)
    if rank == 0:
        merged = {name: [each[name] for each in gathered] for name in results}
        Path(directory, "results.json").write_text(json.dumps(merged))
    dist.destroy_process_group()


def fits(kind: str, layout: str) -> bool:
    """Whether a model of this kind can be laid out so."""
    options = LAYOUTS[layout]
    if "moe" in kind:
        return options.get("tensor", 1) == 1 or "sequence_parallel" in options
    return not options.keys() & {"expert", "expert_tensor"}


def _check_layout(
    directory: Path, kinds: list[str], layout: str, options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    from megatron_credit.mcore import parallel
    from megatron_credit.mcore.config import ParallelConfig

    config = ParallelConfig(**options)
    ranks = parallel.start_parallel(config, seed=1, timeout_s=120)
    results = {}
    for kind in kinds:
        results[kind] = _check(directory / kind, config, ranks)
        if layout in WRITTEN:
            _write(directory / f"{kind}-{layout}", directory / kind, config, ranks)
    results["attention"] = attention_check.errors(ranks)
    parallel.stop_parallel(keep_world=True)
    return results


def _build(
    model_dir: Path,
    config: Any,
    ranks: Any,
    *,
    seed: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, list[Any], Any]:
    """Architecture, chunks, converter."""
    from megatron_credit.mcore.architecture import check_parallel, read_architecture
    from megatron_credit.mcore.convert import Converter
    from megatron_credit.mcore.model import build_model

    architecture = read_architecture(model_dir)
    check_parallel(architecture, config, WORLD_SIZE)
    chunks = build_model(architecture, config, dtype=dtype, seed=seed)
    return architecture, chunks, Converter(architecture, chunks, ranks)


def _check(model_dir: Path, config: Any, ranks: Any) -> dict[str, Any]:
    from megatron_credit.mcore.hf_files import open_checkpoint

    architecture, chunks, converter = _build(model_dir, config, ranks, seed=5)
    random_padding = _padding_rows(architecture, chunks)
    drawn = hashlib.sha256()
    for name, tensor in converter.export():
        drawn.update(name.encode() + tensor.contiguous().numpy().tobytes())
    read = open_checkpoint(model_dir)
    converter.load(read)
    with pytest.raises(ValueError) as wrong_shape:
        converter.load(lambda name: read(name)[:-1])
    converter.load(read)
    return {
        "wrong_shape": str(wrong_shape.value),
        "random": drawn.hexdigest(),
        "differences": _export_differences(model_dir, converter),
        "packed": _packed_error(model_dir, chunks, ranks),
        "padded": _padded_error(model_dir, chunks, ranks),
        "padding_rows": [random_padding, _padding_rows(architecture, chunks)],
        "bf16": _bf16_differences(model_dir, config, ranks),
    }


def _bf16_differences(model_dir: Path, config: Any, ranks: Any) -> list[str]:
    """Names of tensors that a bfloat16 model does not export as the rounded original."""
    from megatron_credit.mcore.hf_files import open_checkpoint

    read = open_checkpoint(model_dir)
    _, _, converter = _build(model_dir, config, ranks, dtype=torch.bfloat16)
    converter.load(read)
    announced = {meta.name: meta.dtype for meta in converter.metadata()}
    return [
        name
        for name, tensor in converter.export()
        if announced[name] != torch.bfloat16 or not torch.equal(tensor, read(name).bfloat16())
    ]


def _write(directory: Path, model_dir: Path, config: Any, ranks: Any) -> None:
    """Writes what was read, in several files."""
    from megatron_credit.mcore.hf_files import open_checkpoint, write_checkpoint

    _, _, converter = _build(model_dir, config, ranks)
    converter.load(open_checkpoint(model_dir))
    if ranks.rank == 0:
        write_checkpoint(directory, converter.export(), model_dir, max_file_bytes=50_000)
    else:
        for _ in converter.export():
            pass


def _export_differences(model_dir: Path, converter: Any) -> list[str]:
    """Names of tensors that differ in any bit, are missing, or are not as announced."""
    from megatron_credit.mcore.convert import TensorMeta
    from megatron_credit.mcore.hf_files import open_checkpoint, tensor_names

    read = open_checkpoint(model_dir)
    differences, exported = [], []
    for name, tensor in converter.export():
        exported.append(TensorMeta(name, tensor.dtype, tuple(tensor.shape)))
        if not torch.equal(tensor, read(name)):
            differences.append(name)
    if exported != converter.metadata():
        differences.append("metadata")
    return differences + sorted({meta.name for meta in exported} ^ set(tensor_names(model_dir)))


def _padding_rows(architecture: Any, chunks: list[Any]) -> float:
    """Largest absolute value in padding rows of this rank's vocabulary tensors; -1 if none."""
    from megatron_credit.mcore.names import is_vocabulary

    largest = -1.0
    for chunk in chunks:
        size = chunk.config.tensor_model_parallel_size
        rank = dist.get_rank(chunk.pg_collection.tp)
        for name, weight in chunk.named_parameters():
            start = weight.shape[0] * rank
            if is_vocabulary(name) and start + weight.shape[0] > architecture.vocab_size:
                assert rank == size - 1
                largest = max(largest, weight[architecture.vocab_size - start :].abs().max().item())
    return largest


def _packed_error(model_dir: Path, chunks: list[Any], ranks: Any) -> float:
    """Largest difference of the logits of packed sequences from the reference; -1 off the last
    stage."""
    from megatron.core.packed_seq_params import PackedSeqParams

    reference = torch.load(model_dir / "reference.pt")
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )
    parts = [_positions(length, ranks) for length in LENGTHS]
    ids_T = torch.cat([ids[part] for ids, part in zip(reference["ids"], parts, strict=True)])
    logits = forward_logits(chunks, ranks, ids_T[None], torch.cat(parts)[None], packed)
    if logits is None:
        return -1.0
    expected = torch.cat([x[part] for x, part in zip(reference["logits"], parts, strict=True)])
    return (logits[0, :, : expected.shape[1]] - expected).abs().max().item()


def _padded_error(model_dir: Path, chunks: list[Any], ranks: Any) -> float:
    """The same for a batch padded on the right with token 0."""
    reference = torch.load(model_dir / "reference.pt")
    ids_BL = torch.nn.utils.rnn.pad_sequence(reference["ids"], batch_first=True)
    part = _positions(ids_BL.shape[1], ranks)
    position_BL = part.expand(len(LENGTHS), -1)
    logits = forward_logits(chunks, ranks, ids_BL[:, part].contiguous(), position_BL, None)
    if logits is None:
        return -1.0
    errors = []
    for row, expected in enumerate(reference["logits"]):
        real = part < len(expected)
        found = logits[row, real, : expected.shape[1]]
        errors.append((found - expected[part[real]]).abs().max().item() if real.any() else 0.0)
    return max(errors)


def _positions(length: int, ranks: Any) -> Tensor:
    """Positions of a sequence that this context rank holds: two of 2 x context equal chunks."""
    if ranks.cp_size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * ranks.cp_size)
    return torch.cat([chunks[ranks.cp_rank], chunks[-1 - ranks.cp_rank]])


def forward_logits(
    chunks: list[Any], ranks: Any, ids_BL: Tensor, position_BL: Tensor, packed: Any
) -> Tensor | None:
    """Logits [B, L, V] over the whole vocabulary, through the pipeline; None off the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    outputs: list[Tensor] = []

    def keep(output: Tensor, **_options: Any) -> Tensor:
        outputs.append(output)
        return output

    def step(_data: Any, chunk: Any) -> tuple[Tensor, Any]:
        return chunk(ids_BL, position_BL, None, packed_seq_params=packed), keep

    microbatches = ranks.pp_size
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(())] * len(chunks) if len(chunks) > 1 else iter(()),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=microbatches,
            seq_length=ids_BL.shape[1] * ranks.cp_size,
            micro_batch_size=ids_BL.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not ranks.is_last_stage:
        return None
    assert len(outputs) == microbatches
    shards = [torch.empty_like(outputs[-1]) for _ in range(ranks.tp_size)]
    dist.all_gather(shards, outputs[-1].contiguous(), group=ranks.tp_group)
    return torch.cat(shards, dim=-1)
