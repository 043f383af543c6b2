"""Matrix products in full precision, by the library that is fast on the machine at hand."""

import torch
from torch import Tensor

LONGEST_SUM = 128
"""oneDNN adds up a product's terms in one chain, whose rounding grows with its length; such
pieces are as exact as torch.mm and cost some percent of the time."""


def matmul_nt(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """a_MK @ b_NK.T in the operands' precision, inside autocast regions too.

    float32 on CPUs goes through oneDNN: torch.mm calls MKL there, which leaves half of the vector
    unit unused on processors that are not Intel's (twice the time on AMD EPYC with AVX-512).
    """
    if a_MK.device.type == "cpu" and a_MK.dtype == torch.float32 and _has_onednn():
        if len(a_MK) == 1:
            # oneDNN's product of a single row has other bits than the same row among others.
            return _onednn_nt(a_MK.expand(2, -1), b_NK)[:1]
        return _onednn_nt(a_MK, b_NK)
    with torch.autocast(a_MK.device.type, enabled=False):
        return a_MK @ b_NK.T


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def _onednn_nt(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    parts = zip(a_MK.split(LONGEST_SUM, 1), b_NK.split(LONGEST_SUM, 1), strict=True)
    # The operation that torch.compile puts in place of linear layers; no bias, no epilogue.
    products = (
        torch.ops.mkldnn._linear_pointwise(a_MP, _dense(b_NP), None, "none", [], "")
        for a_MP, b_NP in parts
    )
    total_MN: Tensor = next(products)
    for product_MN in products:
        total_MN += product_MN
    return total_MN


def _dense(b_NK: Tensor) -> Tensor:
    """Without gaps between rows or columns: for those, oneDNN has a loop 2000 times slower."""
    return b_NK if b_NK.T.is_contiguous() else b_NK.contiguous()
