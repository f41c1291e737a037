"""cache[slot(sequence, start + i)] = new token i in each sequence, keys and values in one launch.

A slot is a token's row in a cache [pages or sequences, tokens, heads, size]. A sequence's slots are consecutive; with a
page table, they are consecutive inside a page.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch

_ELEMENTS = 4096  # elements per program tile: 8 KiB of bfloat16 in flight for 4 warps


@triton.jit
def _copy_tokens(
    new,
    cache,
    source,
    slot,
    real,
    head_stride,
    size,
    features,
    BLOCK: tl.constexpr,
):
    """Copy cache[slot, :] = new[source, :], the features of all heads, where `real`."""
    for first in range(0, features, BLOCK):
        feature = first + tl.arange(0, BLOCK)
        # The heads of a transposed prompt can be more than 2^31 elements apart.
        feature_offset = (feature // size).to(tl.int64) * head_stride + feature % size
        mask = real[:, None] & (feature < features)[None, :]
        values = tl.load(new + source[:, None] + feature_offset[None, :], mask=mask, other=0.0)
        target = cache + slot[:, None] * features + feature[None, :]
        tl.store(target, values.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def append_kernel(
    new_k,
    new_v,
    k_cache,
    v_cache,
    page_table,
    cu_new,
    cu_cached,
    blocks,
    capacity,
    page_size,
    pages,
    table_stride,
    heads,
    size_k,
    size_v,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    PACKED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Copy BLOCK_TOKENS new tokens in one sequence; cu_cached includes them: the first has index cached - new.

    Each sequence has `blocks` consecutive programs. One grid axis numbers them all, because the other axes end at
    65,535 programs, fewer than a long prompt's blocks.
    """
    sequence = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    begin = tl.load(cu_new + sequence)
    count = tl.load(cu_new + sequence + 1) - begin
    cached = tl.load(cu_cached + sequence + 1) - tl.load(cu_cached + sequence)
    position = cached - count + token
    real = (token < count) & (position >= 0) & (position < capacity)
    if page_table is None:
        slot = sequence.to(tl.int64) * capacity + position
    else:
        row = page_table + sequence.to(tl.int64) * table_stride
        page = tl.load(row + position // page_size, mask=real, other=0)
        real = real & (page >= 0) & (page < pages)
        slot = page.to(tl.int64) * page_size + position % page_size
    if PACKED:
        token += begin
    token = token.to(tl.int64)
    k_source = sequence.to(tl.int64) * k_batch_stride + token * k_token_stride
    v_source = sequence.to(tl.int64) * v_batch_stride + token * v_token_stride
    _copy_tokens(
        new_k, k_cache, k_source, slot, real, k_head_stride, size_k, heads * size_k, BLOCK_K
    )
    _copy_tokens(
        new_v, v_cache, v_source, slot, real, v_head_stride, size_v, heads * size_v, BLOCK_V
    )


def append(
    batch: int,
    longest: int,
    heads: int,
    sizes: tuple[int, int],
    strides: tuple[int, int, int, int, int, int],
    *,
    packed: bool,
    capacity: int,
    page_size: int,
    pages: int,
    table_stride: int,
) -> Launch:
    """Launch (new_k, new_v, k_cache, v_cache, page_table | None, cu_new, cu_cached) that writes the caches.

    Args:
        batch: Number of sequences.
        longest: Maximum number of new tokens per sequence.
        heads: Number of heads.
        sizes: Features per key head and value head.
        strides: Strides of new_k's, then new_v's sequence, token and head axes, in elements; a packed tensor's first
            stride is 0.
        packed: The new tokens are packed.
        capacity: Maximum number of tokens per sequence; later tokens are not written.
        page_size: Tokens per page; unused without pages.
        pages: Number of pages; tokens on other pages are not written.
        table_stride: Elements between two page-table rows; unused without pages.
    """
    blocks = [min(triton.next_power_of_2(heads * size), 2048) for size in sizes]
    tokens = max(1, min(triton.next_power_of_2(longest), _ELEMENTS // max(blocks)))
    per_sequence = ceil_div(longest, tokens)
    scalars = (per_sequence, capacity, page_size, pages, table_stride, heads, *sizes, *strides)
    grid, constants = (batch * per_sequence, 1, 1), (packed, tokens, *blocks)
    return Launch(append_kernel, grid, (), scalars, constants, warps=4, in_place=(2, 3))
