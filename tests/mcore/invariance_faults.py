"""A world of two ranks that computes a layout three times: as it is, and with something broken."""

from pathlib import Path

import torch.distributed as dist

from megatron_credit.mcore import cpu_mode
from megatron_credit.mcore.invariance import Job
from megatron_credit.mcore.world import join_world

VARIANTS = ("sound", "norms", "scaled")
SCALED = "decoder.layers.0.mlp.linear_fc1.weight"


def run_variants(rank: int, job: Job, directory: Path, is_reference: bool) -> None:
    """Writes what `compute_layout` writes, in a directory a variant."""
    assert not is_reference
    cpu_mode.enable()
    join_world(
        rank=rank, size=job.num_processes, rendezvous=directory / "rendezvous", timeout_s=120
    )
    from megatron_credit.mcore import invariance_worker, layers

    build_policy, norm = invariance_worker.build_policy, layers.RMSNorm.__init__

    def without_sums(self, config, hidden_size, eps):
        """Tensor ranks that never add up what their parts of a sequence say of a norm."""
        norm(self, config, hidden_size, eps)
        self.weight.sequence_parallel = False

    def with_one_scaled(job, bound):
        """One gradient a thousandth too large on one rank of two."""
        policy = build_policy(job, bound)
        if rank == 1:
            parameter = dict(policy.chunks[0].named_parameters())[SCALED]
            parameter.register_hook(lambda gradient: gradient * 1.001)
        return policy

    invariance_worker.compute_layout(job, directory / "sound")
    invariance_worker.build_policy = with_one_scaled
    invariance_worker.compute_layout(job, directory / "scaled")
    invariance_worker.build_policy = build_policy
    layers.RMSNorm.__init__ = without_sums
    invariance_worker.compute_layout(job, directory / "norms")
    dist.destroy_process_group()
