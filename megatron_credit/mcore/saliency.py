"""How much each token of a response matters for the answer in its own box: gradient x activation
(GRAIL, arXiv 2606.04889).

The loss is the negative log-prob of the answer span, and its gradient is taken at the input of
every position, or at hidden states further up. One forward and one backward pass over the sequences
that have a box, down to the activations only; the output head reads only the rows of the spans.

Shape letters: L tokens of a sequence, T of its response, Q as in `activation_gradients`, N
positions of all sequences of the pass, one after the other.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.distributed as dist
from credit_kernels.checks import check_scale
from torch import Tensor

from megatron_credit.batch.packing import IGNORED, PackedBatch
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.credit.answer_span import AnswerPart
from megatron_credit.mcore.activation_gradients import Leaf, activation_gradients
from megatron_credit.mcore.forward import run_schedule
from megatron_credit.mcore.parallel import Ranks
from megatron_credit.mcore.policy import Policy

Align = Literal["predictor", "token"]
"""Where a response token's saliency is read: at the position that predicts it, or at its own."""


@torch.enable_grad()
def saliency(
    policy: Policy,
    sequences: Sequence[TrainSequence],
    answer_parts: Sequence[Tensor],
    *,
    temperature: float,
    leaf: Leaf = "embedding",
    align: Align = "predictor",
) -> list[Tensor]:
    """|| gradient * activation || of every response token, float32 [T] on the CPU, in input order.

    `answer_parts`: of each sequence int64 [T], an `AnswerPart` for each response token. The span is
    the marker, the content and the closing brace. 0 everywhere in a sequence without a span, and on
    positions that the span does not depend on. Sums over the span, divided by nothing.

    The same lists must be given on every rank, and every rank gets all results. The policy, its
    gradients and its optimizer stay as they are. ValueError for input that does not fit together.
    """
    _check_choice("leaf", leaf, get_args(Leaf))
    _check_choice("align", align, get_args(Align))
    check_scale(temperature, None)
    spans = _spans(sequences, answer_parts)
    chosen = [number for number, span_T in enumerate(spans) if span_T.any()]
    probes = [_probe(sequences[number], spans[number]) for number in chosen]
    found = [torch.zeros(len(sequence.token_ids_L)) for sequence in sequences]
    if probes:
        norms = _read(policy, probes, leaf, temperature)
        for number, norm_N in zip(chosen, norms, strict=True):
            found[number][: len(norm_N)] = norm_N
    shift = 1 if align == "predictor" else 0
    return [
        norm_L[sequence.num_prompt - shift : len(norm_L) - shift]
        for sequence, norm_L in zip(sequences, found, strict=True)
    ]


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}; expected one of {', '.join(choices)}")


def _spans(sequences: Sequence[TrainSequence], answer_parts: Sequence[Tensor]) -> list[Tensor]:
    """[T] bool of each sequence: the token is of the answer span."""
    if len(sequences) != len(answer_parts):
        raise ValueError(
            f"{len(answer_parts)} answer_parts for {len(sequences)} sequences; expected one each"
        )
    for number, (sequence, part_T) in enumerate(zip(sequences, answer_parts, strict=True)):
        if part_T.shape != (sequence.num_response,) or part_T.dtype != torch.int64:
            raise ValueError(
                f"answer_parts[{number}] has shape {tuple(part_T.shape)} and type {part_T.dtype}; "
                f"expected ({sequence.num_response},) and torch.int64, one part for each response "
                "token"
            )
        if ((part_T < AnswerPart.NONE) | (part_T > AnswerPart.AFTER)).any():
            raise ValueError(
                f"answer_parts[{number}] has values {part_T.unique().tolist()}; expected parts of "
                f"{AnswerPart.NONE:d} .. {AnswerPart.AFTER:d}, see AnswerPart"
            )
    return [(part_T >= AnswerPart.MARKER) & (part_T <= AnswerPart.CLOSE) for part_T in answer_parts]


def _probe(sequence: TrainSequence, span_T: Tensor) -> TrainSequence:
    """The sequence up to the end of its span, every token but the first a response token, so that
    every position that predicts one has a slot; trained on are those of the span."""
    stop = sequence.num_prompt + int(span_T.nonzero().max()) + 1
    mask_L = torch.zeros(len(sequence.token_ids_L), dtype=torch.bool)
    mask_L[sequence.num_prompt :] = span_T
    routed_LDK = sequence.routed_experts_LDK
    return TrainSequence(
        token_ids_L=sequence.token_ids_L[:stop],
        num_prompt=1,
        mask_T=mask_L[1:stop],
        rollout_logprob_T=torch.zeros(stop - 1),
        advantage_T=torch.zeros(stop - 1),
        old_logprob_T=None,
        reference_logprob_T=None,
        routed_experts_LDK=None if routed_LDK is None else routed_LDK[:stop],
    )


def _read(
    policy: Policy, probes: Sequence[TrainSequence], leaf: Leaf, temperature: float
) -> list[Tensor]:
    """Of each probe the norm at every position but the last, on which nothing depends."""
    packer = policy.batching.packer(probes, [0.0] * len(probes))
    batches = [_span_only(batch) for batch in policy.batching.batches(packer)]
    norms = _Norms(packer.slots[-1], policy)

    def loss(_batch: PackedBatch, logprob_R: Tensor, _entropy_R: Tensor) -> tuple[Tensor, None]:
        return -logprob_R.sum(), None

    with activation_gradients(policy.chunks, batches, leaf, norms.keep):
        head = policy.batching.head(temperature)
        run_schedule(policy.chunks, batches, head, loss, forward_only=False)
    return list(norms.gather(policy.ranks).split([probe.num_response for probe in probes]))


def _span_only(batch: PackedBatch) -> PackedBatch:
    """Targets only where a token of a span is predicted: the head reads these rows alone."""
    return replace(batch, target_P=batch.target_P.where(batch.mask_P, IGNORED))


class _Norms:
    """|| gradient * activation || of every position, collected as the micro-batches go by."""

    def __init__(self, num_positions: int, policy: Policy) -> None:
        self._found_N = torch.zeros(num_positions, device=policy.device)
        self._sequence_parallel = policy.parallel.sequence_parallel
        self._tp_rank = policy.ranks.tp_rank

    def keep(self, batch: PackedBatch, value_QH: Tensor, gradient_QH: Tensor) -> None:
        """Takes what this rank sees of one micro-batch."""
        norm_Q = (gradient_QH.float() * value_QH.float()).norm(dim=-1)
        first = self._tp_rank * len(norm_Q) if self._sequence_parallel else 0
        slot_Q = batch.slot_P[first : first + len(norm_Q)]
        self._found_N[slot_Q[slot_Q >= 0]] = norm_Q[slot_Q >= 0]

    def gather(self, ranks: Ranks) -> Tensor:
        """[N] on the CPU of every rank. Collective over the world."""
        # Each position was seen on one data and context rank, of one stage, and under sequence
        # parallelism on one tensor rank; all others hold 0.
        groups = [ranks.dp_cp_group, ranks.pp_group]
        for group in [*groups, ranks.tp_group] if self._sequence_parallel else groups:
            dist.all_reduce(self._found_N, group=group)
        return self._found_N.cpu()
