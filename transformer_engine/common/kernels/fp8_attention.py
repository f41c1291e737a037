"""Casts around an FP8 attention with delayed scaling: codes for q, k and v in one launch; values from the output's
codes.

The delayed-scaling state is read and written in place: scale [n] and amax_history [rows, n], whose row 0 belongs to the
current step. Slots are columns in both.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import ceil_div
from . import tile
from .conversion import NATIVE
from .launch import Launch, Output
from .rounding import magnitude_bits, to_codes, to_values

# H200, 2 x 8192 tokens with 32 + 8 + 8 heads, size 128: the same as for the plain cast, see cast.py.
_BLOCK, _WARPS = 16384, 16
_SMALL_BLOCK, _SMALL_WARPS = 2048, 4


@triton.jit
def _codes_of_block(
    x, codes, block, SIZE, multiplier, amax, BLOCK: tl.constexpr, CONVERSION: tl.constexpr
):
    start = block.to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    inside = start + offsets < SIZE
    values = tl.load(x + start + offsets, mask=inside, other=0.0)
    narrow = to_codes(values.to(tl.float32) * multiplier, codes.dtype.element_ty, CONVERSION)
    tl.store(codes + start + offsets, narrow, mask=inside)
    # Compared as integers: they order like non-negative floats, with NaN as the largest.
    tl.atomic_max(
        amax.to(tl.pointer_type(tl.int32)), tl.max(magnitude_bits(values), 0), sem="relaxed"
    )


@triton.jit
def codes_of_three_kernel(
    q,
    k,
    v,
    scale,
    history,
    codes_q,
    codes_k,
    codes_v,
    descales,
    SIZE_Q,
    SIZE_K,
    SIZE_V,
    SLOT: tl.constexpr,
    SLOT_OUTPUT: tl.constexpr,
    BLOCK: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Compute codes = x * scale[SLOT] for three flat tensors; descales [8]: 1 / scale for SLOT, then for the output."""
    program = tl.program_id(0)
    multiplier = tl.load(scale + SLOT)
    blocks_q, blocks_k = tl.cdiv(SIZE_Q, BLOCK), tl.cdiv(SIZE_K, BLOCK)
    if program == 0:
        tl.store(descales, tl.div_rn(1.0, multiplier))
        tl.store(descales + 4, tl.div_rn(1.0, tl.load(scale + SLOT_OUTPUT)))
    if program < blocks_q:
        _codes_of_block(q, codes_q, program, SIZE_Q, multiplier, history + SLOT, BLOCK, CONVERSION)
    elif program < blocks_q + blocks_k:
        _codes_of_block(
            k, codes_k, program - blocks_q, SIZE_K, multiplier, history + SLOT, BLOCK, CONVERSION
        )
    else:
        _codes_of_block(
            v,
            codes_v,
            program - blocks_q - blocks_k,
            SIZE_V,
            multiplier,
            history + SLOT,
            BLOCK,
            CONVERSION,
        )


@triton.jit
def values_kernel(
    codes,
    descale,
    amaxes,
    history,
    values,
    SIZE,
    SLOT_SOFTMAX: tl.constexpr,
    SLOT_OUTPUT: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Compute values [SIZE] = codes * descale; history becomes max(history, amaxes [2]) for the output and softmax."""
    program = tl.program_id(0)
    if history is not None and program == 0:
        output, softmax = tl.load(amaxes), tl.load(amaxes + 1)
        row = history.to(tl.pointer_type(tl.int32))
        tl.atomic_max(row + SLOT_OUTPUT, output.to(tl.int32, bitcast=True), sem="relaxed")
        tl.atomic_max(row + SLOT_SOFTMAX, softmax.to(tl.int32, bitcast=True), sem="relaxed")
    start = program.to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    inside = start + offsets < SIZE
    if EVEN:
        found = tl.load(codes + start + offsets)
    else:
        found = tl.load(codes + start + offsets, mask=inside)
    found = to_values(found, CONVERSION) * tl.load(descale)
    tile.store(values + start + offsets, found.to(values.dtype.element_ty), inside, EVEN)


@functools.lru_cache(maxsize=256)
def codes_of_three(sizes: tuple[int, int, int], slots: tuple[int, int], dtype: str) -> Launch:
    """Launch (q, k, v contiguous, scale [n], history [rows, n]) -> three flat codes, descales [8].

    The launch updates `history` in place. `slots` are the slot that q, k and v share, and the output's slot. The
    inverse scales are at indices 0 and 4, because matrix products read them at multiples of 16 bytes.
    """
    block, warps = (_BLOCK, _WARPS) if sum(sizes) > 1 << 22 else (_SMALL_BLOCK, _SMALL_WARPS)
    grid = sum(ceil_div(size, block) for size in sizes)
    outputs = (*(Output((size,), dtype) for size in sizes), Output((8,), "float32"))
    return Launch(
        codes_of_three_kernel,
        (grid, 1, 1),
        outputs,
        sizes,
        (*slots, block, NATIVE),
        warps,
        in_place=(4,),
    )


@functools.lru_cache(maxsize=256)
def value_launch(size: int, slots: tuple[int, int], dtype: str) -> Launch:
    """Launch (codes [size], descale [1], amaxes [2], history [rows, n] | None) -> values [size].

    The launch updates `history` in place. `slots` are the softmax's and the output's slot.
    """
    block, warps = (8192, 8) if size > 1 << 22 else (_SMALL_BLOCK, _SMALL_WARPS)
    constants = (*slots, block, size % block == 0, NATIVE)
    grid, outputs = (ceil_div(size, block), 1, 1), (Output((size,), dtype),)
    return Launch(values_kernel, grid, outputs, (size,), constants, warps, in_place=(3,))
