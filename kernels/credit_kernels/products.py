"""Matrix products of the Triton backends, in float32 whatever the operands' type."""

import torch
from torch import Tensor

from credit_kernels.matmul import matmul_nt


def product(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """a @ b.T."""
    out_MN = a_MK.new_empty(len(a_MK), len(b_NK), dtype=torch.float32)
    write_product(out_MN, a_MK, b_NK)
    return out_MN


def write_product(out_MN: Tensor, a_MK: Tensor, b_NK: Tensor) -> None:
    """out = a @ b.T."""
    if _on_tensor_cores(a_MK):
        with torch.autocast("cuda", enabled=False):
            torch.mm(a_MK, b_NK.T, out_dtype=torch.float32, out=out_MN)
    else:
        out_MN.copy_(matmul_nt(a_MK.float(), b_NK.float()))


def add_product(total_MN: Tensor, a_MK: Tensor, b_NK: Tensor) -> None:
    """total += a @ b.T."""
    if _on_tensor_cores(a_MK):
        with torch.autocast("cuda", enabled=False):
            torch.addmm(total_MN, a_MK, b_NK.T, out_dtype=torch.float32, out=total_MN)
    else:
        total_MN += matmul_nt(a_MK.float(), b_NK.float())


def _on_tensor_cores(operand: Tensor) -> bool:
    # The processors' products of bfloat16 round the result to bfloat16.
    return operand.is_cuda and operand.dtype != torch.float32
