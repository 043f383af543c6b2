"""One prompt group: rewards, masks and whatever signals were computed for it."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


def _signal(shape: str, source: str) -> Any:
    """An optional field of the given shape letters; `source` says what computes it."""
    return field(default=None, metadata={"shape": shape, "source": source})


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The N rollouts of one prompt, padded on the right to T response tokens.

    Every field but `reward_N` and `mask_NT` may be None where the method does not read it. Values
    where `mask_NT` is False are never read and may be NaN. ValueError: a field of another shape or
    kind than stated, or on another device than the rewards.
    """

    reward_N: Tensor = field(metadata={"shape": "N", "source": "the verifier"})
    """[N] float: outcome; NaN or infinite = no verdict."""
    mask_NT: Tensor = field(metadata={"shape": "NT", "source": "the rollout"})
    """[N, T] bool: tokens that the policy sampled and that are trained."""
    policy_logprob_NT: Tensor | None = _signal("NT", "a forward pass of the policy")
    """[N, T] float: log-prob of the sampled token, plain context, current policy, in nats."""
    step: int = 1
    """Optimizer step, from 1, for schedules."""
    seed: int = 0
    """For the random choices that a method makes."""
    attempt_id_NT: Tensor | None = _signal("NT", "multi-attempt rollouts")
    """[N, T] int: attempt of each token, -1 outside."""
    attempt_pass_NK: Tensor | None = _signal("NK", "the verifier, once an attempt")
    """[N, K] float: 1 passed, 0 failed, NaN not reached."""
    step_id_NT: Tensor | None = _signal("NT", "the step splitter")
    """[N, T] int: reasoning step of each token, -1 outside."""
    step_score_NS: Tensor | None = _signal("NS", "the process reward model")
    """[N, S] float: score of each step, NaN = no such step."""
    segment_id_NT: Tensor | None = _signal("NT", "the segmenter")
    """[N, T] int: segment of each token, M_max = answer tokens, -1 outside."""
    answer_logprob_NMY: Tensor | None = _signal("NPY", "answer probes")
    """[N, M + 1, Y] float: log p(answer y given state m), NaN after the row's own last state."""
    utility_Y: Tensor | None = _signal("Y", "the verifier, once an answer")
    """[Y] float: verdict of each distinct answer."""
    answer_index_N: Tensor | None = _signal("N", "the answer parser")
    """[N] int: column of the rollout's own parsed answer, -1 = none."""
    saliency_NT: Tensor | None = _signal("NT", "the activation backward pass")
    """[N, T] float >= 0: gradient-activation saliency."""
    answer_part_NT: Tensor | None = _signal("NT", "the answer parser")
    """[N, T] int: 0 none, 1 marker, 2 content, 3 close, 4 after."""
    positive_logprob_NT: Tensor | None = _signal("NT", "the teacher pass with good evidence")
    """[N, T] float: log-prob of the sampled token; NaN rows = no such evidence."""
    negative_logprob_NT: Tensor | None = _signal("NT", "the teacher pass with bad evidence")
    """[N, T] float: log-prob of the sampled token; NaN rows = no such evidence."""
    teacher_logprob_NT: Tensor | None = _signal("NT", "the external teacher")
    """[N, T] float: log-prob of the sampled token under an external teacher."""
    teacher_kl_NT: Tensor | None = _signal("NT", "the self-teacher pass")
    """[N, T] float >= 0: KL(teacher given the reference || student); NaN row = no reference."""
    reference_index_N: Tensor | None = _signal("N", "credit.evidence.pick_references")
    """[N] int: which rollout served as whose reference, -1 none."""
    kl_scale: float | None = None
    """The 75th percentile of `teacher_kl_NT` over the optimizer step; None = from this group."""
    contrast_target_NT: Tensor | None = _signal("NT", "the evidence statistics")
    """[N, T] float: d(y_t); NaN rows = no evidence."""
    contrast_mean_NT: Tensor | None = _signal("NT", "the evidence statistics")
    """[N, T] float: E_p[d]."""
    contrast_cost_NT: Tensor | None = _signal("NT", "the evidence statistics")
    """[N, T] float: Var_p(d)."""

    def __post_init__(self) -> None:
        if not isinstance(self.reward_N, Tensor):
            raise ValueError(f"reward_N is a {type(self.reward_N).__name__}, expected a tensor")
        sizes: dict[str, tuple[int, str]] = {}
        for declared in fields(self):
            value = vars(self)[declared.name]
            if "shape" in declared.metadata and value is not None:
                _check_kind(declared.name, value, self.reward_N.device)
                _check_shape(declared.name, value, declared.metadata["shape"], sizes)
        if self.step < 1:
            raise ValueError(f"step is {self.step}; optimizer steps are counted from 1")


SIGNAL_SOURCES: dict[str, str] = {
    declared.name: declared.metadata["source"]
    for declared in fields(Group)
    if "source" in declared.metadata
}
"""What computes each signal, by field name."""

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def _check_kind(name: str, value: Any, device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, expected a tensor")
    if name.startswith("mask_"):
        fits, expected = value.dtype == torch.bool, "bool"
    elif "_id_" in name or "_index_" in name or "_part_" in name:
        fits, expected = value.dtype in _INTEGERS, "an integer type"
    else:
        fits, expected = value.is_floating_point(), "a floating-point type"
    if not fits:
        raise ValueError(f"{name} has type {value.dtype}, expected {expected}")
    if value.device != device:
        raise ValueError(
            f"{name} is on {value.device}, but reward_N on {device}; put a group on one device"
        )


def _check_shape(
    name: str, value: Tensor, letters: str, sizes: dict[str, tuple[int, str]]
) -> None:
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
