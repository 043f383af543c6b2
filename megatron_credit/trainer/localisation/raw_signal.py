"""What a method reads of each token, before it is squashed, clipped and mixed into an advantage."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

Values = Mapping[str, Sequence[float]]
"""Numbers for each token by name, as a rollout record has them."""


def raw_signal(values: Values, needs: Collection[str]) -> Tensor | None:
    """[T] float64: how strongly the signal marks each token of a wrong response, >= 0.

    The divergence of the teacher, the difference of two log-probs, the saliency, or the benefit of
    believing the contrast that the token is wrong. None where the response has no such signal.
    """
    found = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    names = {signal.removesuffix("_NT") for signal in needs}.intersection(PER_TOKEN)
    if not names or not names <= found.keys():
        return None
    if "teacher_kl" in names:
        return found["teacher_kl"].clamp(min=0)
    if "saliency" in names:
        return found["saliency"]
    if "contrast_target" in names:
        return (found["contrast_mean"] - found["contrast_target"]).clamp(min=0)
    first, second = [name for name in LOGPROBS if name in names][:2]
    return (found[first] - found[second]).abs()


LOGPROBS = ("positive_logprob", "negative_logprob", "teacher_logprob", "policy_logprob")
"""Of a method that needs three the first two count: the last is a stand-in."""
PER_TOKEN = {"teacher_kl", "saliency", "contrast_target", "contrast_mean", *LOGPROBS}
