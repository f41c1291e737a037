"""What a backend of a normalization is told before it says yes or no."""

from __future__ import annotations

from typing import NamedTuple

import torch


class NormRequest(NamedTuple):
    """One call on x [rows, width]; operation is the name of the public function that was called."""

    operation: str
    rows: int
    width: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
