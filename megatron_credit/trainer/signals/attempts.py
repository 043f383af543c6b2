"""Which attempt each token belongs to, and which attempts passed, from the rollouts' records."""

from megatron_credit.mcore.exchange import broadcast_payload
from megatron_credit.trainer.attempts import attempt_signals
from megatron_credit.trainer.signals.shared import padded
from megatron_credit.trainer.signals.step import Found, StepData


class AttemptSource:
    """Attempts of multi-attempt rollouts."""

    signals: tuple[str, ...] = ("attempt_id_NT", "attempt_pass_NK")

    def compute(self, data: StepData) -> Found:
        """Both signals of the groups that need them; nothing is computed."""
        tensors = {}
        for at in data.needing(self.signals) if data.records is not None else []:
            assert data.records is not None
            ids, passed_NK = attempt_signals(list(data.records[at]))
            tensors[f"{at}.id"] = padded([row_T.tolist() for row_T in ids], -1)
            tensors[f"{at}.pass"] = passed_NK.contiguous()
        _, shared = broadcast_payload({}, tensors)
        found = Found()
        for at in data.needing(self.signals):
            found.fields[at] = {
                "attempt_id_NT": shared[f"{at}.id"],
                "attempt_pass_NK": shared[f"{at}.pass"],
            }
        return found
