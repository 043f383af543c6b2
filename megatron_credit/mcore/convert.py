"""Weights between Hugging Face tensors and this rank's megatron parameters, exact both ways."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_credit.mcore import names, sharding
from megatron_credit.mcore.architecture import Architecture, padded_vocab_size
from megatron_credit.mcore.layer_spec import uses_transformer_engine
from megatron_credit.mcore.names import Rule
from megatron_credit.mcore.parallel import Ranks


@dataclass(frozen=True)
class TensorMeta:
    """What is known of a tensor before it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Entry:
    """One megatron parameter of the whole model."""

    name: str
    """Global name."""
    stage: int
    """Pipeline rank that holds it."""
    rule: Rule
    layer: int | None = None
    expert: int | None = None


class Converter:
    """Loads and exports the weights of one model under one layout.

    Order and names of the exported tensors depend on the architecture only.
    """

    def __init__(
        self, architecture: Architecture, chunks: Sequence[GPTModel], ranks: Ranks
    ) -> None:
        self.architecture = architecture
        self.ranks = ranks
        self._sizes = names.axis_sizes(architecture)
        self._padded_vocab = padded_vocab_size(architecture, ranks.tp_size)
        self._parameters = {
            self.global_name(chunk, local_name): parameter
            for chunk in chunks
            for local_name, parameter in chunk.named_parameters()
        }
        self._dtype = chunks[0].config.params_dtype
        self._entries = list(_entries(architecture, ranks.pp_size, len(chunks)))
        self._check_own_parameters()

    def global_name(self, chunk: GPTModel, local_name: str) -> str:
        """The layout-independent megatron name of parameter `local_name` of `chunk`."""
        return names.global_name(self.architecture, chunk, local_name)

    def metadata(self) -> list[TensorMeta]:
        """What `export` yields, in its order; no communication."""
        return [
            TensorMeta(name, self._dtype, shape)
            for entry in self._entries
            for name, shape in self._hugging_face(entry)
        ]

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        """Fills this rank's parameters from `read`, which gives a full tensor for its Hugging Face
        name. Numbers are converted to the parameters' dtype. ValueError where a tensor has another
        shape than the architecture says."""
        for entry in self._entries:
            if entry.name in self._parameters:
                full = self._combine(entry, self._read_parts(entry, read))
                rank, size, _ = self.ranks.splitting(entry.name)
                shard = sharding.take_shard(full, entry.name, rank, size)
                self._parameters[entry.name].copy_(shard)

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Every (Hugging Face name, full tensor), the same on every rank, one parameter in flight.

        Collective over the tensor, pipeline and expert ranks: all of them must run it to the end.
        Tensors may be views of the live parameters; copy what must outlive the next optimizer step.
        """
        for entry in self._entries:
            full = sharding.join_shards(self._gather(entry), entry.name)
            parts = self._split(entry, full)
            for (name, _), part in zip(self._hugging_face(entry), parts, strict=True):
                yield name, part

    def _hugging_face(self, entry: _Entry) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of the tensors that make up a parameter."""
        return [
            (
                name.format(layer=entry.layer, expert=entry.expert),
                tuple(self._sizes[axis] for axis in axes),
            )
            for name, axes in entry.rule.hugging_face
        ]

    def _read_parts(self, entry: _Entry, read: Callable[[str], Tensor]) -> list[Tensor]:
        parts = []
        for name, shape in self._hugging_face(entry):
            part = read(name)
            if tuple(part.shape) != shape:
                raise ValueError(
                    f"tensor {name} has shape {tuple(part.shape)}, but config.json implies {shape}"
                )
            parts.append(part)
        return parts

    def _combine(self, entry: _Entry, parts: list[Tensor]) -> Tensor:
        match entry.rule.layout:
            case "same":
                return parts[0]
            case "vocab":
                return sharding.pad_rows(parts[0], self._padded_vocab)
            case "gate_up":
                return torch.cat(parts)
            case "qkv":
                groups = self.architecture.num_kv_heads
                grouped = [part.view(groups, -1, *part.shape[1:]) for part in parts]
                return torch.cat(grouped, dim=1).flatten(0, 1)

    def _split(self, entry: _Entry, full: Tensor) -> Sequence[Tensor]:
        match entry.rule.layout:
            case "same":
                return [full]
            case "vocab":
                return [full[: self.architecture.vocab_size]]
            case "gate_up":
                return full.chunk(2)
            case "qkv":
                groups, head_dim = self.architecture.num_kv_heads, self.architecture.head_dim
                per_group = self.architecture.num_heads // groups
                grouped = full.view(groups, -1, *full.shape[1:])
                parts = grouped.split([per_group * head_dim, head_dim, head_dim], dim=1)
                return [part.flatten(0, 1) for part in parts]

    def _gather(self, entry: _Entry) -> list[Tensor]:
        """All parts of a parameter, in rank order, from the stage and the expert rank that hold it.

        A pipeline group's ranks have the same place on every other axis, also on the expert ones.
        """
        ranks, owner = self.ranks, self._expert_rank(entry)
        shard = self._own_shard(entry)
        if ranks.pp_size > 1 and owner in (None, ranks.ep_rank):
            dist.broadcast(shard, group=ranks.pp_group, group_src=entry.stage)
        if ranks.ep_size > 1 and owner is not None:
            dist.broadcast(shard, group=ranks.ep_group, group_src=owner)
        _, size, group = ranks.splitting(entry.name)
        if size == 1 or sharding.split_dimension(entry.name) is None:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(size)]
        dist.all_gather(shards, shard, group=group)
        return shards

    def _expert_rank(self, entry: _Entry) -> int | None:
        """The expert rank that holds the parameter; None: it is none of an expert, all do."""
        if entry.expert is None:
            return None
        return entry.expert // (self.architecture.num_experts // self.ranks.ep_size)

    def _own_shard(self, entry: _Entry) -> Tensor:
        if entry.name in self._parameters and entry.stage == self.ranks.pp_rank:
            return self._parameters[entry.name].detach()
        size = self.ranks.splitting(entry.name).size
        shape = sharding.local_shape(self._full_shape(entry), entry.name, size)
        device = next(iter(self._parameters.values())).device
        return torch.empty(shape, dtype=self._dtype, device=device)

    def _full_shape(self, entry: _Entry) -> tuple[int, ...]:
        if entry.rule.layout == "vocab":
            return (self._padded_vocab, self.architecture.hidden_size)
        shapes = [shape for _, shape in self._hugging_face(entry)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _check_own_parameters(self) -> None:
        expected = {e.name: self._full_shape(e) for e in self._entries if self._holds(e)}
        actual = {
            name: sharding.full_shape(parameter.shape, name, self.ranks.splitting(name).size)
            for name, parameter in self._parameters.items()
        }
        if expected != actual:
            difference = sorted(
                f"{name} {shape}" for name, shape in expected.items() ^ actual.items()
            )
            raise RuntimeError(f"name table and model disagree on {difference}")

    def _holds(self, entry: _Entry) -> bool:
        copies_embedding = self.architecture.tied_embeddings and self.ranks.is_last_stage
        is_copy = copies_embedding and entry.rule is names.EMBEDDING
        has_stage = entry.stage == self.ranks.pp_rank
        return is_copy or (has_stage and self._expert_rank(entry) in (None, self.ranks.ep_rank))


def _entries(architecture: Architecture, num_stages: int, num_chunks: int) -> Iterator[_Entry]:
    """Every parameter of the model once, in the order of the forward pass."""
    per_chunk = architecture.num_layers // (num_stages * num_chunks)
    spelling = -1 if uses_transformer_engine() else 0
    yield _Entry(names.EMBEDDING.megatron[0], 0, names.EMBEDDING)
    for layer in range(architecture.num_layers):
        # Chunk number c of the whole model is chunk c // stages of stage c % stages.
        stage = layer // per_chunk % num_stages
        for rule in names.layer_rules(architecture):
            yield _Entry(rule.megatron[spelling].format(layer=layer), stage, rule, layer)
        for expert in range(architecture.num_experts):
            for rule in names.EXPERT_RULES:
                name = rule.megatron[spelling].format(layer=layer, expert=expert)
                yield _Entry(name, stage, rule, layer, expert)
    yield _Entry(names.FINAL_NORM.megatron[0], num_stages - 1, names.FINAL_NORM)
    if not architecture.tied_embeddings:
        yield _Entry(names.OUTPUT.megatron[0], num_stages - 1, names.OUTPUT)
