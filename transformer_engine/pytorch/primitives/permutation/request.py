"""Routes of tokens to rows, and what a permutation is told before a backend says yes or no."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MASK, INDEX = "mask", "index"


class Routes(NamedTuple):
    """Which rows tokens are sent to; a route of a token has a row and a column of probabilities [T, columns].

    layout       MASK: map int32 [T, 2 E + 1], a token's rows, the highest first, from E on the experts they belong to,
                 at 2 E how many they are; other cells hold anything. A column is an expert.
                 INDEX: map int32 [J * T], row of token t's route j at j * T + t, -1 where it is dropped; a column is j
    pad_offsets  by mask: int64 [E], what is added to an expert's rows
    """

    map: Tensor
    layout: str
    tokens: int
    columns: int
    pad_offsets: Tensor | None = None


class PermutationRequest(NamedTuple):
    """One operation on routes; shape is that of the mask, of the chunks [T, N] or of the tokens [T, H].

    strides    of the mask
    rows       of the permuted tokens
    weights    dtype of probabilities, or of values a row
    every_row  is every row sent something?
    """

    operation: str
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    layout: str = MASK
    rows: int = 0
    columns: int = 0
    weights: torch.dtype | None = None
    every_row: bool = False
    strides: tuple[int, int] = (0, 0)
