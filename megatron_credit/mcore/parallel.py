"""Starts the process groups of a layout and says where this process stands in it."""

import contextlib
import math
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.config import ParallelConfig
from megatron_credit.mcore.sharding import is_experts


class Splitting(NamedTuple):
    """The ranks among which parameters are split, and this one's place."""

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's place on each axis (rank, size, group). tp tensor, pp pipeline, cp context,
    dp data (without context), dp_cp data and context together, ep expert, etp expert tensor."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup
    pp_rank: int
    pp_size: int
    pp_group: dist.ProcessGroup
    cp_rank: int
    cp_size: int
    cp_group: dist.ProcessGroup
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup
    dp_cp_rank: int
    dp_cp_size: int
    dp_cp_group: dist.ProcessGroup
    ep_rank: int
    ep_size: int
    ep_group: dist.ProcessGroup
    etp_rank: int
    etp_size: int
    etp_group: dist.ProcessGroup

    def splitting(self, name: str) -> "Splitting":
        """Who splits the megatron parameter `name`."""
        if is_experts(name):
            return Splitting(self.etp_rank, self.etp_size, self.etp_group)
        return Splitting(self.tp_rank, self.tp_size, self.tp_group)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank's stage embeds the tokens (in its first chunk)."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's stage computes the output (in its last chunk)."""
        return self.pp_rank == self.pp_size - 1


def start_parallel(parallel: ParallelConfig, *, seed: int, timeout_s: float) -> Ranks:
    """This process's place after every process has called this with the same arguments.

    Joins the world that torchrun's environment describes, unless torch.distributed is already
    initialised (Gloo without CUDA, else NCCL, one device per local rank), then builds the groups of
    the layout and seeds megatron's random states. `timeout_s` bounds each collective of the world
    in seconds, rounded up to minutes for the groups of the layout.
    """
    cpu_mode.require_device()
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        _join_world(timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual_stages(parallel),
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return _current_ranks()


def virtual_stages(parallel: ParallelConfig) -> int | None:
    """Megatron's number of virtual stages: None, not 1, for the plain schedule."""
    return parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None


def stop_parallel(*, keep_world: bool = False) -> None:
    """Destroys the groups of the layout and, unless `keep_world`, leaves the world.

    With `keep_world` another layout can be started in the same processes. Collective then, so that
    no process closes a group that another still uses.
    """
    groups = dict.fromkeys(parallel_state._global_process_group_list or ())
    if keep_world:
        dist.barrier()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if not keep_world:
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    for group in groups:
        # megatron forgets its groups, all but a few, without closing them; each left open keeps
        # two threads and its sockets. None stands for the world; a closed group is a ValueError.
        if group is not None:
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


def _join_world(timeout: timedelta) -> None:
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)


def _current_ranks() -> Ranks:
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "dp_cp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "etp": parallel_state.get_expert_tensor_parallel_group(),
    }
    places = {}
    for axis, group in groups.items():
        places[f"{axis}_group"] = group
        places[f"{axis}_rank"] = dist.get_rank(group)
        places[f"{axis}_size"] = dist.get_world_size(group)
    return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), **places)
