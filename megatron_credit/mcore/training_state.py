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
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
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

    def sharded(self, *, loading: bool) -> dict[str, Any]:
        """A nested dictionary of sharded tensors, to be saved or to be filled.

        Collective over the data ranks when saving. State that the optimizer splits over the data
        ranks is given whole, on the CPU: gathered, or blank when loading.
        """
        state: dict[str, Any] = {
            f"model{number}": chunk.sharded_state_dict()
            for number, chunk in enumerate(self._chunks)
        }
        description = {
            id(sharded.data): sharded
            for sharded in nested_values(state)
            if isinstance(sharded, _Sharded)
        }
        for section, items in self._items():
            state[section] = {
                number: _like(
                    description[id(item.parameter)],
                    f"{section}.{item.name}",
                    item.blank() if loading else item.gather(),
                )
                for number, item in enumerate(items)
            }
        return state

    @torch.no_grad()
    def restore(self, loaded: dict[str, Any], num_steps: int) -> None:
        """Takes over what was loaded into `sharded(loading=True)`."""
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

    def gather(self) -> Tensor:
        """The whole tensor."""
        if self.group is None:
            assert self.held is not None
            return self.held
        whole = torch.zeros(self.parameter.numel(), device=self.parameter.device)
        if self.held is not None:
            whole[self.span] = self.held
        # Every element comes from one rank and zeros from the others: the sum is exact.
        dist.all_reduce(whole, group=self.group)
        return whole.view(self.parameter.shape).cpu()

    def blank(self) -> Tensor:
        """A tensor to load the whole into."""
        return self.gather() if self.group is None else torch.zeros(self.parameter.shape)

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


def _like(description: _Sharded, prefix: str, tensor: Tensor) -> _Sharded:
    """`tensor` lies in the checkpoint as the described parameter does, under its own key."""
    changes: dict[str, Any] = {"key": f"{prefix}.{description.key}", "data": tensor}
    if isinstance(description, ShardedTensor):
        changes["dtype"] = tensor.dtype
    return replace(description, **changes)
