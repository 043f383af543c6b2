"""Worlds that no torchrun started: of one process, or of processes that share a file."""

import logging
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_credit.errors import FailedProcess

Result = TypeVar("Result")


def join_world(*, rank: int, size: int, rendezvous: Path | None, timeout_s: float) -> None:
    """Makes this process number `rank` of a world, on its own CUDA device where there are any.

    `rendezvous` is a file that does not exist before the first process joins; a world of one needs
    none. `timeout_s` bounds each collective.
    """
    store = dist.HashStore() if rendezvous is None else dist.FileStore(str(rendezvous), size)
    timeout = timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=timeout, device_id=device
        )
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def in_child(function: Callable[..., Result], *arguments: object) -> Result:
    """What `function` returns in a fresh process, so that this one never sees megatron.

    A ValueError is raised here as there. FailedProcess: the process was killed.
    """
    try:
        with ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=silence_libraries
        ) as pool:
            return pool.submit(function, *arguments).result()
    except BrokenProcessPool:
        raise FailedProcess(
            "the process that held the model was killed, most likely for want of memory"
        ) from None


def silence_libraries() -> None:
    """Keeps what megatron and torch say of themselves off the user's screen: nothing of it is about
    the user's input, which raises."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
