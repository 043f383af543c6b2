"""Where each rank stands on each axis, in megatron's order of ranks; light to import."""

from dataclasses import dataclass

from megatron_credit.mcore.architecture import data_parallel_size
from megatron_credit.mcore.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The coordinates of a rank: pipeline, data, context and tensor; of experts, expert and expert
    tensor."""

    rank: int
    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    etp: int


def rank_places(parallel: ParallelConfig, num_processes: int) -> list[RankPlace]:
    """The place of every rank.

    Tensor ranks are neighbours, then come context, data and pipeline. Experts are laid out over the
    ranks of a stage on their own: expert tensor ranks are neighbours, then come expert ranks.
    """
    data = data_parallel_size(parallel, num_processes)
    per_stage = parallel.tensor * parallel.context * data
    places = []
    for rank in range(num_processes):
        stage, within = divmod(rank, per_stage)
        rest, tp = divmod(within, parallel.tensor)
        dp, cp = divmod(rest, parallel.context)
        group, etp = divmod(within, parallel.expert_tensor)
        ep = group % parallel.expert
        places.append(RankPlace(rank=rank, pp=stage, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp))
    return places
