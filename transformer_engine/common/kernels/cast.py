"""codes [M, K] = saturate(x * scale), codes_t [K, M] = codes.T, amax = max|x|: one float32 scale for the matrix."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..formats import FLOAT32_MAX, Element, ceil_div
from . import tile
from .launch import Launch, Output, codes_dtype
from .rounding import magnitude_bits, scale_from_amax

VALUE_FOR_INF = tl.constexpr(FLOAT32_MAX)


@triton.jit
def absolute_maximum_kernel(x, amax, SIZE, BLOCK: tl.constexpr, EVEN: tl.constexpr, TRIGGER: tl.constexpr):
    """amax = max(amax, max|x|) for x [SIZE], NaN if there is one; every program takes BLOCK elements."""
    if TRIGGER:
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    values = tile.load(x + start + offsets, start + offsets < SIZE, EVEN)
    _record(amax, tl.max(magnitude_bits(values), 0))


@triton.jit
def _record(amax, bits):
    # As integers: the order of non-negative floats, with NaN on top.
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def _scale_of(
    program, scale, amax, scale_inv, MAXIMUM: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    """The scale, given or made from amax; program 0 stores its inverse."""
    if scale is not None:
        multiplier = tl.load(scale)
        decode = tl.div_rn(1.0, multiplier)
    else:
        multiplier, decode = scale_from_amax(tl.load(amax), MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
    if program == 0:
        tl.store(scale_inv, decode)
    return multiplier


@triton.jit
def cast_kernel(
    x,
    scale,
    amax,
    codes,
    codes_t,
    scale_inv,
    SIZE,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    RECORD: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """codes [SIZE] of x [SIZE]: without codes_t the matrix's shape does not matter."""
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    start = program.to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    inside = start + offsets < SIZE
    values = tile.load(x + start + offsets, inside, EVEN)
    if DEPENDENT:
        gdc_wait()
    multiplier = _scale_of(program, scale, amax, scale_inv, MAXIMUM, EPSILON, POWER_OF_TWO)
    narrow = (values.to(tl.float32) * multiplier).to(codes.dtype.element_ty)
    tile.store(codes + start + offsets, narrow, inside, EVEN)
    if RECORD:
        _record(amax, tl.max(magnitude_bits(values), 0))


@triton.jit
def cast_transpose_kernel(
    x,
    scale,
    amax,
    codes,
    codes_t,
    scale_inv,
    M,
    K,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    RECORD: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """codes [M, K] (unless None) and codes_t [K, M] of x [M, K], a tile a program."""
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    tile_m, tile_k = tile.position(program, tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K), BAND)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    first_m = (tile_m * BLOCK_M).to(tl.int64)
    first_k = (tile_k * BLOCK_K).to(tl.int64)
    inside = (first_m + m < M)[:, None] & (first_k + k < K)[None, :]
    corner = first_m * K + first_k
    offsets = m[:, None] * K + k[None, :]
    values = tile.load(x + corner + offsets, inside, EVEN)
    if DEPENDENT:
        gdc_wait()
    multiplier = _scale_of(program, scale, amax, scale_inv, MAXIMUM, EPSILON, POWER_OF_TWO)
    narrow = (values.to(tl.float32) * multiplier).to(codes_t.dtype.element_ty)
    if codes is not None:
        tile.store(codes + corner + offsets, narrow, inside, EVEN)
    corner = first_k * M + first_m
    tile.store(codes_t + corner + (k[:, None] * M + m[None, :]), tl.trans(narrow), tl.trans(inside), EVEN)
    if RECORD:
        _record(amax, tl.max(magnitude_bits(values)))


@functools.lru_cache(maxsize=None)
def absolute_maximum(size: int) -> Launch:
    """Inputs: x, any shape of size elements, contiguous; outputs: amax float32 [1], which must hold 0 or more."""
    block, warps = _block(size)
    return Launch(
        absolute_maximum_kernel,
        grid=(ceil_div(size, block), 1, 1),
        outputs=(),
        scalars=(size,),
        constants=(block, size % block == 0, False),
        warps=warps,
    )


@functools.lru_cache(maxsize=None)
def cast(
    shape: tuple[int, int],
    element: Element,
    rowwise: bool,
    columnwise: bool,
    *,
    records: bool = False,
    power_of_two: bool = False,
    epsilon: float = 0.0,
) -> Launch:
    """Inputs: x [M, K] contiguous, scale [1] or None, amax float32 [1]; outputs: codes, codes_t, scale_inv [1].

    Without scale it is made from amax. records: amax = max(amax, max|x|) instead.
    """
    rows, depth = shape
    dtype = codes_dtype(element)
    outputs = (
        Output((rows, depth), dtype) if rowwise else None,
        Output((depth, rows), dtype) if columnwise else None,
        Output((1,), "float32"),
    )
    # A pass that follows the amax pass starts where that one ended: the end of x is still in the L2.
    steps = (element.maximum, epsilon, power_of_two, records, not records)
    if not columnwise:
        size = rows * depth
        block, warps = _block(size)
        grid, scalars, tiles = ceil_div(size, block), (size,), (block, size % block == 0)
        kernel = cast_kernel
    else:
        block_m, block_k, warps = _tile(rows, depth)
        grid, scalars = ceil_div(rows, block_m) * ceil_div(depth, block_k), (rows, depth)
        tiles = (block_m, block_k, 1, rows % block_m == 0 and depth % block_k == 0)
        kernel = cast_transpose_kernel
    return Launch(kernel, (grid, 1, 1), outputs, scalars, (*steps, *tiles, False), warps)


def _block(size: int) -> tuple[int, int]:
    """(elements, warps) of a program over a flat tensor."""
    # H200, 8192 x 14336 bfloat16 to e4m3: 8192 elements and 8 warps 0.0866 ms, 4096 0.094, 2048 0.124, 32768 0.0906.
    # The amax pass over the same: 0.0645, 0.0717, 0.0946.
    return (8192, 8) if size > 1 << 20 else (2048, 4)


def _tile(rows: int, depth: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program that also writes the transpose."""
    # H200, 8192 x 14336 bfloat16 to e4m3: 256 x 64 with 8 warps 0.1237 ms, 128 x 64 with 4 0.1246, 64 x 64 0.1275.
    return (256, 64, 8) if rows * depth > 1 << 22 else (64, 64, 4)
