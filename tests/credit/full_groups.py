"""Groups that carry every signal, for laws over all methods."""

from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_credit.credit import Group

CREDITED_EQUAL_REWARDS = {
    "verigate",
    "prm_outcome",
    "grpo_process",
    "attempt_naive",
    "sc_grpo",
    "opd",
}
"""Methods that tell rollouts of equal reward apart by other signals; their own tests say how."""
READING_ALL = {"cepo": {"fallback": "rlsd"}}
"""Options under which a method reads all that it may read, where the defaults do not."""
NUM_ATTEMPTS, NUM_STEPS, NUM_SEGMENTS, NUM_ANSWERS = 2, 3, 3, 2
SHAPES = {
    name: declared.metadata["shape"]
    for name, declared in Group.__dataclass_fields__.items()
    if "shape" in declared.metadata
}


def full_group(rewards: list[float], *, num_tokens: int = 6, seed: int = 0) -> Group:
    """Random but lawful signals of float64 and int64 for these rewards; no row is cut short."""
    rng = torch.Generator().manual_seed(seed)
    num = len(rewards)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    def ids(count: int) -> Tensor:
        """Each row's tokens in `count` consecutive spans."""
        return (torch.arange(num_tokens) * count // num_tokens).expand(num, -1).clone()

    reward_N = torch.tensor(rewards, dtype=torch.float64)
    answer_index_N = torch.arange(num) % NUM_ANSWERS
    return Group(
        reward_N=reward_N,
        mask_NT=uniform(num, num_tokens) < 0.8,
        policy_logprob_NT=-3 * uniform(num, num_tokens),
        step=2,
        seed=seed,
        attempt_id_NT=ids(NUM_ATTEMPTS),
        attempt_pass_NK=_two_attempts(reward_N >= 0.5, uniform(num, NUM_ATTEMPTS)[:, 0] < 0.5),
        step_id_NT=ids(NUM_STEPS),
        step_score_NS=uniform(num, NUM_STEPS),
        segment_id_NT=ids(NUM_SEGMENTS + 1),
        answer_logprob_NMY=-3 * uniform(num, NUM_SEGMENTS + 1, NUM_ANSWERS),
        utility_Y=torch.tensor([1.0, 0.0], dtype=torch.float64),
        answer_index_N=answer_index_N,
        saliency_NT=uniform(num, num_tokens),
        answer_part_NT=ids(5),
        positive_logprob_NT=-3 * uniform(num, num_tokens),
        negative_logprob_NT=-3 * uniform(num, num_tokens),
        teacher_logprob_NT=-3 * uniform(num, num_tokens),
        teacher_kl_NT=uniform(num, num_tokens),
        reference_index_N=_first_for_all_others(reward_N),
        contrast_target_NT=uniform(num, num_tokens) - 0.5,
        contrast_mean_NT=uniform(num, num_tokens) - 0.5,
        contrast_cost_NT=uniform(num, num_tokens),
    )


def _two_attempts(verified_N: Tensor, early_N: Tensor) -> Tensor:
    """[N, 2]: the verified pass the first attempt where `early_N`, else the second."""
    first_N, second_N = verified_N & early_N, verified_N.double()
    return torch.stack([first_N.double(), torch.where(first_N, torch.nan, second_N)], dim=1)


def _first_for_all_others(reward_N: Tensor) -> Tensor:
    """[N]: the first rollout with a verdict as everybody's reference, -1 for itself."""
    place_N = torch.arange(len(reward_N))
    first = int(reward_N.isfinite().int().argmax()) if len(reward_N) else 0
    return torch.where(place_N != first, first, -1)


def tensors(group: Group) -> dict[str, Tensor]:
    """The tensor fields that are present, by name."""
    return {name: vars(group)[name] for name in SHAPES if vars(group)[name] is not None}


def changed(group: Group, values: dict[str, Tensor], kind: type[Group] = Group) -> Group:
    """The group with other tensors, as another class where asked."""
    return kind(**({f.name: vars(group)[f.name] for f in fields(Group)} | values))


def reordered(group: Group, order_N: Tensor) -> Group:
    """The rollouts in another order; indices of rollouts follow."""
    values = {name: v[order_N] for name, v in tensors(group).items() if SHAPES[name][0] == "N"}
    place_N = torch.argsort(order_N)
    index_N = values["reference_index_N"]
    values["reference_index_N"] = torch.where(index_N >= 0, place_N[index_N], -1)
    return changed(group, values)


def padded(group: Group, width: int) -> Group:
    """More padding on the right, filled with what must never be read."""
    values = {}
    for name, value in tensors(group).items():
        if SHAPES[name] == "NT":
            values[name] = F.pad(value, (0, width), value=_unread(value))
    return changed(group, values)


def spoiled(group: Group) -> Group:
    """NaN, or a wrong id, wherever the mask is False."""
    values = {}
    for name, value in tensors(group).items():
        if SHAPES[name] == "NT" and name != "mask_NT":
            values[name] = torch.where(group.mask_NT, value, _unread(value))
    return changed(group, values)


def _unread(value: Tensor) -> float | int | bool:
    if value.dtype == torch.bool:
        return False
    return float("nan") if value.is_floating_point() else -1
