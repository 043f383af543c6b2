"""Log-prob and entropy of target tokens from hidden states; the logits are never held."""

from torch import Tensor

from credit_kernels.checks import check_head, check_scale
from credit_kernels.dispatch import Work, choose
from credit_kernels.logprob.function import Backend, LinearLogprob, Options, unit_pays
from credit_kernels.vocab_parallel import VocabShard


def _torch() -> Backend:
    from credit_kernels.logprob.chunked import BACKEND

    return BACKEND


def _rows() -> Backend:
    from credit_kernels.logprob.rows import BACKEND

    return BACKEND


def _tiles() -> Backend:
    from credit_kernels.logprob.tiles import BACKEND

    return BACKEND


BACKENDS = {"torch": _torch, "rows": _rows, "tiles": _tiles}
"""Loaders of implementations by name; `dispatch` chooses. The last two need Triton."""


def linear_logprob(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """logprob_T, or (logprob_T, entropy_T) with `return_entropy`, in nats.

    logits = softcap(hidden @ weight.T) / temperature, in float32 whatever the inputs' type (float64
    for float64 inputs); softcap(z) is softcap tanh(z / softcap). `weight_VH` holds the rows
    shard.start..shard.stop-1 (default: the whole vocabulary); columns from shard.total on are
    padding. A target outside [0, total) makes an ignored row: 0 in both outputs, no gradient, its
    hidden state never read. Differentiable once, in hidden and weight, through both outputs. With a
    shard's group the gradient of hidden is this rank's part, to be summed over the group by the
    caller; two all-reduces forward, none backward. The same with and without gradient, bit for bit.

    The backward pass makes the logits once more. Not so for the gradient of logprob_T where only
    hidden has one (weight_VH.requires_grad is False), without a group, in "torch" and "rows": d
    logprob / d hidden of the R rows that are not ignored is then made beside the statistics and
    kept, 4 R H bytes (float32; 8 for float64 inputs). A gradient through entropy_T is not prepared
    and makes the logits again.

    `backend` is "torch" (tile by tile, on any device), "rows" (products by the vendor's library, a
    Triton kernel over the rows of a chunk of logits), "tiles" (a Triton kernel that keeps the
    logits on the chip) or "auto", which takes the one that is expected to be best. The Triton
    backends take no float64, and CPU tensors in Triton's interpreter only. On tensor cores the
    gradient of a product is rounded to the inputs' type, as autograd does, but summed in float32.

    Raises ValueError for shapes, types, devices or numbers that do not fit together, and for a
    backend that is not available or cannot run.
    """
    shard = VocabShard.whole(weight_VH.shape[0]) if shard is None else shard
    check_head(hidden_TH, weight_VH, target_T, shard, "TH")
    check_scale(temperature, softcap)
    work = Work(hidden_TH.device, hidden_TH.dtype, len(hidden_TH), shard.num_columns)
    load = choose(backend, BACKENDS, operation="linear_logprob", work=work)
    implementation = load()
    options = Options(
        shard=shard,
        temperature=temperature,
        softcap=softcap,
        with_entropy=return_entropy,
        keeps_unit=unit_pays(hidden_TH, weight_VH, shard, implementation),
    )
    logprob_T, entropy_T = LinearLogprob.apply(
        hidden_TH, weight_VH, target_T, options, implementation
    )
    return (logprob_T, entropy_T) if return_entropy else logprob_T
