"""What training goes on from, as megatron's sharded tensors: weights, master weights, moments, and
the moving average that a teacher reads with.

Every tensor is described in the model's own terms (global parameter, offset, shape), whichever
optimizer holds it and however it splits it, so that a checkpoint fits any other layout. megatron's
own description of a split optimizer's state is not used: it gathers gradient buckets without the
padding between them but cuts parameters out with it, which shifts every parameter behind a tied
embedding's bucket on the last pipeline stage, and it fails for torch's Adam, whose step count it
does not expect (megatron-core 0.19.2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    MegatronOptimizer,
)
from torch import Tensor
from torch.nn import Parameter

from megatron_credit.mcore.optimizer import PolicyOptimizer
from megatron_credit.mcore.teachers import AverageTeacher

_Sharded = ShardedTensor | ShardedTensorFactory
_MASTER = "master"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingState:
    """The chunks of a model, their optimizer, and the average of them if there is one."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        optimizer: PolicyOptimizer,
        average: AverageTeacher | None = None,
    ) -> None:
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._average = average

    @property
    def num_steps(self) -> int:
        """Optimizer steps that led here."""
        return self._optimizer.num_steps

    def blank(self) -> dict[str, Any]:
        """A nested dictionary of sharded tensors to be filled and given to `restore`.

        State that the optimizer splits over the data ranks is there whole, on the CPU.
        """
        state, _, description = self._model()
        for section, items in self._items():
            state[section] = {
                number: _like(description[id(item.parameter)], section, item, item.blank())
                for number, item in enumerate(items)
            }
        return state

    @torch.no_grad()
    def written(self, *, copied: bool) -> dict[str, Any]:
        """The same dictionary with the state as it is now, to be saved.

        Collective over the data ranks, which gather what the optimizer splits over them, each
        tensor on the one that writes it. Of what other ranks write there are shapes only.
        `copied`: all of it is in memory of the CPU that training leaves alone; else some tensors
        are the ones that are trained.
        """
        state, weights, description = self._model()
        for section, items in self._items():
            likes = [(item, description[id(item.parameter)]) for item in items]
            state[section] = {
                number: item.saved(like, section, writer=writer, copied=copied)
                for number, ((item, like), writer) in enumerate(
                    zip(likes, _writers(likes), strict=True)
                )
            }
        for sharded in weights:
            writes = is_main_replica(sharded.replica_id)
            sharded.data = _kept(sharded.data, writes=writes, copied=copied)
        if copied and torch.cuda.is_available():
            torch.cuda.synchronize()
        return state

    def _model(self) -> tuple[dict[str, Any], list[_Sharded], dict[int, _Sharded]]:
        """The part of the weights, how megatron describes each of them, and the same by the `id`
        of the parameter."""
        state: dict[str, Any] = {
            f"model{number}": chunk.sharded_state_dict()
            for number, chunk in enumerate(self._chunks)
        }
        # The rest, what layers say of themselves, is made for each call and needs no copy.
        weights = [one for one in nested_values(state) if isinstance(one, _Sharded)]
        return state, weights, {id(sharded.data): sharded for sharded in weights}

    @torch.no_grad()
    def restore(self, loaded: dict[str, Any], num_steps: int) -> None:
        """Takes over what was loaded into `blank()`."""
        for number, chunk in enumerate(self._chunks):
            chunk.load_state_dict(loaded[f"model{number}"])
        for section, items in self._items():
            for number, item in enumerate(items):
                item.take(loaded[section][number])
        if self._average is not None:
            self._average.refresh()
        self._optimizer.set_num_steps(num_steps)

    def _items(self) -> Iterator[tuple[str, Iterator["_Item"]]]:
        """What is saved beside the weights, in sections with keys of their own."""
        yield "optimizer", self._optimizer_state()
        if self._average is not None:
            yield (
                "teacher",
                (
                    _Item(one.source, "average", one.value, None, None)
                    for one in self._average.averages
                ),
            )

    def _optimizer_state(self) -> Iterator["_Item"]:
        for part in self._optimizer.parts():
            split = isinstance(part, DistributedOptimizer)
            yield from _split_state(part) if split else _whole_state(part)


@dataclass(frozen=True, eq=False)
class _Item:
    """A tensor that belongs to one model parameter."""

    parameter: Parameter
    name: str
    held: Tensor | None
    """What this rank holds; None where that is nothing."""
    span: slice | None
    """The elements of the flat whole that `held` has; None where it is the whole itself."""
    group: dist.ProcessGroup | None
    """The data ranks that share the tensor."""

    def saved(self, like: _Sharded, section: str, *, writer: int | None, copied: bool) -> _Sharded:
        """The whole tensor as it is to be saved, see `written`; collective over the group, of which
        rank `writer` writes it, if any does."""
        if self.group is None:
            assert self.held is not None
            writes = is_main_replica(like.replica_id)
            return _like(like, section, self, _kept(self.held, writes=writes, copied=copied))
        if writer is None:
            return _like(like, section, self, torch.empty(self.parameter.shape, device="meta"))
        whole = torch.zeros(self.parameter.numel(), device=self.parameter.device)
        if self.held is not None:
            whole[self.span] = self.held
        # Every element comes from one rank and zeros from the others: the sum is exact.
        dist.reduce(whole, group_dst=writer, group=self.group)
        writes = writer == dist.get_rank(self.group)
        # Already a copy, where it is on the CPU.
        kept = _kept(whole.view(self.parameter.shape), writes=writes, copied=whole.is_cuda)
        return replace(_like(like, section, self, kept), replica_id=0 if writes else 1)

    def blank(self) -> Tensor:
        """A tensor to load the whole into."""
        if self.group is not None:
            return torch.zeros(self.parameter.shape)
        assert self.held is not None
        return self.held

    def take(self, whole: Tensor) -> None:
        """This rank's part of the whole becomes the state."""
        if self.held is not None:
            self.held.copy_(whole if self.span is None else whole.reshape(-1)[self.span])


def _whole_state(part: MegatronOptimizer) -> Iterator[_Item]:
    """State of an optimizer that splits nothing."""
    for parameter in _model_parameters(part):
        # With bf16 the optimizer steps on a float32 copy that megatron attaches.
        master = vars(parameter).get("main_param", parameter)
        held = {_MASTER: master, **part.optimizer.state[master]}
        for name in (_MASTER, *_MOMENTS):
            if name in held:
                yield _Item(parameter, name, held[name], None, None)


def _model_parameters(part: MegatronOptimizer) -> list[Parameter]:
    if isinstance(part, Float16OptimizerWithFloat16Params):
        groups = part.float16_groups + part.fp32_from_fp32_groups
        return [parameter for group in groups for parameter in group]
    return part.get_parameters()


def _split_state(part: DistributedOptimizer) -> Iterator[_Item]:
    """State of Adam split over the data ranks; every rank yields every tensor, in one order."""
    spans = {
        parameter: slice(ranges["param"].start, ranges["param"].end)
        for buffer in part.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    }
    for buffer in part.buffers:
        for parameter in buffer.params:
            held: dict[str, Tensor] = {}
            if parameter in spans:
                group, order = part.model_param_group_index_map[parameter]
                master = part.optimizer.param_groups[group]["params"][order]
                held = {_MASTER: master, **part.optimizer.state[master]}
            for name in (_MASTER, *_MOMENTS):
                span, data_ranks = spans.get(parameter), part.data_parallel_group
                yield _Item(parameter, name, held.get(name), span, data_ranks)


def _writers(likes: Sequence[tuple[_Item, _Sharded]]) -> list[int | None]:
    """Which rank of its group writes each tensor that is split; the bytes are dealt evenly.

    None where no rank of the group does, because model ranks of another group hold the same.
    Collective over the groups.
    """
    writers: list[int | None] = [None] * len(likes)
    for group in dict.fromkeys(item.group for item, _ in likes if item.group is not None):
        shared = [number for number, (item, _) in enumerate(likes) if item.group is group]
        device = likes[shared[0]][0].parameter.device
        main = [is_main_replica(likes[number][1].replica_id) for number in shared]
        written = torch.tensor(main, dtype=torch.int32, device=device)
        dist.all_reduce(written, op=dist.ReduceOp.MAX, group=group)
        sizes = [0] * dist.get_world_size(group)
        for number, is_written in zip(shared, written.tolist(), strict=True):
            if is_written:
                writers[number] = sizes.index(min(sizes))
                sizes[writers[number]] += likes[number][0].parameter.numel()
    return writers


def _kept(tensor: Tensor, *, writes: bool, copied: bool) -> Tensor:
    """What a save keeps of a tensor: itself, a copy on the CPU, or nothing but its shape."""
    if not writes:
        return torch.empty_like(tensor, device="meta")
    if not copied:
        return tensor
    # Copies from a device into pinned memory do not wait for each other.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=True)


def _like(description: _Sharded, section: str, item: _Item, tensor: Tensor) -> _Sharded:
    """`tensor` lies in the checkpoint as the described parameter does, under its own key."""
    key = f"{section}.{item.name}.{description.key}"
    changes: dict[str, Any] = {"key": key, "data": tensor}
    if isinstance(description, ShardedTensor):
        changes["dtype"] = tensor.dtype
    return replace(description, **changes)
