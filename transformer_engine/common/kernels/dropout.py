"""y = keep ? x / (1 - p) : 0, y = keep ? (x + bias) / (1 - p) + residual : residual, and dx from the mask.

Element i of the flattened tensor is kept when the upper 24 bits of word i % 4 of Philox-4x32-10, counter i // 4, are
not below p * 2^24 (Salmon et al., 2011). The mask holds one bit an element, element 8 j + b in bit b of byte j.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch, Output

_BLOCK = 4096


@triton.jit
def _kept(seed, first, THRESHOLD, BLOCK: tl.constexpr):
    """1 or 0, int32 [BLOCK], for the elements from first (a multiple of 4) on."""
    counter = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(tl.load(seed), counter, zero, zero, zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    return ((words >> 8).to(tl.int32) >= THRESHOLD).to(tl.int32)


@triton.jit
def forward_kernel(
    x,
    bias,
    residual,
    seed,
    mask,
    y,
    SIZE,
    WIDTH,
    THRESHOLD,
    factor,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One block of the flattened tensors; every intermediate is rounded as the separate operations round it."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offset = first + tl.arange(0, BLOCK)
    inside = offset < SIZE
    kept = _kept(seed, first, THRESHOLD, BLOCK)
    if EVEN:
        value = tl.load(x + offset)
    else:
        value = tl.load(x + offset, mask=inside, other=0.0)
    element = y.dtype.element_ty
    if bias is not None:
        shift = tl.load(bias + offset % WIDTH, mask=inside, other=0.0)
        value = (value.to(tl.float32) + shift.to(tl.float32)).to(element)
    result = tl.where(kept != 0, value.to(tl.float32) * factor, 0.0).to(element)
    if residual is not None:
        beside = tl.load(residual + offset, mask=inside, other=0.0)
        result = (result.to(tl.float32) + beside.to(tl.float32)).to(element)
    if EVEN:
        tl.store(y + offset, result)
    else:
        tl.store(y + offset, result, mask=inside)
    bits = tl.reshape(kept, [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :]
    if not EVEN:
        bits = tl.where(tl.reshape(inside, [BLOCK // 8, 8]), bits, 0)
    byte = first // 8 + tl.arange(0, BLOCK // 8)
    tl.store(mask + byte, tl.sum(bits, 1).to(tl.uint8), mask=byte * 8 < SIZE)


@triton.jit
def backward_kernel(dy, mask, dx, SIZE, factor, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offset = first + tl.arange(0, BLOCK)
    inside = offset < SIZE
    byte = first // 8 + tl.arange(0, BLOCK // 8)
    bytes_of = tl.load(mask + byte, mask=byte * 8 < SIZE, other=0).to(tl.int32)
    kept = tl.reshape((bytes_of[:, None] >> tl.arange(0, 8)[None, :]) & 1, [BLOCK])
    if EVEN:
        gradient = tl.load(dy + offset)
    else:
        gradient = tl.load(dy + offset, mask=inside, other=0.0)
    result = tl.where(kept != 0, gradient.to(tl.float32) * factor, 0.0).to(dx.dtype.element_ty)
    if EVEN:
        tl.store(dx + offset, result)
    else:
        tl.store(dx + offset, result, mask=inside)


def forward(size: int, width: int, dtype: str, threshold: int, factor: float) -> Launch:
    """(x, bias [width] | None, residual | None, seed int64 [1], mask) -> y [size].

    mask        uint8 [ceil(size / 8)], written
    threshold   p * 2^24, rounded
    factor      what a kept element is multiplied by
    """
    outputs = (Output((size,), dtype),)
    grid = (ceil_div(size, _BLOCK), 1, 1)
    constants = (_BLOCK, size % _BLOCK == 0)
    return Launch(forward_kernel, grid, outputs, (size, width, threshold, float(factor)), constants, warps=4)


def backward(size: int, dtype: str, factor: float) -> Launch:
    """(dy, mask) -> dx [size]"""
    outputs = (Output((size,), dtype),)
    constants = (_BLOCK, size % _BLOCK == 0)
    return Launch(
        backward_kernel, (ceil_div(size, _BLOCK), 1, 1), outputs, (size, float(factor)), constants, warps=4
    )
