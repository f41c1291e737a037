"""Rotary position embedding y = x * cos(a) + pair(x) * sin(a), and its transpose dx = dy * cos(a) - pair(dy * sin(a)).

x is [outer, inner, heads, features], where outer and inner are s and b (sbhd), b and s (bshd), or t and 1 (thd). y is
contiguous. pair(x) is (-x2, x1) for each pair of features (x1, x2), which are neighbours if interleaved and otherwise
half the rotated width apart. angles is float32 [positions, rotated], contiguous. Features after the rotated ones are
copied. The arithmetic is float32.

Longer than 400 lines: the kernels of separate and of packed q, k and v share the functions of positions and heads.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch, Output


@triton.jit
def _packed_sequence(cu_seqlens, sequences, token, context_size, bisections):
    """Return the index of the packed sequence of a token: the last sequence that starts at or before the token."""
    low = 0
    high = sequences
    for _ in range(bisections):
        middle = (low + high + 1) // 2
        starts_before = tl.load(cu_seqlens + middle).to(tl.int32) // context_size <= token
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle - 1)
    return tl.minimum(low, sequences - 1)


@triton.jit
def _position(
    start,
    cu_seqlens,
    token,
    outer_index,
    inner_index,
    positions,
    length,
    sequences,
    bisections,
    context_size,
    context_rank,
    LAYOUT: tl.constexpr,
    CONTEXT_PARALLEL: tl.constexpr,
    CLAMPS: tl.constexpr,
):
    """Return a token's position in its sequence, clamped to the table, and whether the clamped position is valid.

    The position is valid if it is inside the table, if CLAMPS, or if the token is padding after the last sequence.
    """
    padding = CLAMPS
    if LAYOUT == "thd":
        sequence = _packed_sequence(cu_seqlens, sequences, token, context_size, bisections)
        begin = tl.load(cu_seqlens + sequence).to(tl.int32) // context_size
        position = token - begin
        # Tokens after the last sequence are padding.
        padding = padding | (token >= tl.load(cu_seqlens + sequences).to(tl.int32) // context_size)
        if CONTEXT_PARALLEL:
            length = tl.load(cu_seqlens + sequence + 1).to(tl.int32) // context_size - begin
    elif LAYOUT == "sbhd":
        position = outer_index
        sequence = inner_index
    else:
        position = inner_index
        sequence = outer_index
    if CONTEXT_PARALLEL:
        half = length // 2
        chunk = tl.where(position < half, context_rank, 2 * context_size - 2 - context_rank)
        position += chunk * half
    if start is not None:
        position += tl.load(start + sequence).to(tl.int32)
    valid = padding | ((position >= 0) & (position < positions))
    return tl.minimum(tl.maximum(position, 0), positions - 1), valid


@triton.jit
def _turn(first, second, angle, valid, first_column, second_column, inside, TRANSPOSED: tl.constexpr):
    """Return both features of every pair, rotated by the angles of their columns; NaN unless valid."""
    first_angle = tl.where(valid, tl.load(angle + first_column, mask=inside, other=0.0), float("nan"))
    second_angle = tl.where(valid, tl.load(angle + second_column, mask=inside, other=0.0), float("nan"))
    first_cosine, first_sine = tl.cos(first_angle)[None, :], tl.sin(first_angle)[None, :]
    second_cosine, second_sine = tl.cos(second_angle)[None, :], tl.sin(second_angle)[None, :]
    if TRANSPOSED:
        return (
            first * first_cosine + second * second_sine,
            second * second_cosine - first * first_sine,
        )
    else:
        return (
            first * first_cosine - second * first_sine,
            second * second_cosine + first * second_sine,
        )


@triton.jit
def rotate_kernel(
    x,
    angles,
    start,
    cu_seqlens,
    y,
    inner,
    heads,
    features,
    rotated,
    positions,
    length,
    sequences,
    bisections,
    outer_stride,
    inner_stride,
    head_stride,
    context_size,
    context_rank,
    LAYOUT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    CONTEXT_PARALLEL: tl.constexpr,
    CLAMPS: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate BLOCK_HEADS heads of one token; one program per token and block of heads."""
    token = tl.program_id(0)
    outer_index = token // inner
    inner_index = token % inner
    position, valid = _position(
        start, cu_seqlens, token, outer_index, inner_index, positions, length, sequences, bisections,
        context_size, context_rank, LAYOUT, CONTEXT_PARALLEL, CLAMPS,
    )  # fmt: skip

    angle = angles + position.to(tl.int64) * rotated
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    source = x + outer_index.to(tl.int64) * outer_stride + inner_index.to(tl.int64) * inner_stride
    source += head.to(tl.int64)[:, None] * head_stride
    target = y + token.to(tl.int64) * heads * features + head.to(tl.int64)[:, None] * features
    _rotate_heads(
        source, target, angle, valid, head < heads, features, rotated, INTERLEAVED, TRANSPOSED, HAS_REST,
        BLOCK_HEADS, BLOCK_PAIRS, BLOCK_REST,
    )  # fmt: skip


@triton.jit
def rotate_packed_kernel(
    packed,
    q_angles,
    k_angles,
    start,
    cu_seqlens,
    q,
    k,
    v,
    inner,
    groups,
    q_heads,
    width,
    v_width,
    k_offset,
    v_offset,
    q_rotated,
    k_rotated,
    positions,
    length,
    sequences,
    bisections,
    outer_stride,
    inner_stride,
    group_stride,
    context_size,
    context_rank,
    LAYOUT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    CONTEXT_PARALLEL: tl.constexpr,
    CLAMPS: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
):
    """Rotate BLOCK_HEADS heads of q of one token, or BLOCK_GROUPS groups of k, and copy v.

    A group of packed holds q_heads heads of q, and k and v at k_offset and v_offset elements after its first head of q.
    With TRANSPOSED, q, k and v are gradients and packed is written. Along the grid's second axis the programs of q come
    first.
    """
    token = tl.program_id(0)
    outer_index = token // inner
    inner_index = token % inner
    position, valid = _position(
        start, cu_seqlens, token, outer_index, inner_index, positions, length, sequences, bisections,
        context_size, context_rank, LAYOUT, CONTEXT_PARALLEL, CLAMPS,
    )  # fmt: skip
    position = position.to(tl.int64)
    base = packed + outer_index.to(tl.int64) * outer_stride + inner_index.to(tl.int64) * inner_stride
    heads = groups * q_heads
    blocks = tl.cdiv(heads, BLOCK_HEADS)
    if tl.program_id(1) < blocks:
        head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        joint = base + ((head // q_heads).to(tl.int64) * group_stride + (head % q_heads) * width)[:, None]
        apart = q + (token.to(tl.int64) * heads + head)[:, None] * width
        angle = q_angles + position * q_rotated
        if TRANSPOSED:
            source = apart
            target = joint
        else:
            source = joint
            target = apart
        _rotate_heads(
            source, target, angle, valid, head < heads, width, q_rotated, INTERLEAVED, TRANSPOSED, HAS_REST,
            BLOCK_HEADS, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip
    else:
        # The names differ from those above, because a variable of both branches must have one type.
        group = (tl.program_id(1) - blocks) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
        joint_k = base + (group.to(tl.int64) * group_stride + k_offset)[:, None]
        apart_k = k + (token.to(tl.int64) * groups + group)[:, None] * width
        angle = k_angles + position * k_rotated
        if TRANSPOSED:
            source_k = apart_k
            target_k = joint_k
        else:
            source_k = joint_k
            target_k = apart_k
        _rotate_heads(
            source_k, target_k, angle, valid, group < groups, width, k_rotated, INTERLEAVED, TRANSPOSED, HAS_REST,
            BLOCK_GROUPS, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip
        column = tl.arange(0, BLOCK_VALUES)[None, :]
        joint_v = base + (group.to(tl.int64) * group_stride + v_offset)[:, None] + column
        apart_v = v + (token.to(tl.int64) * groups + group)[:, None] * v_width + column
        inside = (group < groups)[:, None] & (column < v_width)
        if TRANSPOSED:
            tl.store(joint_v, tl.load(apart_v, mask=inside), mask=inside)
        else:
            tl.store(apart_v, tl.load(joint_v, mask=inside), mask=inside)


@triton.jit
def join_rotated_kernel(
    q,
    k,
    v,
    angles,
    packed,
    inner,
    groups,
    width,
    k_offset,
    v_offset,
    rotated,
    positions,
    length,
    outer_stride,
    inner_stride,
    group_stride,
    LAYOUT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
):
    """Write packed from the gradients of q, k and v: `rotate_packed_kernel` with its result as the last pointer."""
    rotate_packed_kernel(
        packed, angles, angles, None, None, q, k, v, inner, groups, 1, width, width, k_offset, v_offset,
        rotated, rotated, positions, length, 0, 0, outer_stride, inner_stride, group_stride, 1, 0, LAYOUT,
        INTERLEAVED, True, False, False, HAS_REST, BLOCK_HEADS, BLOCK_GROUPS, BLOCK_PAIRS, BLOCK_REST, BLOCK_VALUES,
    )  # fmt: skip


@triton.jit
def _rotate_heads(
    source,
    target,
    angle,
    valid,
    real,
    features,
    rotated,
    INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Write the heads at source [BLOCK_HEADS, 1], rotated by the angles of one token, to target."""
    element = target.dtype.element_ty
    pair = tl.arange(0, BLOCK_PAIRS)
    inside = pair < rotated // 2
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK_PAIRS)
        mask = real[:, None] & (column < rotated)[None, :]
        value = tl.load(source + column[None, :], mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(value, [BLOCK_HEADS, BLOCK_PAIRS, 2]))
        first, second = _turn(first, second, angle, valid, 2 * pair, 2 * pair + 1, inside, TRANSPOSED)
        result = tl.reshape(tl.join(first, second), [BLOCK_HEADS, 2 * BLOCK_PAIRS])
        tl.store(target + column[None, :], result.to(element), mask=mask)
    else:
        mask = real[:, None] & inside[None, :]
        far = rotated // 2 + pair
        first = tl.load(source + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + far[None, :], mask=mask, other=0.0).to(tl.float32)
        first, second = _turn(first, second, angle, valid, pair, far, inside, TRANSPOSED)
        tl.store(target + pair[None, :], first.to(element), mask=mask)
        tl.store(target + far[None, :], second.to(element), mask=mask)
    if HAS_REST:
        for first_rest in range(0, features - rotated, BLOCK_REST):
            rest = rotated + first_rest + tl.arange(0, BLOCK_REST)[None, :]
            copied = real[:, None] & (rest < features)
            tl.store(target + rest, tl.load(source + rest, mask=copied), mask=copied)


def rotate(
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    angles: tuple[int, int],
    sequences: int,
    dtype: str,
    *,
    layout: str,
    interleaved: bool,
    transposed: bool,
    context: tuple[int, int],
    clamps: bool = False,
) -> Launch:
    """(x, angles, start | None, cu_seqlens | None) -> y [outer, inner, heads, features].

    Args:
        shape: Shape of x.
        strides: Strides of x along its outer, inner and head axes, in elements.
        angles: Positions and rotated features.
        sequences: Number of packed sequences; 0 unless the layout is thd.
        dtype: Name of the dtype of x and y.
        layout: "sbhd", "bshd" or "thd".
        interleaved: Pairs are neighbouring features; otherwise half the rotated width apart.
        transposed: Apply the transpose of the rotation, for gradients.
        context: Size and rank of context parallelism.
        clamps: Positions outside of the table belong to padding and use the nearest angles; otherwise NaN.
    """
    outer, inner, heads, features = shape
    positions, rotated = angles
    pairs = triton.next_power_of_2(max(rotated // 2, 1))
    # H200: 3.8 TB/s with 4096 elements and 2 warps per program, 1.4 TB/s with 8 warps; a copy reaches 4.13 TB/s.
    block_heads = min(triton.next_power_of_2(heads), max(1, 2048 // pairs))
    rest = features - rotated
    length = outer if layout == "sbhd" else inner
    scalars = (
        inner, heads, features, rotated, positions, length, sequences, sequences.bit_length(), *strides, *context
    )  # fmt: skip
    constants = (
        layout,
        interleaved,
        transposed,
        context[0] > 1,
        clamps,
        rest > 0,
        block_heads,
        pairs,
        min(triton.next_power_of_2(max(rest, 1)), max(1, 4096 // block_heads)),
    )
    grid = (outer * inner, ceil_div(heads, block_heads), 1)
    return Launch(rotate_kernel, grid, (Output(shape, dtype),), scalars, constants, warps=2)


class _PackedBlocks(NamedTuple):
    """Block sizes of `rotate_packed_kernel`.

    Attributes:
        heads: Heads of q per program.
        groups: Heads of k and v per program.
        pairs: Power of two from the number of pairs on.
        rest: Features after the rotated ones, copied per iteration.
        values: Power of two from the width of a head of v on.
    """

    heads: int
    groups: int
    pairs: int
    rest: int
    values: int


def _packed_blocks(
    heads: int, groups: int, widths: tuple[int, int], rotated: tuple[int, int]
) -> _PackedBlocks:
    pairs = triton.next_power_of_2(max(*rotated, 2) // 2)
    values = triton.next_power_of_2(max(widths[1], 1))
    block_heads = min(triton.next_power_of_2(heads), max(1, 2048 // pairs))
    block_groups = min(triton.next_power_of_2(groups), max(1, 1024 // pairs), max(1, 2048 // values))
    rest = widths[0] - min(rotated)
    return _PackedBlocks(
        block_heads,
        block_groups,
        pairs,
        min(triton.next_power_of_2(max(rest, 1)), max(1, 4096 // block_heads)),
        values,
    )


def rotate_packed(
    tokens: tuple[int, int],
    heads: tuple[int, int],
    widths: tuple[int, int],
    strides: tuple[int, int, int],
    angles: tuple[int, int, int],
    sequences: int,
    dtype: str,
    *,
    layout: str,
    interleaved: bool,
    transposed: bool,
    context: tuple[int, int],
    clamps: bool = False,
    offsets: tuple[int, int] | None = None,
) -> Launch:
    """(packed, q_angles, k_angles, start | None, cu_seqlens | None) -> q, k, v.

    With transposed, q, k and v are inputs too (gradients), and packed is written in place.

    Args:
        tokens: Outer and inner extent.
        heads: Groups, and query heads in each group.
        widths: Elements of a head of q or k, and of v.
        strides: Strides of packed along its outer, inner and group axes, in elements.
        angles: Positions, rotated features of q, and of k.
        sequences: Number of packed sequences; 0 unless the layout is thd.
        dtype: Name of the dtype of packed, q, k and v.
        layout: "sbhd", "bshd" or "thd".
        interleaved: Pairs are neighbouring features; otherwise half the rotated width apart.
        transposed: Apply the transpose of the rotation, for gradients.
        context: Size and rank of context parallelism.
        clamps: Positions outside of the table belong to padding and use the nearest angles; otherwise NaN.
        offsets: Elements from the first head of q of a group to its k and its v; by default k and v follow q.
    """
    (outer, inner), (groups, q_heads), (width, v_width) = tokens, heads, widths
    positions, q_rotated, k_rotated = angles
    blocks = _packed_blocks(groups * q_heads, groups, widths, (q_rotated, k_rotated))
    length = outer if layout == "sbhd" else inner
    scalars = (
        inner, groups, q_heads, width, v_width, *(offsets or (q_heads * width, (q_heads + 1) * width)), q_rotated,
        k_rotated, positions, length, sequences, sequences.bit_length(), *strides, *context,
    )  # fmt: skip
    has_rest = width > min(q_rotated, k_rotated)
    constants = (layout, interleaved, transposed, context[0] > 1, clamps, has_rest, *blocks)
    grid = (outer * inner, ceil_div(groups * q_heads, blocks.heads) + ceil_div(groups, blocks.groups), 1)
    outputs = tuple(
        Output((outer, inner, count, size), dtype)
        for count, size in ((groups * q_heads, width), (groups, width), (groups, v_width))
    )
    if transposed:
        return Launch(rotate_packed_kernel, grid, (), scalars, constants, warps=2, in_place=(0,))
    return Launch(rotate_packed_kernel, grid, outputs, scalars, constants, warps=2)


def join_rotated(
    tokens: tuple[int, int],
    heads: int,
    width: int,
    angles: tuple[int, int],
    dtype: str,
    *,
    layout: str,
    interleaved: bool,
) -> Launch:
    """(dq, dk, dv, angles) -> gradient of the packed input of `rotate_packed`, [outer, inner, 3, heads * width].

    Args:
        tokens: Outer and inner extent.
        heads: Heads of q, k and v.
        width: Elements of a head.
        angles: Positions and rotated features.
        dtype: Name of the dtype of all matrices.
        layout: "sbhd" or "bshd".
        interleaved: Pairs are neighbouring features; otherwise half the rotated width apart.
    """
    (outer, inner), (positions, rotated) = tokens, angles
    blocks = _packed_blocks(heads, heads, (width, width), (rotated, rotated))
    row = heads * width
    scalars = (
        inner, heads, width, row, 2 * row, rotated, positions, outer if layout == "sbhd" else inner,
        inner * 3 * row, 3 * row, width,
    )  # fmt: skip
    grid = (outer * inner, ceil_div(heads, blocks.heads) + ceil_div(heads, blocks.groups), 1)
    return Launch(
        join_rotated_kernel,
        grid,
        (Output((outer, inner, 3, row), dtype),),
        scalars,
        (layout, interleaved, width > rotated, *blocks),
        warps=2,
    )
