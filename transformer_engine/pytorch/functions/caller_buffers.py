"""CallerBuffers: results of a grouped layer that are written where the caller says."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CallerBuffers(NamedTuple):
    """output [total, N] and the input's gradient [total, K], contiguous; None: allocated as usual."""

    output: Tensor | None = None
    grad_input: Tensor | None = None


NO_BUFFERS = CallerBuffers()


def checked(name: str, buffer: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor | None:
    """The buffer as a matrix [total, last extent]; ValueError unless it can take a result of that shape.

    like   a tensor of the result's dtype and device
    """
    if buffer is None:
        return None
    if not isinstance(buffer, Tensor) or type(buffer) is torch.nn.Parameter:
        raise TypeError(f"{name} is a {type(buffer).__name__}; give a plain tensor")
    matrix = (shape[:-1].numel(), shape[-1])
    if tuple(buffer.shape) not in (tuple(shape), matrix):
        raise ValueError(
            f"{name} is {list(buffer.shape)}, the result {list(shape)}; give a buffer of its shape"
        )
    if buffer.dtype != like.dtype or buffer.device != like.device:
        raise ValueError(
            f"{name} is {buffer.dtype} on {buffer.device}, the result {like.dtype} on {like.device}; convert the buffer"
        )
    if not buffer.is_contiguous() or buffer.requires_grad:
        what = "requires a gradient" if buffer.requires_grad else "is not contiguous"
        raise ValueError(f"{name} {what}; give a contiguous buffer, detached")
    return buffer.view(matrix)


def handed_out(buffer: Tensor) -> Tensor:
    """An alias for autograd to put history on, so that the caller's buffer stays without and can serve again."""
    return buffer.detach()
