"""y = softmax(scale * x) along the keys, and dx = scale * y * (dy - sum(dy * y)), in float32.

x, y, dy and dx are contiguous [batch, heads, queries, keys]; the mask is read through strides, 0 along broadcast axes.
A masked key has probability 0 for any score, and a query without a key has zeros. Under a causal mask, query i sees
the keys up to i + shift; other keys are neither read nor multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch, Output

_WHOLE = 16384  # keys that a program holds in registers


@triton.jit
def _visible(row, query, key, keys, shift, CAUSAL: tl.constexpr):
    inside = key < keys
    if CAUSAL:
        inside = inside & (key <= query + shift)
    return inside


@triton.jit
def _mask_rows(mask, row, queries, heads, batch_stride, head_stride, query_stride):
    """Pointer to the mask's rows."""
    lead = row // queries
    return (
        mask
        + (lead // heads).to(tl.int64) * batch_stride
        + (lead % heads).to(tl.int64) * head_stride
        + (row % queries).to(tl.int64) * query_stride
    )


@triton.jit
def forward_rows(
    x,
    mask,
    y,
    rows,
    queries,
    keys,
    heads,
    batch_stride,
    head_stride,
    query_stride,
    key_stride,
    shift,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Compute BLOCK_ROWS whole rows per program."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    key = tl.arange(0, BLOCK_KEYS)[None, :]
    valid = (row < rows)[:, None]
    visible = valid & _visible(row, (row % queries)[:, None], key, keys, shift, CAUSAL)
    offset = row.to(tl.int64)[:, None] * keys + key
    score = tl.load(x + offset, mask=visible, other=0.0).to(tl.float32) * scale
    if mask is not None:
        start = _mask_rows(mask, row, queries, heads, batch_stride, head_stride, query_stride)
        hidden = tl.load(start[:, None] + key * key_stride, mask=visible, other=1)
        visible = visible & (hidden == 0)
    score = tl.where(visible, score, float("-inf"))
    row_max = tl.max(score, 1)
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    weight = tl.exp(score - row_max[:, None])
    total = tl.sum(weight, 1)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    tl.store(
        y + offset, (weight * inverse[:, None]).to(y.dtype.element_ty), mask=valid & (key < keys)
    )


@triton.jit
def _scores(x, mask, key, keys, query, key_stride, shift, scale, CAUSAL: tl.constexpr):
    """Compute scaled scores for one row's keys, -inf for keys that are not visible."""
    visible = _visible(0, query, key, keys, shift, CAUSAL)
    score = tl.load(x + key, mask=visible, other=0.0).to(tl.float32) * scale
    if mask is not None:
        hidden = tl.load(mask + key.to(tl.int64) * key_stride, mask=visible, other=1)
        visible = visible & (hidden == 0)
    return tl.where(visible, score, float("-inf"))


@triton.jit
def forward_wide(
    x,
    mask,
    y,
    rows,
    queries,
    keys,
    heads,
    batch_stride,
    head_stride,
    query_stride,
    key_stride,
    shift,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Compute one row per program, with any length: one read for the maximum and the sum, one to write."""
    row = tl.program_id(0)
    query = row % queries
    source = x + row.to(tl.int64) * keys
    target = y + row.to(tl.int64) * keys
    hidden = mask
    if mask is not None:
        hidden = _mask_rows(mask, row, queries, heads, batch_stride, head_stride, query_stride)
    end = keys
    if CAUSAL:
        end = tl.minimum(tl.maximum(query + shift + 1, 0), keys)
    lane = tl.arange(0, BLOCK_KEYS)
    row_max = float("-inf")
    total = 0.0
    for first in range(0, end, BLOCK_KEYS):
        score = _scores(source, hidden, first + lane, keys, query, key_stride, shift, scale, CAUSAL)
        highest = tl.maximum(row_max, tl.max(score, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(row_max - base) + tl.sum(tl.exp(score - base), 0)
        row_max = highest
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    for first in range(0, keys, BLOCK_KEYS):
        key = first + lane
        score = _scores(source, hidden, key, keys, query, key_stride, shift, scale, CAUSAL)
        tl.store(
            target + key, (tl.exp(score - base) * inverse).to(y.dtype.element_ty), mask=key < keys
        )


@triton.jit
def backward_rows(
    dy,
    y,
    dx,
    rows,
    queries,
    keys,
    shift,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Compute BLOCK_ROWS whole rows per program."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    key = tl.arange(0, BLOCK_KEYS)[None, :]
    valid = (row < rows)[:, None]
    visible = valid & _visible(row, (row % queries)[:, None], key, keys, shift, CAUSAL)
    offset = row.to(tl.int64)[:, None] * keys + key
    weight = tl.load(y + offset, mask=visible, other=0.0).to(tl.float32)
    gradient = tl.load(dy + offset, mask=visible, other=0.0).to(tl.float32)
    mean = tl.sum(weight * gradient, 1)
    result = scale * (weight * (gradient - mean[:, None]))
    tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=valid & (key < keys))


@triton.jit
def backward_wide(
    dy,
    y,
    dx,
    rows,
    queries,
    keys,
    shift,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Compute one row per program, with any length, in two reads."""
    row = tl.program_id(0)
    query = row % queries
    start = row.to(tl.int64) * keys
    end = keys
    if CAUSAL:
        end = tl.minimum(tl.maximum(query + shift + 1, 0), keys)
    lane = tl.arange(0, BLOCK_KEYS)
    products = tl.zeros([BLOCK_KEYS], tl.float32)
    for first in range(0, end, BLOCK_KEYS):
        visible = first + lane < end
        weight = tl.load(y + start + first + lane, mask=visible, other=0.0).to(tl.float32)
        gradient = tl.load(dy + start + first + lane, mask=visible, other=0.0).to(tl.float32)
        products += weight * gradient
    mean = tl.sum(products, 0)
    for first in range(0, keys, BLOCK_KEYS):
        key = first + lane
        weight = tl.load(y + start + key, mask=key < end, other=0.0).to(tl.float32)
        gradient = tl.load(dy + start + key, mask=key < end, other=0.0).to(tl.float32)
        result = scale * (weight * (gradient - mean))
        tl.store(dx + start + key, result.to(dx.dtype.element_ty), mask=key < keys)


def forward(
    shape: tuple[int, int, int, int],
    mask_strides: tuple[int, int, int, int],
    dtype: str,
    scale: float,
    shift: int | None,
) -> Launch:
    """Launch (x, mask uint8 | None) -> y, both [batch, heads, queries, keys]; shift: for the causal mask."""
    rows, queries, keys, heads = _extents(shape)
    scalars = (rows, queries, keys, heads, *mask_strides, shift or 0, float(scale))
    outputs = (Output(shape, dtype),)
    causal = shift is not None
    if keys > _WHOLE:
        return Launch(forward_wide, (rows, 1, 1), outputs, scalars, (causal, 8192), warps=16)
    block_rows, block_keys, warps = _tile(keys)
    constants = (causal, block_rows, block_keys)
    return Launch(
        forward_rows, (ceil_div(rows, block_rows), 1, 1), outputs, scalars, constants, warps
    )


def backward(
    shape: tuple[int, int, int, int], dtype: str, scale: float, shift: int | None
) -> Launch:
    """Launch (dy, y) -> dx, all [batch, heads, queries, keys]."""
    rows, queries, keys, _ = _extents(shape)
    scalars = (rows, queries, keys, shift or 0, float(scale))
    outputs = (Output(shape, dtype),)
    causal = shift is not None
    if keys > _WHOLE:
        return Launch(backward_wide, (rows, 1, 1), outputs, scalars, (causal, 4096), warps=16)
    block_rows, block_keys, warps = _tile(keys)
    constants = (causal, block_rows, block_keys)
    return Launch(
        backward_rows, (ceil_div(rows, block_rows), 1, 1), outputs, scalars, constants, warps
    )


def _extents(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    batch, heads, queries, keys = shape
    return batch * heads * queries, queries, keys, heads


def _tile(keys: int) -> tuple[int, int, int]:
    """Choose (rows, padded keys, warps) for a program."""
    block = max(triton.next_power_of_2(keys), 16)
    if block >= 2048:
        return 1, block, max(4, block // 1024)
    return 2048 // block, block, 4
