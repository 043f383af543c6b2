"""Errors of the rollout side."""

from megatron_credit.errors import FailedProcess
from megatron_credit.rollouts.engine_log import EngineLog

MEMORY = (
    "; it ran out of memory: engine.kv_cache_mib (on a CPU), engine.gpu_memory (on a GPU), "
    "engine.max_num_seqs and engine.tensor_parallel decide how much it takes"
)


class EngineError(FailedProcess):
    """An engine died, hangs, or refused what it was asked; the message names it and what it did,
    says so where memory was short, and ends with the last lines of its log, both by the log as it
    is when the message is read."""

    def __init__(self, problem: str, log: EngineLog | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.log = log

    def __str__(self) -> str:
        if self.log is None:
            return self.problem
        return self.problem + (MEMORY if self.log.tells_of_memory() else "") + self.log.tail()


class RequestRefused(EngineError):
    """The engine lives and says that the request is wrong; no other engine would say otherwise."""
