"""Kernels that turn hidden states into per-token statistics without holding the logits.

Depends on torch (and, for the Triton backends, triton) alone. Shape letters: T tokens, H hidden,
V rows of the output weight on this rank, C contexts.
"""

from credit_kernels.divergence import divergence_loss
from credit_kernels.evidence import EvidenceStats, evidence_loss, evidence_stats
from credit_kernels.logprob import linear_logprob
from credit_kernels.vocab_parallel import VocabShard

__all__ = [
    "EvidenceStats",
    "VocabShard",
    "divergence_loss",
    "evidence_loss",
    "evidence_stats",
    "linear_logprob",
]
