"""Output heads of real models, and one rank's part of them."""

import re
from dataclasses import dataclass

ALIGNMENT = 128
"""Megatron pads the vocabulary to a multiple of this times the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """The rows of an output weight that one rank holds."""

    name: str
    hidden: int
    vocabulary: int
    """Rows, padding included if the head is a shard."""
    ranks: int = 1
    """Tensor-parallel size."""

    def shard(self, ranks: int) -> "Head":
        """One rank's part; it is then benchmarked as a whole vocabulary, without all-reduces."""
        if ranks == 1:
            return self
        multiple = ALIGNMENT * ranks
        padded = -(-self.vocabulary // multiple) * multiple
        return Head(name=self.name, hidden=self.hidden, vocabulary=padded // ranks, ranks=ranks)


MODELS = (
    Head(name="qwen3-0.6b", hidden=1024, vocabulary=151936),
    Head(name="qwen3-8b", hidden=4096, vocabulary=151936),
    Head(name="qwen3-32b", hidden=5120, vocabulary=151936),
    Head(name="qwen3-30b-a3b", hidden=2048, vocabulary=151936),
    Head(name="llama3-8b", hidden=4096, vocabulary=128256),
    Head(name="llama3-70b", hidden=8192, vocabulary=128256),
    Head(name="deepseek-v3", hidden=7168, vocabulary=129280),
)


def parse_head(text: str) -> Head:
    """A model's head, one with a part of both its sizes (qwen3-8b/8), or HIDDENxVOCABULARY."""
    if sizes := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text):
        return Head(name=text, hidden=int(sizes[1]), vocabulary=int(sizes[2]))
    name, _, divisor = text.partition("/")
    models = {model.name: model for model in MODELS}
    if name not in models or not re.fullmatch(r"([1-9]\d*)?", divisor):
        raise ValueError(
            f"head {text!r}; expected one of {list(models)}, one of them divided (qwen3-8b/8), or "
            "HIDDENxVOCABULARY (256x32000)"
        )
    part, model = int(divisor or 1), models[name]
    if part > model.hidden:
        raise ValueError(f"head {text!r} has no hidden size left; {name} has {model.hidden}")
    return Head(name=text, hidden=model.hidden // part, vocabulary=model.vocabulary // part)
