"""x[t, ..] = 0 for the tokens t >= starts[-1] of a packed tensor, those behind its last sequence."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ....common.kernels.launch import Launch, missing
from ...primitives.launching import DTYPE_NAMES, run


def clear_tail(x: Tensor, starts: Tensor) -> None:
    """Write the zeros in place; x [t, ..] is contiguous, starts int32 [b + 1]."""
    if x.is_cuda and missing() is None and x.dtype in DTYPE_NAMES:
        run(_launch(x.shape[0], math.prod(x.shape[1:]), starts.shape[0] - 1), (x, starts))
        return
    tokens = torch.arange(x.shape[0], device=x.device)
    x.masked_fill_((tokens >= starts[-1]).reshape(-1, *(1,) * (x.ndim - 1)), 0)


@functools.lru_cache(maxsize=256)
def _launch(tokens: int, width: int, sequences: int) -> Launch:
    # Triton is imported where a kernel is first made.
    from ....common.kernels.tail import clear_tail_launch

    return clear_tail_launch(tokens, width, sequences)
