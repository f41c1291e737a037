"""Maps from tokens to rows, computed from masks, chunks and segments; in the `permutation` layout.

By mask, rows are ordered by expert, then by token: the row of an expert's token is the number of ones in the previous
columns and above it in its own column. Two launches count the ones; each program counts its token share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch, Output
from .program import Program, step


@triton.jit
def count_kernel(
    mask,
    counts,
    tokens,
    experts,
    token_stride,
    expert_stride,
    share,
    TILE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Compute counts [programs, E]: each expert's ones among the tokens in a program's share."""
    expert = tl.arange(0, EXPERTS)[None, :]
    total = tl.zeros([EXPERTS], tl.int32)
    first = tl.program_id(0) * share
    for start in range(first, tl.minimum(first + share, tokens), TILE):
        token = start + tl.arange(0, TILE)[:, None]
        inside = (token < tokens) & (expert < experts)
        offsets = token.to(tl.int64) * token_stride + expert * expert_stride
        total += tl.sum((tl.load(mask + offsets, mask=inside, other=0) != 0).to(tl.int32), 0)
    lane = tl.arange(0, EXPERTS)
    tl.store(counts + tl.program_id(0) * experts + lane, total, mask=lane < experts)


@triton.jit
def rank_kernel(
    mask,
    counts,
    map,
    tokens,
    experts,
    token_stride,
    expert_stride,
    share,
    programs,
    TILE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Compute the map by mask, with rows by expert, then by token; a program writes its token share."""
    expert = tl.arange(0, EXPERTS)[None, :]
    program = tl.program_id(0)
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, programs, TILE):
        other = start + tl.arange(0, TILE)[:, None]
        inside = (other < programs) & (expert < experts)
        ones = tl.load(counts + other * experts + expert, mask=inside, other=0)
        total += tl.sum(ones, 0)
        before += tl.sum(tl.where(other < program, ones, 0), 0)
    base = tl.cumsum(total, 0) - total + before
    first = program * share
    for start in range(first, tl.minimum(first + share, tokens), TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (expert < experts)
        offsets = token.to(tl.int64)[:, None] * token_stride + expert * expert_stride
        ones = (tl.load(mask + offsets, mask=inside, other=0) != 0).to(tl.int32)
        row = base[None, :] + tl.cumsum(ones, 0) - ones
        number = tl.sum(ones, 1)
        target = map + token.to(tl.int64) * (2 * experts + 1)
        slot = target[:, None] + (number[:, None] - tl.cumsum(ones, 1))
        tl.store(slot, row, mask=ones != 0)
        tl.store(slot + experts, expert + tl.zeros_like(row), mask=ones != 0)
        tl.store(target + 2 * experts, number, mask=token < tokens)
        base += tl.sum(ones, 0)


@triton.jit
def chunk_kernel(splits, order, segments, chunks, CHUNKS: tl.constexpr, TILE: tl.constexpr):
    """Compute segments [3, N]: first row, rows, and first row in the result, for the chunks in their new order."""
    lane = tl.arange(0, CHUNKS)
    inside = lane < chunks
    chunk = tl.load(order + lane, mask=inside, other=0)
    size = tl.where(inside, tl.load(splits + chunk, mask=inside, other=0), 0).to(tl.int32)
    begin = tl.zeros([CHUNKS], tl.int32)
    for first in range(0, chunks, TILE):
        other = first + tl.arange(0, TILE)
        rows = tl.load(splits + other, mask=other < chunks, other=0).to(tl.int32)
        begin += tl.sum(tl.where(other[None, :] < chunk[:, None], rows[None, :], 0), 1)
    tl.store(segments + lane, begin, mask=inside)
    tl.store(segments + chunks + lane, size, mask=inside)
    tl.store(segments + 2 * chunks + lane, tl.cumsum(size, 0) - size, mask=inside)


@triton.jit
def segment_kernel(segments, map, tokens, count, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Compute the map by index [1, T]: a row moves with its segment; a row outside all segments stays."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = row
    for first in range(0, count, TILE):
        segment = first + tl.arange(0, TILE)
        begin = tl.load(segments + segment, mask=segment < count, other=0)
        size = tl.load(segments + count + segment, mask=segment < count, other=0)
        shift = tl.load(segments + 2 * count + segment, mask=segment < count, other=0) - begin
        within = row[:, None] - begin[None, :]
        holds = (within >= 0) & (within < size[None, :])
        target += tl.sum(tl.where(holds, shift[None, :], 0), 1)
    tl.store(map + row, target, mask=row < tokens)


def map_of_mask(tokens: int, experts: int, strides: tuple[int, int]) -> Program:
    """Program (mask [T, E], not 0 where an expert gets a token) -> map int32 [T, 2 E + 1]."""
    width = triton.next_power_of_2(experts)
    tile = max(4096 // width, 1)
    share = max(ceil_div(tokens, 128), 1)  # one wave of programs, each of which reads all counts
    share = ceil_div(share, tile) * tile
    programs = ceil_div(tokens, share)
    scalars = (tokens, experts, *strides, share)
    counting = Launch(
        count_kernel,
        (programs, 1, 1),
        (Output((programs, experts), "int32"),),
        scalars,
        (tile, width),
        warps=4,
    )
    ranking = Launch(
        rank_kernel,
        (programs, 1, 1),
        (Output((tokens, 2 * experts + 1), "int32"),),
        (*scalars, programs),
        (tile, width),
        warps=4,
    )
    steps = (step(counting, ("mask",), ("counts",)), step(ranking, ("mask", "counts"), ("map",)))
    return Program(("mask",), steps, ("map",))


def map_of_segments(tokens: int, count: int) -> Launch:
    """Launch (segments int32 [3, count]: first row, rows, first result row) -> map by index [1, T]."""
    block, tile = 256, 16
    outputs = (Output((1, tokens), "int32"),)
    return Launch(
        segment_kernel,
        (ceil_div(tokens, block), 1, 1),
        outputs,
        (tokens, count),
        (block, tile),
        warps=4,
    )


def map_of_chunks(tokens: int, chunks: int) -> Program:
    """Program (splits [N], order [N]) -> map by index [1, T] that moves chunk order[i] to place i."""
    outputs = (Output((3, chunks), "int32"),)
    constants = (triton.next_power_of_2(chunks), 16)
    sizes = Launch(chunk_kernel, (1, 1, 1), outputs, (chunks,), constants, warps=4)
    rows = map_of_segments(tokens, chunks)
    steps = (step(sizes, ("splits", "order"), ("segments",)), step(rows, ("segments",), ("map",)))
    return Program(("splits", "order"), steps, ("map",))
