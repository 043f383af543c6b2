"""Whether a process reward model can work, before a run starts anything."""

from megatron_credit.rewards.prm.config import AnyPrm
from megatron_credit.rewards.prm.seat import Seat
from megatron_credit.rewards.process import WorkerDied


def check_prm(config: AnyPrm) -> None:
    """Imports the function, or reads the model's directory without its weights, in a process that
    ends with the check. ValueError says what is wrong and what to do."""
    seat = Seat(config, check_only=True)
    try:
        seat.start()
    except WorkerDied as death:
        raise ValueError(f"the process reward model cannot work: {death}") from None
    finally:
        seat.drop()
