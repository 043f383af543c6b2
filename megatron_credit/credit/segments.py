"""Where a chain of thought is cut into segments (RREDCoT). M = segments of a row."""

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from megatron_credit.settings import Settings

_NEWLINES = re.compile(r"\n+")
# Bounded blanks: time must stay linear in a text that a model wrote.
_MARKER = re.compile(
    r"""(?: [.!?]["')\]*]{0,3}\s{1,3} | \n[ \t]{0,8} )
    (Wait|But|So|Therefore|Thus|Alternatively|However|First|Next|Then|Now|Let)\b""",
    re.VERBOSE,
)
_ENTROPY_PERCENTILE = 0.95

Kind = Literal["hybrid", "newline", "fixed", "entropy"]


class Segmenter(Settings):
    """How a chain of thought is cut."""

    kind: Kind = "hybrid"
    """hybrid: before sentences that start with a discourse marker (Wait, But, So, ...), after
    newlines and at peaks of the policy's entropy; newline: after newlines; entropy: at the peaks;
    fixed: into parts of equal length."""
    min_tokens: int = Field(32, ge=1)
    """A shorter segment is merged with its neighbour; 4 suits tasks with tiny chains."""
    max_segments: int = Field(16, ge=1)
    """Of more cuts than these leave room for, those of the highest entropy are kept."""


def segment_ids(
    texts: Sequence[str], entropies: Sequence[float], segmenter: Segmenter
) -> list[int]:
    """The segment of each token of one chain of thought, counted from 0.

    `texts` are the tokens' texts; `entropies`, in nats, the policy's entropy where it sampled each
    of them, NaN where unknown. ValueError where the two differ in length.
    """
    if len(texts) != len(entropies):
        raise ValueError(f"{len(texts)} token texts came with {len(entropies)} entropies")
    known = [-math.inf if math.isnan(entropy) else entropy for entropy in entropies]
    if segmenter.kind == "fixed":
        cuts = _even_cuts(len(texts), segmenter)
    else:
        cuts = _merge(_cuts(texts, known, segmenter.kind), len(texts), segmenter.min_tokens)
        cuts = _highest(cuts, known, segmenter.max_segments - 1)
    return [bisect_right(cuts, token) for token in range(len(texts))]


def group_segment_ids(
    chains: Sequence[Sequence[int]], lengths: Sequence[int]
) -> tuple[Tensor, int]:
    """`Group.segment_id_NT` and M_max, the most segments of any row and the id of answer tokens.

    `chains` holds the segment of each token of a row's chain of thought; what follows up to the
    row's length is its answer.
    """
    most = max((max(chain) + 1 for chain in chains if chain), default=0)
    id_NT = torch.full((len(chains), max(lengths, default=0)), -1)
    for row, (chain, length) in enumerate(zip(chains, lengths, strict=True)):
        answer = [most] * (length - len(chain))
        id_NT[row, :length] = torch.tensor([*chain, *answer], dtype=torch.int64)
    return id_NT, most


def _even_cuts(num_tokens: int, segmenter: Segmenter) -> list[int]:
    num_parts = min(segmenter.max_segments, max(num_tokens // segmenter.min_tokens, 1))
    return [part * num_tokens // num_parts for part in range(1, num_parts)]


def _cuts(texts: Sequence[str], entropies: Sequence[float], kind: Kind) -> list[int]:
    """The tokens, in order, that may begin a segment; their number for one that would be empty."""
    cuts = set[int]()
    if kind in ("hybrid", "newline"):
        cuts |= _token_of(texts, [match.end() for match in _NEWLINES.finditer("".join(texts))])
    if kind == "hybrid":
        cuts |= _token_of(texts, [match.start(1) for match in _MARKER.finditer("".join(texts))])
    if kind in ("hybrid", "entropy"):
        cuts |= _peaks(entropies)
    return sorted(cuts)


def _token_of(texts: Sequence[str], places: Sequence[int]) -> set[int]:
    """The tokens that hold these characters; the number of tokens for a place behind the last."""
    stops = list(accumulate(map(len, texts)))
    return {bisect_right(stops, place) for place in places}


def _peaks(entropies: Sequence[float]) -> set[int]:
    """Local maxima of the entropy above the row's 95th percentile; of a plateau its start."""
    finite_T = torch.tensor([e for e in entropies if math.isfinite(e)], dtype=torch.float64)
    if not len(finite_T):
        return set()
    level = float(finite_T.quantile(_ENTROPY_PERCENTILE))
    around = [-math.inf, *entropies, -math.inf]
    return {
        token
        for token, entropy in enumerate(entropies)
        if entropy > level and around[token] < entropy >= around[token + 2]
    }


def _merge(cuts: Sequence[int], num_tokens: int, min_tokens: int) -> list[int]:
    """The cuts without those that end a short or empty segment, which joins the next one, or that
    begin a short last one."""
    kept = [0]
    for cut in cuts:
        if min(cut - kept[-1], num_tokens - cut) >= min_tokens:
            kept.append(cut)
    return kept[1:]


def _highest(cuts: Sequence[int], entropies: Sequence[float], count: int) -> list[int]:
    """The cuts of the highest entropy, in order; the earlier of equal ones."""
    return sorted(sorted(cuts, key=lambda cut: (-entropies[cut], cut))[:count])
