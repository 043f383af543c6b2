"""Which rollouts of a group serve as evidence for which, and which have any.

The only user of a group's seed.
"""

from typing import Literal

import torch
from torch import Tensor

from megatron_credit.credit.baselines import has_verdict, is_verified, is_wrong

NONE = -1
"""No such rollout."""


def has_evidence(mask_NT: Tensor, *signals_NT: Tensor) -> Tensor:
    """[N] bool: all of these signals are finite on every trained token of the rollout."""
    evidence_N = torch.ones(len(mask_NT), dtype=torch.bool, device=mask_NT.device)
    for signal_NT in signals_NT:
        evidence_N &= (signal_NT.isfinite() | ~mask_NT).all(dim=1)
    return evidence_N


def pick_siblings(reward_N: Tensor, *, negatives: int = 1) -> tuple[Tensor, Tensor]:
    """positive_N, the first verified rollout other than the row's own, and negative_NK, the first
    K = `negatives` wrong ones other than it; -1 where there is none. int64.

    ValueError where negatives < 1.
    """
    return _siblings(reward_N, negatives, None)


def draw_siblings(reward_N: Tensor, *, seed: int, negatives: int = 4) -> tuple[Tensor, Tensor]:
    """As `pick_siblings`, but drawn uniformly, none twice in a row: for RLCSD (2606.11709)."""
    return _siblings(reward_N, negatives, torch.Generator().manual_seed(seed))


def _siblings(
    reward_N: Tensor, negatives: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    if negatives < 1:
        raise ValueError(f"negatives={negatives}; expected at least 1")
    positive_N1 = _others(is_verified(reward_N), 1, generator)
    return positive_N1[:, 0], _others(is_wrong(reward_N), negatives, generator)


def _others(candidate_N: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """[N, count]: for each row some candidates other than itself, -1 where they run out.

    They are the first by index, or with a generator a draw of the row's own.
    """
    candidates = candidate_N.nonzero()[:, 0].tolist()
    picked_NK = torch.full((len(candidate_N), count), NONE, device=candidate_N.device)
    for row in range(len(candidate_N)):
        others = [index for index in candidates if index != row]
        if generator is not None:
            order = torch.randperm(len(others), generator=generator).tolist()
            others = [others[place] for place in order]
        others = others[:count]
        picked_NK[row, : len(others)] = torch.tensor(others, dtype=torch.int64)
    return picked_NK


def pick_references(
    reward_N: Tensor, *, seed: int, scope: Literal["partial", "all"] = "partial"
) -> Tensor:
    """[N] int64: for SC-GRPO (2606.18810) whose text conditions each row's teacher, -1 = nobody's.

    With at least two but not all verified: uniform among the verified, never the row itself. With
    none verified: one random rollout for all the others. With exactly one verified nobody has one,
    unless `scope` is "all", where it serves all the others. With all verified nobody has one. Rows
    without a verdict neither give nor get a reference. Depends on rewards and seed only.
    """
    generator = torch.Generator().manual_seed(seed)
    valid = has_verdict(reward_N).nonzero()[:, 0].tolist()
    verified = is_verified(reward_N).nonzero()[:, 0].tolist()
    reference_N = torch.full((len(reward_N),), NONE, device=reward_N.device)
    alone = len(verified) == 1 and scope == "partial"
    if len(valid) < 2 or alone or len(verified) == len(valid):
        return reference_N
    shared = verified or [valid[_draw(len(valid), generator)]]
    for row in valid:
        others = [index for index in shared if index != row]
        if others:
            reference_N[row] = others[_draw(len(others), generator)]
    return reference_N


def _draw(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator))


def pick_wrong_answer(reward_N: Tensor, *, exclude_self: bool = False) -> Tensor:
    """[N] int64: for CEPO (2605.19436) the rollout whose answer serves as the wrong one, or -1.

    It is the lowest reward below 0.5, lowest index on ties, for the whole group; `exclude_self`
    gives that rollout itself the next one.
    """
    wrong = is_wrong(reward_N).nonzero()[:, 0].tolist()
    ranked = sorted(wrong, key=lambda index: (float(reward_N[index]), index))
    picked_N = torch.full((len(reward_N),), ranked[0] if ranked else NONE, device=reward_N.device)
    if exclude_self and ranked:
        picked_N[ranked[0]] = ranked[1] if len(ranked) > 1 else NONE
    return picked_N
