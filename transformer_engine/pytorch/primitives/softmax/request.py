"""What a softmax is told before a backend says yes or no."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Which keys query i of q sees, of k: top_left j <= i; bottom_right j <= i + k - q.
CAUSAL = ("top_left", "bottom_right")


class SoftmaxRequest(NamedTuple):
    """One call on x [.., q, k]; mask: shape and strides of what hides keys, forward only."""

    operation: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    causal: str | None
    scale: float = 1.0
    mask: tuple[torch.Size, tuple[int, ...]] | None = None


def shift_of(causal: str | None, shape: torch.Size) -> int | None:
    """How many keys beyond its own number a query sees; None without a causal mask."""
    if causal is None:
        return None
    return 0 if causal == "top_left" else shape[-1] - shape[-2]
