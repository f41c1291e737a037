"""Rotary position embedding y = x * cos(a) + pair(x) * sin(a), and its transpose dx = dy * cos(a) - pair(dy * sin(a)).

x is [outer, inner, heads, features], where outer and inner are s and b (sbhd), b and s (bshd), or t and 1 (thd). y is
contiguous. pair(x) is (-x2, x1) for each pair of features (x1, x2), which are neighbours if interleaved and otherwise
half the rotated width apart. angles is float32 [positions, rotated], contiguous. Features after the rotated ones are
copied. The arithmetic is float32.

`rope_packed` rotates packed q, k and v with the same functions of positions and heads.
"""

from __future__ import annotations

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
def token_position(
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
def rotations(
    angle, valid, rotated, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr, EQUAL: tl.constexpr
):
    """Return cosines and sines of the angles of both features of every pair, [BLOCK_PAIRS] each; NaN unless valid.

    With EQUAL, both features of a pair have the same angle, whose functions are computed once.
    """
    pair = tl.arange(0, BLOCK_PAIRS)
    inside = pair < rotated // 2
    if INTERLEAVED:
        first_column = 2 * pair
        second_column = 2 * pair + 1
    else:
        first_column = pair
        second_column = rotated // 2 + pair
    first_angle = tl.where(
        valid, tl.load(angle + first_column, mask=inside, other=0.0), float("nan")
    )
    cosine, sine = tl.cos(first_angle), tl.sin(first_angle)
    if EQUAL:
        return cosine, sine, cosine, sine
    second_angle = tl.where(
        valid, tl.load(angle + second_column, mask=inside, other=0.0), float("nan")
    )
    return cosine, sine, tl.cos(second_angle), tl.sin(second_angle)


@triton.jit
def _turn(
    first, second, first_cosine, first_sine, second_cosine, second_sine, TRANSPOSED: tl.constexpr
):
    """Return both features of every pair, rotated; one product of each sum is rounded, the same in every kernel.

    A compiler that contracts products and sums by itself rounds one product in one kernel, the other in another.
    """
    first_cosine, first_sine = first_cosine[None, :], first_sine[None, :]
    second_cosine, second_sine = second_cosine[None, :], second_sine[None, :]
    if TRANSPOSED:
        return (
            tl.fma(first, first_cosine, second * second_sine),
            tl.fma(second, second_cosine, first * -first_sine),
        )
    else:
        return (
            tl.fma(first, first_cosine, second * -first_sine),
            tl.fma(second, second_cosine, first * second_sine),
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
    EQUAL: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate BLOCK_HEADS heads of one token; one program per token and block of heads."""
    token = tl.program_id(0)
    outer_index = token // inner
    inner_index = token % inner
    position, valid = token_position(
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
        LAYOUT,
        CONTEXT_PARALLEL,
        CLAMPS,
    )

    angle = angles + position.to(tl.int64) * rotated
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    source = x + outer_index.to(tl.int64) * outer_stride + inner_index.to(tl.int64) * inner_stride
    source += head.to(tl.int64)[:, None] * head_stride
    target = y + token.to(tl.int64) * heads * features + head.to(tl.int64)[:, None] * features
    # Loaded before the cosines, which contain branches that no load is moved across: 3 % of the time on an H200.
    first, second = _load_pairs(
        source, head < heads, rotated, INTERLEAVED, BLOCK_HEADS, BLOCK_PAIRS
    )
    first_cosine, first_sine, second_cosine, second_sine = rotations(
        angle, valid, rotated, INTERLEAVED, BLOCK_PAIRS, EQUAL
    )
    first, second = _turn(
        first, second, first_cosine, first_sine, second_cosine, second_sine, TRANSPOSED
    )
    _store_heads(
        first,
        second,
        source,
        target,
        head < heads,
        features,
        rotated,
        INTERLEAVED,
        HAS_REST,
        BLOCK_HEADS,
        BLOCK_PAIRS,
        BLOCK_REST,
    )


@triton.jit
def rotate_heads(
    source,
    target,
    first_cosine,
    first_sine,
    second_cosine,
    second_sine,
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
    """Write the heads at source [BLOCK_HEADS, 1] to target, rotated by the `rotations` of one token."""
    first, second = _load_pairs(source, real, rotated, INTERLEAVED, BLOCK_HEADS, BLOCK_PAIRS)
    first, second = _turn(
        first, second, first_cosine, first_sine, second_cosine, second_sine, TRANSPOSED
    )
    _store_heads(
        first,
        second,
        source,
        target,
        real,
        features,
        rotated,
        INTERLEAVED,
        HAS_REST,
        BLOCK_HEADS,
        BLOCK_PAIRS,
        BLOCK_REST,
    )


@triton.jit
def _load_pairs(
    source,
    real,
    rotated,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Load both features of every pair in float32, [BLOCK_HEADS, BLOCK_PAIRS] each."""
    pair = tl.arange(0, BLOCK_PAIRS)
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK_PAIRS)
        mask = real[:, None] & (column < rotated)[None, :]
        value = tl.load(source + column[None, :], mask=mask, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(value, [BLOCK_HEADS, BLOCK_PAIRS, 2]))
    else:
        mask = real[:, None] & (pair < rotated // 2)[None, :]
        far = rotated // 2 + pair
        first = tl.load(source + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + far[None, :], mask=mask, other=0.0).to(tl.float32)
        return first, second


@triton.jit
def _store_heads(
    first,
    second,
    source,
    target,
    real,
    features,
    rotated,
    INTERLEAVED: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Store rotated pairs, and copy the features that are not rotated."""
    element = target.dtype.element_ty
    pair = tl.arange(0, BLOCK_PAIRS)
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK_PAIRS)
        mask = real[:, None] & (column < rotated)[None, :]
        result = tl.reshape(tl.join(first, second), [BLOCK_HEADS, 2 * BLOCK_PAIRS])
        tl.store(target + column[None, :], result.to(element), mask=mask)
    else:
        mask = real[:, None] & (pair < rotated // 2)[None, :]
        far = rotated // 2 + pair
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
    equal_angles: bool = False,
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
        equal_angles: Both features of every pair have the same angle, which halves the kernel's code.
    """
    outer, inner, heads, features = shape
    positions, rotated = angles
    pairs = triton.next_power_of_2(max(rotated // 2, 1))
    # H200: 3.8 TB/s with 4096 elements and 2 warps per program, 1.4 TB/s with 8 warps; a copy reaches 4.13 TB/s.
    block_heads = min(triton.next_power_of_2(heads), max(1, 2048 // pairs))
    rest = features - rotated
    length = outer if layout == "sbhd" else inner
    scalars = (
        inner,
        heads,
        features,
        rotated,
        positions,
        length,
        sequences,
        sequences.bit_length(),
        *strides,
        *context,
    )
    constants = (
        layout,
        interleaved,
        transposed,
        context[0] > 1,
        clamps,
        rest > 0,
        equal_angles,
        block_heads,
        pairs,
        min(triton.next_power_of_2(max(rest, 1)), max(1, 4096 // block_heads)),
    )
    grid = (outer * inner, ceil_div(heads, block_heads), 1)
    return Launch(rotate_kernel, grid, (Output(shape, dtype),), scalars, constants, warps=2)
