"""The support of top_k: the columns among the K most likely of a teacher, and the sampled token."""

from dataclasses import replace

import torch
from torch import Tensor

from credit_kernels.evidence.views import Views
from credit_kernels.vocab_parallel import LOWEST, gather


def with_support(views: Views) -> Views:
    """The views with the thresholds of each context of the contrast, if top_k is asked for.

    They lie between the K-th logit and the next, so that it does not matter how those are rounded;
    columns that tie there are all in. A pass over all logits and, with a group, an all-gather.
    """
    contrast, top_k = views.options.contrast, views.options.top_k
    if contrast is None or top_k is None:
        return views
    named, count = list(contrast.named), top_k + 1
    here = min(count, views.num_columns)
    largest = []
    for _, logit_CRV, _ in views.logits():
        top_JRK = logit_CRV.new_full((len(named), logit_CRV.shape[1], count), LOWEST)
        top_JRK[..., :here] = logit_CRV[named].topk(here, -1).values
        largest.append(top_JRK)
    gathered = gather(torch.cat(largest, 1), views.options.shard.group)
    top_JRK = torch.cat(gathered, -1).topk(count, -1).values
    return replace(views, threshold_JR=(top_JRK[..., -2] + top_JRK[..., -1]) / 2)


def kept(views: Views, rows: slice, columns: slice, logit_CRN: Tensor) -> Tensor | None:
    """[R, N] bool: the columns of the support; None for all."""
    contrast = views.options.contrast
    if contrast is None or views.threshold_JR is None:
        return None
    threshold_JR1 = views.threshold_JR[:, rows, None]
    kept_RN = (logit_CRN[list(contrast.named)] >= threshold_JR1).any(0)
    if kept_RN.shape[1] == 0:
        return kept_RN
    column_R1, owned_R1 = views.heads[0].target_column(views.target_R[rows], columns)
    return kept_RN.scatter_(1, column_R1, owned_R1 | kept_RN.gather(1, column_R1))
