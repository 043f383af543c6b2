"""One prompt group: rewards, masks and whatever signals were computed for it."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


def _signal(kind: str, shape: str, source: str) -> Any:
    """An optional field of the given kind and shape letters; `source` says what computes it."""
    return field(default=None, metadata={"kind": kind, "shape": shape, "source": source})


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The N rollouts of one prompt, padded on the right to T response tokens.

    Every field but `reward_N` and `mask_NT` may be None where the method does not read it. Values
    where `mask_NT` is False are never read and may be NaN. N = 0 and T = 0 are allowed. "float" is
    any of float64, float32, bfloat16, float16; rewards of int or bool are refused, as a verdict may
    be missing and only floats can say so. ValueError: a field of another shape or kind than stated,
    or on another device than the rewards.
    """

    reward_N: Tensor = field(metadata={"kind": "float", "shape": "N", "source": "the verifier"})
    """[N] float: outcome; NaN or infinite = no verdict."""
    mask_NT: Tensor = field(metadata={"kind": "bool", "shape": "NT", "source": "the rollout"})
    """[N, T] bool: tokens that the policy sampled and that are trained."""
    policy_logprob_NT: Tensor | None = _signal("float", "NT", "a forward pass of the policy")
    """[N, T] float: log-prob of the sampled token, plain context, current policy, in nats."""
    step: int = 1
    """Optimizer step, from 1, for schedules."""
    seed: int = 0
    """For the random choices that a method makes."""
    attempt_id_NT: Tensor | None = _signal("int", "NT", "multi-attempt rollouts")
    """[N, T] int: attempt of each token, -1 outside."""
    attempt_pass_NK: Tensor | None = _signal("float", "NK", "the verifier, once an attempt")
    """[N, K] float: 1 passed, 0 failed, NaN not reached."""
    step_id_NT: Tensor | None = _signal("int", "NT", "the step splitter")
    """[N, T] int: reasoning step of each token, -1 outside."""
    step_score_NS: Tensor | None = _signal("float", "NS", "the process reward model")
    """[N, S] float: score of each step, NaN = no such step."""
    segment_id_NT: Tensor | None = _signal("int", "NT", "the segmenter")
    """[N, T] int: segment of each token, M_max = answer tokens, -1 outside."""
    answer_logprob_NMY: Tensor | None = _signal("float", "NPY", "answer probes")
    """[N, M + 1, Y] float: log p(answer y given state m), NaN after the row's own last state."""
    utility_Y: Tensor | None = _signal("float", "Y", "the verifier, once an answer")
    """[Y] float: verdict of each distinct answer."""
    answer_index_N: Tensor | None = _signal("int", "N", "the answer parser")
    """[N] int: column of the rollout's own parsed answer, -1 = none."""
    saliency_NT: Tensor | None = _signal("float", "NT", "the activation backward pass")
    """[N, T] float >= 0: gradient-activation saliency."""
    answer_part_NT: Tensor | None = _signal("int", "NT", "the answer parser")
    """[N, T] int: 0 none, 1 marker, 2 content, 3 close, 4 after."""
    positive_logprob_NT: Tensor | None = _signal(
        "float", "NT", "the teacher pass with good evidence"
    )
    """[N, T] float: log-prob of the sampled token; NaN rows = no such evidence."""
    negative_logprob_NT: Tensor | None = _signal(
        "float", "NT", "the teacher pass with bad evidence"
    )
    """[N, T] float: log-prob of the sampled token; NaN rows = no such evidence."""
    teacher_logprob_NT: Tensor | None = _signal("float", "NT", "the external teacher")
    """[N, T] float: log-prob of the sampled token under an external teacher."""
    teacher_kl_NT: Tensor | None = _signal("float", "NT", "the self-teacher pass")
    """[N, T] float >= 0: KL(teacher given the reference || student); NaN row = no reference."""
    reference_index_N: Tensor | None = _signal("int", "N", "credit.evidence.pick_references")
    """[N] int: which rollout served as whose reference, -1 none."""
    kl_scale: float | None = None
    """The 75th percentile of `teacher_kl_NT` over the optimizer step; None = from this group."""
    contrast_target_NT: Tensor | None = _signal("float", "NT", "the evidence statistics")
    """[N, T] float: d(y_t); NaN rows = no evidence."""
    contrast_mean_NT: Tensor | None = _signal("float", "NT", "the evidence statistics")
    """[N, T] float: E_p[d]."""
    contrast_cost_NT: Tensor | None = _signal("float", "NT", "the evidence statistics")
    """[N, T] float: Var_p(d)."""

    def __post_init__(self) -> None:
        device = _tensor("reward_N", self.reward_N).device
        sizes: dict[str, tuple[int, str]] = {}
        for declared in fields(self):
            value = vars(self)[declared.name]
            if "shape" in declared.metadata and value is not None:
                _check_kind(declared.name, value, declared.metadata["kind"], device)
                _check_shape(declared.name, value, declared.metadata["shape"], sizes)
        _check_number("step", self.step, int)
        _check_number("seed", self.seed, int)
        if self.step < 1:
            raise ValueError(f"step is {self.step}; optimizer steps are counted from 1")
        if self.kl_scale is not None:
            _check_number("kl_scale", self.kl_scale, int, float)


SIGNAL_SOURCES: dict[str, str] = {
    declared.name: declared.metadata["source"]
    for declared in fields(Group)
    if "source" in declared.metadata
}
"""What computes each signal, by field name."""

_KINDS: dict[str, tuple[torch.dtype, ...]] = {
    "bool": (torch.bool,),
    "int": (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    "float": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
}


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, expected a tensor")
    return value


def _check_number(name: str, value: Any, *types: type) -> None:
    # A bool is an int to Python, but no count.
    if isinstance(value, bool) or not isinstance(value, types):
        expected = " or ".join(kind.__name__ for kind in types)
        raise ValueError(f"{name} is {value!r} of type {type(value).__name__}, expected {expected}")


def _check_kind(name: str, value: Any, kind: str, device: torch.device) -> None:
    allowed = _KINDS[kind]
    if _tensor(name, value).dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"{name} has type {value.dtype}, expected {kind}: one of {names}")
    if value.device != device:
        raise ValueError(
            f"{name} is on {value.device}, but reward_N on {device}; put a group on one device"
        )


def _check_shape(name: str, value: Tensor, letters: str, sizes: dict[str, tuple[int, str]]) -> None:
    """Compares each axis with the first field that has the same letter."""
    shape = tuple(value.shape)
    expected = "[" + ", ".join("M + 1" if letter == "P" else letter for letter in letters) + "]"
    if len(shape) != len(letters):
        raise ValueError(f"{name} has shape {shape}, expected {expected}")
    for letter, size in zip(letters, shape, strict=True):
        known, owner = sizes.setdefault(letter, (size, name))
        if size != known:
            raise ValueError(
                f"{name} has shape {shape}, expected {expected} with {letter} = {known} as in "
                f"{owner}"
            )
