"""reasoning-gym's own score of an answer, full marks or nothing."""

import difflib
from typing import Any

from megatron_credit.rewards.config import ReasoningGymConfig
from megatron_credit.rewards.verdict import Verdict

NAME_KEY = "source_dataset"
"""Where reasoning-gym writes the dataset's name in the metadata of its entries."""


class GymVerifier:
    """Scores with the dataset that made the question. Only full marks are right: reasoning-gym
    gives some to wrong answers, 0.125 for containing the right digits and up to 0.97 for more."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        # Imports about a hundred generators, which takes seconds.
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        self._config = config
        self._gym = reasoning_gym
        self._known = sorted(DATASETS)
        self._scorers: dict[str, Any] = {}
        if config.dataset:
            self._scorer(config.dataset)

    def compare(self, found: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        """right or wrong; a scorer that fails on an answer raises."""
        name, entry = self._entry(answer, metadata)
        score = self._scorer(name).score_answer(found, entry)
        return Verdict("right" if score >= 1.0 else "wrong", " ".join(found.split()))

    def check_reference(self, answer: str, metadata: dict[str, Any]) -> str | None:
        """The reference itself must have full marks, where there is one."""
        try:
            name, entry = self._entry(answer, metadata)
            scorer = self._scorer(name)
        except ValueError as error:
            return str(error)
        if entry["answer"] and scorer.score_answer(entry["answer"], entry) < 1.0:
            return f"reasoning-gym's {name} does not score the reference {answer[:80]!r} as right"
        return None

    def _entry(self, answer: str, metadata: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The name of the dataset and the entry as the dataset made it."""
        key = self._config.entry_key
        entry = metadata.get(key) if key else {"answer": answer, "metadata": metadata}
        if not isinstance(entry, dict) or not isinstance(entry.get("metadata"), dict):
            raise ValueError(
                f"metadata[{key!r}] must be a reasoning-gym entry {{question, answer, metadata}}, "
                f"got {str(entry)[:80]!r}"
            )
        name = self._config.dataset or entry["metadata"].get(NAME_KEY)
        if not name:
            raise ValueError(
                f"neither the verifier's `dataset` nor the entry's metadata[{NAME_KEY!r}] names "
                "the reasoning-gym dataset"
            )
        return name, {"question": "", **entry, "answer": answer or entry.get("answer")}

    def _scorer(self, name: str) -> Any:
        """The dataset, whose configuration does not matter for scoring."""
        if name not in self._known:
            near = difflib.get_close_matches(name, self._known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "see reasoning_gym.factory.DATASETS"
            raise ValueError(f"reasoning-gym has no dataset {name!r}; {hint}")
        if name not in self._scorers:
            self._scorers[name] = self._gym.create_dataset(name, size=1, seed=0)
        return self._scorers[name]
