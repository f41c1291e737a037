"""What a transpose is told before a backend says yes or no."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TransposeRequest(NamedTuple):
    """One call on codes [M, K]; native: they are torch's own tensor, no subclass."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    contiguous: bool
    native: bool
