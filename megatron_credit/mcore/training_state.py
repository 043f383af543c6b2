"""What training goes on from, as megatron's sharded tensors: weights, master weights and moments.

Every tensor is described in the model's own terms (global parameter, offset, shape), whichever
optimizer holds it and however it splits it, so that a checkpoint fits any other layout. megatron's
own descriptions of optimizer state tie a checkpoint to the optimizer's class, and fail for plain
torch optimizers before their first step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch.nn import Parameter

from megatron_credit.mcore.optimizer import PolicyOptimizer

_Sharded = ShardedTensor | ShardedTensorFactory
# megatron's name of the master weight next to the moments.
_MASTER = "param"


class TrainingState:
    """The chunks of a model and their optimizer."""

    def __init__(self, chunks: Sequence[GPTModel], optimizer: PolicyOptimizer) -> None:
        self._chunks = list(chunks)
        self._optimizer = optimizer

    @property
    def num_steps(self) -> int:
        """Optimizer steps that led here."""
        return self._optimizer.num_steps

    def sharded(self, *, loading: bool) -> dict[str, Any]:
        """A nested dictionary of sharded tensors, to be saved or to be filled.

        Collective over the data ranks. When loading, tensors that the optimizer splits over them
        are given as whole blanks.
        """
        models = {
            f"model{number}": chunk.sharded_state_dict()
            for number, chunk in enumerate(self._chunks)
        }
        description = {
            id(sharded.data): sharded
            for sharded in nested_values(models)
            if isinstance(sharded, _Sharded)
        }
        state: dict[str, Any] = dict(models)
        for number, part in enumerate(self._optimizer.parts()):
            if isinstance(part, DistributedOptimizer):
                state[f"optimizer{number}"] = part.sharded_param_state_fully_reshardable(
                    models, loading, {}
                )
            else:
                state[f"optimizer{number}"] = {
                    index: {name: _like(description[id(parameter)], name, tensor)}
                    for index, (parameter, name, tensor) in enumerate(_whole_state(part))
                }
        return state

    @torch.no_grad()
    def restore(self, loaded: dict[str, Any], num_steps: int) -> None:
        """Takes over what was loaded into `sharded(loading=True)`."""
        for number, chunk in enumerate(self._chunks):
            chunk.load_state_dict(loaded[f"model{number}"])
        for number, part in enumerate(self._optimizer.parts()):
            state = loaded[f"optimizer{number}"]
            if isinstance(part, DistributedOptimizer):
                _load_split_state(part, state)
            else:
                for index, (_, name, tensor) in enumerate(_whole_state(part)):
                    tensor.copy_(state[index][name])
        self._optimizer.set_num_steps(num_steps)


def _whole_state(part: MegatronOptimizer) -> Iterator[tuple[Parameter, str, Tensor]]:
    """(model parameter, name, tensor of its shape) of an optimizer that splits nothing."""
    for parameter in _model_parameters(part):
        # With bf16 the optimizer steps on a float32 copy that megatron attaches.
        master = vars(parameter).get("main_param", parameter)
        yield parameter, _MASTER, master
        for name, tensor in part.optimizer.state[master].items():
            if name != "step":
                yield parameter, name, tensor


def _model_parameters(part: MegatronOptimizer) -> list[Parameter]:
    if part.config.bf16:
        groups = part.float16_groups + part.fp32_from_fp32_groups
        return [parameter for group in groups for parameter in group]
    return part.get_parameters()


def _like(description: _Sharded, name: str, tensor: Tensor) -> _Sharded:
    """`tensor` lies in the checkpoint as the described parameter does, under its own key."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{name}.{description.key}", "data": tensor}
    if isinstance(description, ShardedTensor):
        changes["dtype"] = tensor.dtype
    return replace(description, **changes)


def _load_split_state(part: DistributedOptimizer, state: dict[int, dict[str, Tensor]]) -> None:
    """Each data rank takes its part of every tensor.

    megatron looks for a loaded value of every tensor in the inner state, and torch's Adam keeps its
    step count there, which `PolicyOptimizer.set_num_steps` sets afterwards.
    """
    for inner in part.optimizer.state.values():
        inner.pop("step", None)
    part.load_parameter_state_from_fully_reshardable(state)
