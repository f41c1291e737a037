"""The dropout request, and the reference: Philox-4x32-7 in 64-bit integers, arithmetic in float32.

Salmon, Moraes, Dror, Shaw, Parallel Random Numbers: As Easy as 1, 2, 3 (2011); its seven rounds pass all of BigCrush.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ...runtime.tracing import cast_result

_UNIT = 1 << 16


class DropoutRequest(NamedTuple):
    """One operation on a tensor; p is the share of elements to drop."""

    operation: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    p: float = 0.0


def keep_threshold(p: float) -> int:
    """Return the least number in 0 .. 2^16 - 1 that keeps an element: p * 2^16, which matches p within 8e-6."""
    return round(p * _UNIT)


def keep_factor(p: float) -> float:
    """Return the factor for kept elements, 1 / (1 - p); 0 for p = 1, which keeps no element."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def empty_dropout(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Allocate (y, mask)."""
    return x.new_empty(x.shape), x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def bind(request: DropoutRequest) -> Callable[..., Any]:
    """Return the operation as a callable.

    * forward: (x, bias, residual, seed) -> (y, mask)
    * bias_add: (x, bias, residual) -> y
    * backward: (dy, mask) -> dx
    """
    p = request.p
    if request.operation == "forward":
        return lambda x, bias, residual, seed: forward(x, bias, residual, seed, p)
    if request.operation == "bias_add":
        return bias_add
    return lambda dy, mask: backward(dy, mask, p)


def forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    """Return y and the mask, uint8 [ceil(numel / 8)] with element i in bit i % 8 of byte i // 8."""
    size = x.numel()
    # An element is kept if its 16 random bits, half a word, are at least p * 2^16.
    words = torch.stack(_philox(seed, torch.arange(-(-size // 8), device=seed.device)), dim=1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=2)
    keep_mask = halves.reshape(-1)[:size] >= keep_threshold(p)
    y = _scaled(x if bias is None else _sum(x, bias), keep_mask, p)
    bits = torch.nn.functional.pad(keep_mask.to(torch.int32), (0, -size % 8)).reshape(-1, 8)
    mask = (
        (bits << torch.arange(8, device=keep_mask.device, dtype=torch.int32)).sum(1).to(torch.uint8)
    )
    return y if residual is None else _sum(y, residual), mask


def bias_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Add bias and residual to x."""
    return _sum(_sum(x, bias), residual)


def _sum(x: Tensor, y: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return cast_result(x.to(wide) + y.to(wide), x.dtype)


def backward(dy: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return dx, shaped like dy."""
    places = torch.arange(8, device=mask.device)
    keep_mask = (mask.reshape(-1)[:, None].to(torch.int64) >> places) & 1
    return _scaled(dy, keep_mask.reshape(-1)[: dy.numel()] != 0, p)


def _scaled(x: Tensor, keep_mask: Tensor, p: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return cast_result(
        torch.where(keep_mask.view(x.shape), x.to(wide) * keep_factor(p), 0.0), x.dtype
    )


def _philox(
    seed: Tensor, counter: Tensor, rounds: int = 7
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit words per counter (below 2^32), as int64."""
    key = [seed & _WORD, (seed >> 32) & _WORD]
    zero = torch.zeros_like(counter)
    c0, c1, c2, c3 = counter, zero, zero, zero
    for _ in range(rounds):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key[0], low1, high0 ^ c3 ^ key[1], low0
        key = [(word + step) & _WORD for word, step in zip(key, _WEYL, strict=True)]
    return c0, c1, c2, c3


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (upper, lower) 32 bits of a * b, computed in halves of b, so that no sum exceeds 2^63."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


BACKEND: Backend[DropoutRequest] = Backend("reference", bind=bind)
