"""The bytes of a tensor, for comparisons bit by bit."""

from __future__ import annotations

import torch


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 view of a contiguous copy: contiguous() itself keeps the strides of an axis of size 1."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)
