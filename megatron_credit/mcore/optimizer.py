"""Data parallelism, the optimizer and its schedule around the chunks of the model."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_credit.mcore.config import OptimizerConfig
from megatron_credit.mcore.schedule import learning_rate

logger = logging.getLogger(__name__)


def distribute(
    chunks: Sequence[GPTModel], *, distributed_optimizer: bool
) -> list[DistributedDataParallel]:
    """The chunks wrapped so that float32 gradients are summed over the data and context ranks.

    Summed, not averaged: each loss was divided by the global count (`calculate_per_token_loss`).
    Parameters are current after every optimizer step; no gather is left open.
    """
    config = chunks[0].config
    config.finalize_model_grads_func = _sum_gradients
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    wrapped = []
    for number, chunk in enumerate(chunks):
        module = Float16Module(config, chunk) if config.bf16 else chunk
        layout = None
        if distributed_optimizer:
            layout = DistributedOptimizer.compute_full_param_layout(
                [parameter for parameter in module.parameters() if parameter.requires_grad],
                None,
                parallel_state.get_data_parallel_world_size(with_context_parallel=True),
                options,
                parallel_state.get_expert_data_parallel_world_size(),
            )
        wrapped.append(
            DistributedDataParallel(
                config,
                options,
                module,
                disable_bucketing=number > 0,
                full_param_layout=layout,
            )
        )
    return wrapped


def _sum_gradients(
    chunks: list[torch.nn.Module], _num_tokens: Tensor | None, **options: Any
) -> None:
    """Megatron's reductions over every axis, without its division by a token count."""
    finalize_model_grads(chunks, None, **options)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Norm over the whole model, before clipping."""
    applied: bool
    """False: the norm was not finite and nothing changed."""


class PolicyOptimizer:
    """Megatron's optimizer of the wrapped chunks, with our schedule."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], config: OptimizerConfig) -> None:
        self.config = config
        self.num_steps = 0
        """Steps applied so far; the schedule goes by it."""
        self.chunks = list(chunks)
        model_config = chunks[0].config
        megatron = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer=config.kind,
                # Every step sets its own; a rate here would become part of checkpoints.
                lr=0.0,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                sgd_momentum=0.0,
                clip_grad=config.clip_grad,
                bf16=model_config.bf16,
                params_dtype=model_config.params_dtype,
                use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
            ),
            [*chunks],
            use_gloo_process_groups=False,
        )
        assert isinstance(megatron, ChainedOptimizer)
        self.megatron = megatron
        self._create_state()

    def parts(self) -> list[MegatronOptimizer]:
        """Megatron's optimizers that hold parameters: of dense ones, and of experts."""
        chained = self.megatron.chained_optimizers
        return [part for part in chained if not part.is_stub_optimizer]

    def set_num_steps(self, num_steps: int) -> None:
        """Goes on as if `num_steps` steps had been applied: schedule and Adam's bias correction."""
        self.num_steps = num_steps
        for part in self.parts():
            if isinstance(part.optimizer, torch.optim.AdamW):
                for state in part.optimizer.state.values():
                    state["step"] = torch.tensor(float(num_steps))
            elif self.config.kind == "adam":
                # Fused implementations count in the group.
                for group in part.optimizer.param_groups:
                    group["step"] = num_steps

    def _create_state(self) -> None:
        """Zero moments now rather than at the first step, so that there is always a state to save
        and to load into."""
        for part in self.parts():
            if part.init_state_fn is not None:
                part.init_state_fn(part.optimizer, part.config)
        self.set_num_steps(0)

    def zero_grad(self) -> None:
        """Gradients start at zero for the next step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.config, self.num_steps)

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clips the summed gradients and applies them, unless their norm is not finite.

        Megatron's own step would write a NaN into every weight and moment.
        """
        self._set_rates()
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            logger.warning("optimizer step skipped: the gradient norm is %s", norm)
            return StepResult(norm, applied=False)
        if self.config.clip_grad > 0:
            parameters = [*self.megatron.get_parameters()]
            clip_grad_by_total_norm_fp32(parameters, self.config.clip_grad, norm)
        self.megatron.step_with_ready_grads()
        self.num_steps += 1
        return StepResult(norm, applied=True)

    def _set_rates(self) -> None:
        """Megatron's groups carry a multiplier that spares norms and biases the weight decay."""
        rate = self.learning_rate()
        for group in self.megatron.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
