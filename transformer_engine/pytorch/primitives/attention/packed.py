"""Packed sequences [t, ..]: lengths and bounds, conversion from and to padded form, and trailing padding."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ....common.kernels.launch import Launch, unavailable_reason
from ...runtime.device import current_hardware
from ...runtime.launching import DTYPE_NAMES, run


def sequence_lengths(cu_seqlens: Tensor) -> Tensor:
    """Return the tokens per sequence [b] from their cumulative sum [b + 1]."""
    return cu_seqlens[1:] - cu_seqlens[:-1]


def cumulative(lengths: Tensor) -> Tensor:
    """Return cu_seqlens [b + 1] int32 from the tokens per sequence [b]."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def lengths_of_mask(masked: Tensor) -> Tensor:
    """Return the tokens per sequence [b] int32 from a padding mask [b, 1, 1, s] or [b, s], True = padding."""
    return (~masked.flatten(1)).sum(dim=1, dtype=torch.int32)


def thd_to_bshd(x: Tensor, starts: Tensor, lengths: Tensor, size: int) -> Tensor:
    """Unpack tokens [t, h, d] to [b, size, h, d]: x[starts[i] : starts[i] + lengths[i]], padded with zeros."""
    position = torch.arange(size, device=x.device)
    real = position < lengths[:, None]
    if x.shape[0] == 0:
        return x.new_zeros(lengths.shape[0], size, *x.shape[1:])
    token = (starts[:-1, None].long() + position).clamp(max=x.shape[0] - 1)
    return torch.where(real[..., None, None], x[token], 0)


def bshd_to_thd(x: Tensor, starts: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    """Pack [b, s, h, d] to tokens [t, h, d], the inverse of thd_to_bshd; other tokens are zero."""
    if x.shape[1] == 0:  # every sequence is empty; the sum keeps the result differentiable
        return x.new_zeros(tokens, *x.shape[2:]) + x.sum()
    token = torch.arange(tokens, device=x.device)
    starts = starts.long()
    sequence = (torch.searchsorted(starts, token, right=True) - 1).clamp(max=lengths.shape[0] - 1)
    position = token - starts[sequence]
    real = position < lengths[sequence]
    return torch.where(real[:, None, None], x[sequence, position.clamp(max=x.shape[1] - 1)], 0)


def zero_padding(x: Tensor, starts: Tensor) -> None:
    """Set x[t, ..] = 0 in place for the tokens t >= starts[-1]; x is contiguous, starts int32 [b + 1]."""
    if x.is_cuda and unavailable_reason(current_hardware()) is None and x.dtype in DTYPE_NAMES:
        run(_launch(x.shape[0], math.prod(x.shape[1:]), starts.shape[0] - 1), (x, starts))
        return
    tokens = torch.arange(x.shape[0], device=x.device)
    x.masked_fill_((tokens >= starts[-1]).reshape(-1, *(1,) * (x.ndim - 1)), 0)


@functools.lru_cache(maxsize=256)
def _launch(tokens: int, width: int, sequences: int) -> Launch:
    # Triton is imported when the first kernel is needed.
    from ....common.kernels.packed_sequences import zero_padding_launch

    return zero_padding_launch(tokens, width, sequences)
