"""Lets stock megatron-core run on a CPU with Gloo, by answering for the parts of torch it calls.

megatron-core names CUDA in the places below. No megatron function is replaced: only names of torch
are, and only in this process. Sites refer to megatron-core 0.19.2.

- `torch.cuda.current_device()` as a `device=` (rotary embedding, mappings, p2p, gradient buffers)
- factories with `device="cuda"` (schedules, optimizer, clip_grads), `Tensor.cuda()` and pinned
  memory (context-parallel rotary embedding)
- `Tensor.type()` compared with "torch.cuda.FloatTensor" (optimizers, clip_grads)
- random state, streams, events, synchronisation (tensor_parallel.random, gradient buffers, experts'
  token dispatcher)
- split sizes of `all_to_all_single` given as CPU tensors (token dispatcher): Gloo wants integers
- `all_gather` of parts of different sizes (token dispatcher under expert tensor parallelism), which
  Gloo refuses
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "empty_like",
    "rand",
    "randn",
    "randint",
)
_FLOAT_TYPES = {f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16", "Double")}
_state = {"enabled": False}


def enable() -> bool:
    """True if the CPU mode is on in this process, False where CUDA is available (nothing is done).

    Must run before the first `import megatron`, which binds some of these names. Calling it again
    changes nothing. RuntimeError: megatron was imported first, or vllm lives in this process, whose
    engine must see the real torch.cuda.
    """
    if _state["enabled"]:
        return True
    if torch.cuda.is_available():
        return False
    _check_process()
    # jit_fuser is torch.compile; compiling costs more here than it could give.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _answer_for_devices()
    _answer_for_types()
    _answer_for_random_state()
    _answer_for_streams()
    _accept_split_tensors()
    _accept_uneven_parts()
    _state["enabled"] = True
    return True


def is_enabled() -> bool:
    """Whether `enable` has turned the CPU mode on in this process."""
    return _state["enabled"]


def require_device() -> None:
    """Raises RuntimeError where megatron could run on nothing: no CUDA and the CPU mode is off."""
    if not _state["enabled"] and not torch.cuda.is_available():
        raise RuntimeError(
            "no CUDA device, and the CPU mode is off; call megatron_credit.mcore.cpu_mode.enable() "
            "before the first import of megatron"
        )


def _check_process() -> None:
    if "vllm" in sys.modules:
        raise RuntimeError(
            "the CPU mode of the trainer changes torch.cuda and must not run in a process that "
            "imported vllm; start the engine as its own process"
        )
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "cpu_mode.enable() came after the first import of megatron, which has bound names of "
            "torch.cuda; call it earlier"
        )


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **options: Any) -> torch.Tensor:
        device = options.get("device")
        # An integer names a CUDA device too, but `torch.device(int)` fails without CUDA.
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            options["device"] = _CPU
        if options.get("pin_memory"):
            options["pin_memory"] = False
        return factory(*args, **options)

    return on_cpu


def _answer_for_devices() -> None:
    torch.cuda.current_device = lambda: _CPU
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(vars(torch)[name]))
    torch.Tensor.cuda = lambda self, *_args, **_options: self


def _answer_for_types() -> None:
    tensor_type = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **options: Any) -> str | torch.Tensor:
        answer = tensor_type(self, *args, **options)
        if isinstance(answer, str) and answer in _FLOAT_TYPES:
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = cuda_type


class _Generators:
    def __getitem__(self, _device: int) -> torch.Generator:
        return torch.default_generator


def _answer_for_random_state() -> None:
    # Each name gets a function of its own: torch._dynamo refuses one object under two names.
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_args, **_options: torch.get_rng_state()
        module.set_rng_state = lambda state, *_args, **_options: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    torch.cuda._lazy_call = lambda function, **_options: function()
    torch.cuda.default_generators = _Generators()


class _Instant:
    """A stream or an event of a device on which everything has already happened."""

    def __init__(self, *_args: Any, **_options: Any) -> None: ...

    def wait_stream(self, _stream: "_Instant") -> None: ...

    def wait_event(self, _event: "_Instant") -> None: ...

    def wait(self, *_args: Any) -> None: ...

    def record(self, *_args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, *_args: Any) -> "_Instant":
        return _Instant()

    def elapsed_time(self, _event: "_Instant") -> float:
        return 0.0


def _answer_for_streams() -> None:
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_args: None)
    torch.cuda.nvtx.range_push = lambda *_args: None
    torch.cuda.nvtx.range_pop = lambda *_args: None
    stream = _Instant()
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, lambda *_args: stream)
    torch.cuda.stream = lambda *_args: contextlib.nullcontext()
    torch.cuda.Stream = type("Stream", (_Instant,), {})
    torch.cuda.Event = type("Event", (_Instant,), {})


def _integers(sizes: Iterable[int] | torch.Tensor | None) -> list[int] | None:
    if isinstance(sizes, torch.Tensor):
        return sizes.tolist()
    return None if sizes is None else list(sizes)


def _accept_split_tensors() -> None:
    all_to_all_single = dist.all_to_all_single

    @functools.wraps(all_to_all_single)
    def with_integer_splits(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        splits = _integers(output_split_sizes), _integers(input_split_sizes)
        return all_to_all_single(output, input, *splits, *args, **options)

    dist.all_to_all_single = with_integer_splits


def _accept_uneven_parts() -> None:
    all_gather = dist.all_gather

    @functools.wraps(all_gather)
    def of_any_sizes(
        parts: list[torch.Tensor],
        own: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or len({part.shape for part in parts}) == 1:
            return all_gather(parts, own, group=group, async_op=async_op)
        parts[dist.get_rank(group)].copy_(own)
        for rank, part in enumerate(parts):
            if part.numel():
                dist.broadcast(part, group=group, group_src=rank)
        return None

    dist.all_gather = of_any_sizes
