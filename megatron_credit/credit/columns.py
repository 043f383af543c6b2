"""Ids of tokens as columns of a score array: attempts, steps. C = columns of that array."""

import torch
import torch.nn.functional as F
from torch import Tensor


def trained_ids(signal: str, id_NT: Tensor, trained_NT: Tensor, num_columns: int) -> Tensor:
    """[N, T] int64: the column of each trained token, -1 where it has none.

    ValueError where a trained token's id is beyond the last column; `signal` is its name there.
    """
    known_NT = trained_NT & (id_NT >= 0)
    column_NT = id_NT.long().where(known_NT, -1)
    if column_NT.numel() and int(column_NT.max()) >= num_columns:
        raise ValueError(
            f"{signal} has id {int(column_NT.max())} on a trained token, but there are "
            f"{num_columns} columns of scores; ids count them from 0, -1 means none"
        )
    return column_NT


def present_columns(column_NT: Tensor, num_columns: int) -> Tensor:
    """[N, C] bool: some token of the row is in this column."""
    # One more column in front, for the tokens that have none.
    present_NC = column_NT.new_zeros(len(column_NT), num_columns + 1, dtype=torch.bool)
    return present_NC.scatter(1, column_NT + 1, True)[:, 1:]


def on_tokens(value_NC: Tensor, column_NT: Tensor) -> Tensor:
    """[N, T]: each token's value of its column, 0 where it has none."""
    return F.pad(value_NC, (1, 0)).gather(1, column_NT + 1)
