"""One of two trainer ranks whose rank 0 samples with a fleet that loses and finds engines."""

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from megatron_credit.mcore import cpu_mode

cpu_mode.enable()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron_credit.mcore.world import join_world  # noqa: E402
from megatron_credit.trainer import rollout_phase  # noqa: E402
from megatron_credit.trainer.rollout_phase import EngineRollouts  # noqa: E402


class CollectivePolicy:
    """Its weights need every rank, as gathered ones do."""

    passes = 0

    def weights_metadata(self):
        return []

    def weights(self):
        self.passes += 1
        for number in range(3):
            weight = torch.full((2,), float(number))
            dist.all_reduce(weight)
            yield f"w{number}", weight


class FleetOfOne:
    """Has a newcomer when a test says so."""

    can_replace = True
    num_lost = num_reissued = 0

    def __init__(self):
        self.waiting = 0
        self.got = []
        self.is_stopped = False
        self.complete = threading.Event()

    def newcomers(self):
        return ["newcomer"] * self.waiting

    def send_to_newcomers(self, metadata, weights):
        self.got.append([(name, weight.tolist()) for name, weight in weights])
        self.waiting = 0
        self.complete.set()

    def send(self, metadata, weights, version):
        return len(list(weights))

    def stop(self):
        self.is_stopped = True
        self.complete.set()


class Refusing(FleetOfOne):
    def send_to_newcomers(self, metadata, weights):
        raise ValueError("the weight stream brought w9, which was not announced")


def with_a_newcomer(fleet):
    """Sampling that cannot go on before the newcomer has its weights."""

    def work(_sampler):
        fleet.waiting = 1
        assert fleet.complete.wait(60)
        fleet.complete.clear()
        return {"thread": threading.get_ident()}

    return work


def slow(_sampler):
    """Sampling that takes longer than rank 0 keeps silent."""
    time.sleep(0.5)
    return "slept"


def failing(_sampler):
    raise RuntimeError("the engines are gone")


def main(rank: int, folder: Path, scenario: str) -> None:
    join_world(rank=rank, size=2, rendezvous=folder / "store", timeout_s=60)
    rollout_phase.KEEP_ALIVE_S = 0.1
    policy, config = CollectivePolicy(), SimpleNamespace()
    config.trainer = SimpleNamespace(check_sync=False)
    fleet = (Refusing() if scenario == "refusing" else FleetOfOne()) if rank == 0 else None
    rollouts = EngineRollouts(
        config=config,
        directory=None,
        policy=policy,
        sampler=object() if rank == 0 else None,
        fleet=fleet,
    )
    rollouts.load_weights(0)
    work = {"failing": failing}.get(scenario, with_a_newcomer(fleet))
    found = [rollouts._while_sampling(work) for _ in range(2)]
    found.append(rollouts._while_sampling(slow))
    (folder / f"rank-{rank}.json").write_text(
        json.dumps({"found": found, "passes": policy.passes, "got": fleet and fleet.got})
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
