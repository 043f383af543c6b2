"""All ranks stop behind the same step, or none does."""

from megatron_credit.mcore.exchange import broadcast_payload
from megatron_credit.trainer.launched_attempt import LaunchedAttempt


class NeverStop:
    """A run that nobody asks to stop early."""

    def requested(self) -> bool:
        """False."""
        return False

    def stopped(self, step: int) -> None:
        """Nothing: it is never called."""


class StopOnRequest:
    """The supervisor's STOP file as rank 0 sees it, on all ranks."""

    def __init__(self, attempt: LaunchedAttempt, *, is_leader: bool) -> None:
        self._attempt = attempt
        self._is_leader = is_leader

    def requested(self) -> bool:
        """Whether the run is to be saved and ended now. Collective over the world."""
        said = {"stop": self._attempt.stop.exists()} if self._is_leader else None
        return broadcast_payload(said)[0]["stop"]

    def stopped(self, step: int) -> None:
        """The run was saved after `step`."""
        if self._is_leader:
            self._attempt.write_stopped(step)
