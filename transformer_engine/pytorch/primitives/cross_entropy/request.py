"""What a cross entropy is told before a backend says yes or no."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....common.formats import ceil_div
from ....common.operation_settings import Labels


class CrossEntropyRequest(NamedTuple):
    """One of "statistics", "losses", "gradient" on logits [rows, width], or "rescale" of gradients.

    strips     how many partial statistics a row has
    per_row    a gradient has a factor a row, not one for all
    in_place   a gradient takes the place of the logits
    """

    operation: str
    rows: int
    width: int
    dtype: torch.dtype
    device: torch.device
    labels: Labels
    strips: int = 1
    per_row: bool = False
    in_place: bool = False


def strips_of(rows: int, width: int) -> int:
    """Into how many strips a row is cut: a program for each of a few rows would leave most of a GPU idle."""
    whole = ceil_div(width, 8192)
    return ceil_div(whole, ceil_div(whole, min(ceil_div(1024, rows), whole)))
