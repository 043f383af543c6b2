"""What a pass over packed micro-batches found of each response token, brought back to its sequence.

Shape letters: T tokens (of one sequence, or of all one after the other), R rows of a micro-batch,
S numbers of a token.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_credit.batch.packing import PackedBatch, Packer
from megatron_credit.batch.scored import Scored
from megatron_credit.batch.sequence import TrainSequence
from megatron_credit.mcore.batching import Batching
from megatron_credit.mcore.forward import run_schedule
from megatron_credit.mcore.parallel import Ranks


class TokenValues:
    """Numbers of every response token, collected as the micro-batches of this rank go by."""

    def __init__(self, num_values: int, num_tokens: int, device: torch.device) -> None:
        self._found_ST = torch.zeros(num_values, num_tokens, device=device)

    def keep(self, batch: PackedBatch, found_SR: Tensor) -> None:
        """Takes what the last stage found of one micro-batch."""
        if batch.shared is None:
            self._found_ST[:, batch.slot_P[batch.row_R]] = found_SR
        else:
            self._found_ST[:, batch.shared.slot_F] = found_SR[:, batch.shared.number_F]

    def gather(self, ranks: Ranks) -> Tensor:
        """[S, T] of all tokens in input order, on the CPU of every rank. Collective over the
        world."""
        # Each token was scored on one data and context rank, of the last stage.
        dist.all_reduce(self._found_ST, group=ranks.dp_cp_group)
        if ranks.pp_size > 1:
            dist.broadcast(self._found_ST, group=ranks.pp_group, group_src=ranks.pp_size - 1)
        return self._found_ST.cpu()


class TokenScores:
    """Log-probs and entropies of every response token."""

    def __init__(self, packer: Packer, device: torch.device) -> None:
        self._values = TokenValues(2, packer.slots[-1], device)

    def keep(self, batch: PackedBatch, logprob_R: Tensor, entropy_R: Tensor) -> None:
        """Takes what the last stage found of one micro-batch."""
        self._values.keep(batch, torch.stack([logprob_R.detach(), entropy_R.detach()]))

    def gather(self, sequences: Sequence[TrainSequence], ranks: Ranks) -> list[Scored]:
        """The scores of all sequences in input order, on every rank. Collective over the world."""
        sizes = [sequence.num_response for sequence in sequences]
        parts = (row_T.split(sizes) for row_T in self._values.gather(ranks))
        return [
            Scored(logprob_T=logprob_T, entropy_T=entropy_T)
            for logprob_T, entropy_T in zip(*parts, strict=True)
        ]


@torch.no_grad()
def score_sequences(
    chunks: Sequence[torch.nn.Module],
    batching: Batching,
    sequences: Sequence[TrainSequence],
    *,
    temperature: float,
    exact: bool = False,
) -> list[Scored]:
    """What the model in `chunks` says of every response token.

    `exact`: each sequence is read by itself, in the micro-batches of an update. Otherwise what they
    begin with alike is read once, where our attention can; the numbers agree but for rounding.
    """
    if exact:
        packer = batching.packer(sequences, [0.0] * len(sequences))
        batches = batching.batches(packer)
    else:
        packer, batches = batching.read_batches(sequences)
    scores = TokenScores(packer, batching.device)

    def collect(batch: PackedBatch, logprob_R: Tensor, entropy_R: Tensor) -> tuple[Tensor, None]:
        scores.keep(batch, logprob_R, entropy_R)
        return logprob_R.sum(), None

    head = batching.head(temperature)
    run_schedule(chunks, batches, head, collect, forward_only=True)
    return scores.gather(sequences, batching.ranks)
