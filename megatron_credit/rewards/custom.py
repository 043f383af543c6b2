"""A function of the user as verifier."""

import difflib
import importlib
import pkgutil
from typing import Any

from megatron_credit.rewards.config import CustomConfig
from megatron_credit.rewards.verdict import OUTCOMES, Verdict


class CustomVerifier:
    """Calls function(text, answer, metadata), which returns bool, 0, 1, 0.0, 1.0 or a Verdict."""

    def __init__(self, config: CustomConfig) -> None:
        self._path = config.path
        self._function = load_function(config.path)

    def compare(self, found: str, answer: str, metadata: dict[str, Any]) -> Verdict:
        """The function's verdict on the whole text; TypeError when it returns something else."""
        result = self._function(found, answer, metadata)
        if isinstance(result, Verdict) and result.outcome in OUTCOMES:
            return result
        # 0.5 is no verdict: where to draw the line is for the function to say.
        if isinstance(result, bool | int | float) and result in (0, 1):
            return Verdict("right" if result == 1 else "wrong")
        raise TypeError(
            f"{self._path} must return bool, 0, 1 or a Verdict, it returned {result!r:.80}"
        )

    def check_reference(self, answer: str, metadata: dict[str, Any]) -> str | None:
        """Nothing is known of what the function expects."""
        return None


def load_function(path: str, role: str = "verifier") -> Any:
    """The function at package.module:function; ValueError, which calls it by its role, when there
    is none."""
    name, _, function = path.partition(":")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        hint = _near_module(name)
        raise ValueError(f"{role} {path!r} cannot be imported: {error}{hint}") from None
    if function not in vars(module):
        near = difflib.get_close_matches(function, vars(module), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"look into {module.__file__}"
        raise ValueError(f"{role} {path!r}: {name} has no {function!r}; {hint}")
    found = vars(module)[function]
    if not callable(found):
        raise ValueError(f"{role} {path!r} is a {type(found).__name__}, not a function")
    return found


def _near_module(name: str) -> str:
    """A hint at the module that is meant, where one has nearly that name."""
    parent, _, last = name.rpartition(".")
    try:
        paths = importlib.import_module(parent).__path__ if parent else None
    except (ImportError, AttributeError):
        return ""
    near = difflib.get_close_matches(last, [found.name for found in pkgutil.iter_modules(paths)], 1)
    if not near or near[0] == last:
        return ""
    return f"; did you mean {'.'.join(filter(None, (parent, near[0])))}?"
