"""What the tokens of a micro-batch see of each other.

Shape letters: P positions of a micro-batch on this context rank.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sight:
    """What the tokens of a pack on this context rank see, sequence by sequence."""

    lengths: tuple[int, ...]
    """Tokens of each sequence here."""
    position_P: Tensor
    """By which the rotary embedding turns."""
    num_causal: tuple[int, ...]
    """So many of them, the first, see plainly those before them, and themselves."""
    masks: tuple[Tensor | None, ...]
    """Of the rest, [queries, keys]: which keys each sees, of all context ranks' one after the
    other. None: there is no rest."""
    before: tuple[Tensor | None, ...] = ()
    """Of each sequence, positions of the pack whose keys stand before its own; None: none. Empty:
    so it is of all."""
