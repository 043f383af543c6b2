"""An engine as its fleet sees it."""

from concurrent.futures import Future

from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.registry import Entry


class Member:
    """One start of an engine, from its appearance until it is lost."""

    def __init__(self, entry: Entry, client: EngineClient) -> None:
        self.entry = entry
        self.client = client
        self.version: int | None = None
        """The weights that we gave it; None: none of ours."""
        self.is_ready = False
        """It has answered, with our key."""
        self.problem = "has not answered yet"
        """Why it is not ready."""
        self.refusal: EngineError | None = None
        """Something else answers at its address."""
        self.loss: EngineError | None = None
        """Why it is no longer used."""
        self._asked: Future | None = None

    def __str__(self) -> str:
        node = f" on {self.entry.node}" if self.entry.node else ""
        return f"{self.entry.name}{node} at {self.entry.address}"

    def check(self) -> None:
        """Finds out, over several calls and without waiting, whether it is ready."""
        if self.is_ready:
            return
        if self._asked is None:
            self._asked = self.client.begin_readiness()
        elif self._asked.done():
            asked, self._asked = self._asked, None
            try:
                readiness = asked.result()
            except EngineError as error:
                self.problem, self.refusal = error.problem, error
                return
            self.is_ready, self.problem = readiness.problem is None, readiness.problem or ""
