"""Rotary position embedding for packed q, k and v: q and k rotated and v copied in one pass, and its gradient.

Packed is [outer, inner, ...] with the axes, angles and arithmetic in `rope`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch, Output
from .rope import rotate_heads, rotations, token_position


@triton.jit
def rotate_packed_kernel(
    q_angles,
    k_angles,
    start,
    cu_seqlens,
    source,
    q,
    k,
    v,
    gradient,
    inner,
    heads,
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
    q_stride,
    k_stride,
    v_stride,
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
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
):
    """Rotate BLOCK_HEADS q heads for one token, or BLOCK_GROUPS k groups, and copy v.

    The packed operand is source, or with TRANSPOSED gradient, which is written from the gradients q, k and v. Runs of
    q_heads q heads begin every q_stride elements; the k and v of group i are i times k_stride and v_stride elements
    after k_offset and v_offset. Along the grid's second axis the q programs come first.
    """
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
    position = position.to(tl.int64)
    if TRANSPOSED:
        packed = gradient
    else:
        packed = source
    base = (
        packed + outer_index.to(tl.int64) * outer_stride + inner_index.to(tl.int64) * inner_stride
    )
    blocks = tl.cdiv(heads, BLOCK_HEADS)
    of_q = tl.program_id(1) < blocks
    # Before the branch, which would contain the code of cosines and sines twice.
    rotated = tl.where(of_q, q_rotated, k_rotated)
    angle = tl.where(of_q, q_angles, k_angles) + position * rotated
    first_cosine, first_sine, second_cosine, second_sine = rotations(
        angle, valid, rotated, INTERLEAVED, BLOCK_PAIRS, EQUAL
    )
    if of_q:
        head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        joint = (
            base + ((head // q_heads).to(tl.int64) * q_stride + (head % q_heads) * width)[:, None]
        )
        apart = q + (token.to(tl.int64) * heads + head)[:, None] * width
        if TRANSPOSED:
            source_q = apart
            target_q = joint
        else:
            source_q = joint
            target_q = apart
        rotate_heads(
            source_q,
            target_q,
            first_cosine,
            first_sine,
            second_cosine,
            second_sine,
            head < heads,
            width,
            q_rotated,
            INTERLEAVED,
            TRANSPOSED,
            HAS_REST,
            BLOCK_HEADS,
            BLOCK_PAIRS,
            BLOCK_REST,
        )
    else:
        # The names differ from those above, because a variable in both branches must have one type.
        group = (tl.program_id(1) - blocks) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
        joint_k = base + (group.to(tl.int64) * k_stride + k_offset)[:, None]
        apart_k = k + (token.to(tl.int64) * groups + group)[:, None] * width
        if TRANSPOSED:
            source_k = apart_k
            target_k = joint_k
        else:
            source_k = joint_k
            target_k = apart_k
        rotate_heads(
            source_k,
            target_k,
            first_cosine,
            first_sine,
            second_cosine,
            second_sine,
            group < groups,
            width,
            k_rotated,
            INTERLEAVED,
            TRANSPOSED,
            HAS_REST,
            BLOCK_GROUPS,
            BLOCK_PAIRS,
            BLOCK_REST,
        )
        column = tl.arange(0, BLOCK_VALUES)[None, :]
        joint_v = base + (group.to(tl.int64) * v_stride + v_offset)[:, None] + column
        apart_v = v + (token.to(tl.int64) * groups + group)[:, None] * v_width + column
        inside = (group < groups)[:, None] & (column < v_width)
        if TRANSPOSED:
            tl.store(joint_v, tl.load(apart_v, mask=inside), mask=inside)
        else:
            tl.store(apart_v, tl.load(joint_v, mask=inside), mask=inside)


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
    separate: bool = False,
    equal_angles: bool = False,
) -> Launch:
    """(q_angles, k_angles, start | None, cu_seqlens | None, packed) -> q, k, v, None.

    With transposed, (q_angles, k_angles, start | None, cu_seqlens | None, None, dq, dk, dv) -> gradient of packed,
    contiguous [outer, inner, groups * (q_heads * width + width + v_width)].

    Args:
        tokens: Outer and inner extent.
        heads: Groups, and query heads in each group.
        widths: Elements per q or k head, and per v head.
        strides: Strides of packed, or of its gradient, along its outer, inner and group axes, in elements; with
            `separate`, the last one has no meaning.
        angles: Positions, rotated q features, and rotated k features.
        sequences: Number of packed sequences; 0 unless the layout is thd.
        dtype: Dtype name for packed, q, k and v.
        layout: "sbhd", "bshd" or "thd".
        interleaved: Pairs are neighbouring features; otherwise half the rotated width apart.
        transposed: Apply the transposed rotation, for gradients.
        context: Context-parallel size and rank.
        clamps: Positions outside the table belong to padding and use the nearest angles; otherwise NaN.
        separate: All q heads come first, then all k, then all v. By default, each group's q heads, k and v are
            adjacent.
        equal_angles: Both features of every pair have the same angle, which halves the kernel's code.
    """
    (outer, inner), (groups, q_heads), (width, v_width) = tokens, heads, widths
    every = groups * q_heads
    if separate:
        run, offsets, head_strides = (
            every,
            (every * width, (every + groups) * width),
            (0, width, v_width),
        )
    else:
        run, offsets, head_strides = (
            q_heads,
            (q_heads * width, (q_heads + 1) * width),
            (strides[2],) * 3,
        )
    positions, q_rotated, k_rotated = angles
    pairs = triton.next_power_of_2(max(q_rotated, k_rotated, 2) // 2)
    values = triton.next_power_of_2(max(v_width, 1))
    block_heads = min(triton.next_power_of_2(every), max(1, 2048 // pairs))
    block_groups = min(
        triton.next_power_of_2(groups), max(1, 1024 // pairs), max(1, 2048 // values)
    )
    rest = width - min(q_rotated, k_rotated)
    block_rest = min(triton.next_power_of_2(max(rest, 1)), max(1, 4096 // block_heads))
    length = outer if layout == "sbhd" else inner
    scalars = (
        inner,
        every,
        groups,
        run,
        width,
        v_width,
        *offsets,
        q_rotated,
        k_rotated,
        positions,
        length,
        sequences,
        sequences.bit_length(),
        *strides[:2],
        *head_strides,
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
        block_groups,
        pairs,
        block_rest,
        values,
    )
    grid = (outer * inner, ceil_div(every, block_heads) + ceil_div(groups, block_groups), 1)
    if transposed:
        row = groups * (q_heads * width + width + v_width)
        outputs: tuple[Output | None, ...] = (Output((outer, inner, row), dtype),)
    else:
        sizes = ((every, width), (groups, width), (groups, v_width))
        outputs = (*(Output((outer, inner, *size), dtype) for size in sizes), None)
    return Launch(rotate_packed_kernel, grid, outputs, scalars, constants, warps=2)
