"""FP8 codes of many matrices, each scaled by its own maximum, in one launch that reads memory once.

All programs run at the same time (a cooperative launch) and visit tiles in turns: program p visits the tiles p, p + P,
p + 2 P, .. of all matrices together. It measures a tile, publishes the maximum, and keeps the tile in registers. Three
turns later, all programs have measured the tile's matrix, and the program casts the tile with the matrix's scale.

A maximum is published in a slot per tile, whose initial value is negative. A program therefore finds out whether a
matrix is measured by reading its slots, without counters.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import FLOAT32_MAX, Element, ceil_div
from . import tile
from .conversion import NATIVE
from .grouped_cast import cast_codes
from .grouped_gemm import SCALE_SLOT, SLOT, matrix_base
from .launch import READ, AddressTable, Launch, Output
from .program import Program, step
from .rounding import as_float, magnitude_bits, scale_from_amax, to_codes

VALUE_FOR_INF = tl.constexpr(FLOAT32_MAX)


@triton.jit
def _load_tile(
    x,
    table,
    place,
    M,
    K,
    PARTS,
    TILES,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Load the even and the odd rows of a tile."""
    group = place // TILES
    within = place % TILES
    matrix = matrix_base(x, table, group, M.to(tl.int64) * K)
    first_m = (within % PARTS * BLOCK_M).to(tl.int64)
    first_k = (within // PARTS * BLOCK_K).to(tl.int64)
    half = tl.arange(0, BLOCK_M // 2)
    k = tl.arange(0, BLOCK_K)
    even = tile.load_rows(matrix, M, K, first_m, first_k, half * 2, k, EVEN)
    odd = tile.load_rows(matrix, M, K, first_m, first_k, half * 2 + 1, k, EVEN)
    return even, odd


@triton.jit
def held_cast_kernel(
    x,
    table,
    codes,
    codes_t,
    scale,
    slots,
    M,
    K,
    PARTS,
    TILES,
    PLACES,
    WIDTH: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Measure, hold and cast every P-th tile; each row's first entry in scale [matrices, SLOT] is written.

    Args:
        slots: Negative numbers [PLACES], which become the maxima of the tiles.
        PARTS: Tiles of a matrix along M.
        TILES: Tiles of a matrix.
        PLACES: Tiles of all matrices.
        WIDTH: Power of two, at least TILES.
    """
    maxima = slots.to(tl.pointer_type(tl.int32))
    stride = tl.num_programs(0)
    place = tl.program_id(0)
    # Triton would take variables that begin as one tensor for constants.
    element: tl.constexpr = x.dtype.element_ty
    e0 = tl.zeros((BLOCK_M // 2, BLOCK_K), element)
    o0 = tl.zeros((BLOCK_M // 2, BLOCK_K), element)
    e1 = tl.zeros((BLOCK_M // 2, BLOCK_K), element)
    o1 = tl.zeros((BLOCK_M // 2, BLOCK_K), element)
    e2 = tl.zeros((BLOCK_M // 2, BLOCK_K), element)
    o2 = tl.zeros((BLOCK_M // 2, BLOCK_K), element)
    half = tl.arange(0, BLOCK_M // 2)
    k = tl.arange(0, BLOCK_K)
    of_matrix = tl.arange(0, WIDTH)
    for _ in range(tl.cdiv(PLACES, stride) + 3):
        # A load past the last tile repeats the last tile.
        even, odd = _load_tile(
            x, table, tl.minimum(place, PLACES - 1), M, K, PARTS, TILES, BLOCK_M, BLOCK_K, EVEN
        )
        held = place - 3 * stride
        if (held >= 0) & (held < PLACES):
            group = held // TILES
            within = held % TILES
            own = maxima + group * TILES + of_matrix
            measured = tl.load(own, mask=of_matrix < TILES, other=0, volatile=True)
            while tl.min(measured, 0) < 0:
                measured = tl.load(own, mask=of_matrix < TILES, other=0, volatile=True)
            factor, decode = scale_from_amax(
                as_float(tl.max(measured, 0)), MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF
            )
            if within == 0:
                tl.store(scale + group * SLOT, decode)
            first_m = (within % PARTS * BLOCK_M).to(tl.int64)
            first_k = (within // PARTS * BLOCK_K).to(tl.int64)
            start = group.to(tl.int64) * M * K
            if codes is not None:
                narrow = to_codes(e0.to(tl.float32) * factor, codes.dtype.element_ty, CONVERSION)
                tile.store_rows(codes + start, M, K, first_m, first_k, half * 2, k, narrow, EVEN)
                narrow = to_codes(o0.to(tl.float32) * factor, codes.dtype.element_ty, CONVERSION)
                tile.store_rows(
                    codes + start, M, K, first_m, first_k, half * 2 + 1, k, narrow, EVEN
                )
            if codes_t is not None:
                pairs = to_codes(
                    tl.join(e0, o0).to(tl.float32) * factor, codes_t.dtype.element_ty, CONVERSION
                )
                tile.store_pairs_transposed(
                    codes_t + start, M, K, first_m, first_k, half, k, pairs, True, EVEN
                )
        if place < PLACES:
            largest = tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd)))
            tl.atomic_max(maxima + place, largest, sem="relaxed")
        e0 = e1
        o0 = o1
        e1 = e2
        o1 = o2
        e2 = even
        o2 = odd
        place += stride


_TILE = (128, 64, 8)  # rows, columns, warps
_PROGRAMS = 2  # per multiprocessor
_REGISTERS = 128  # per thread, so that these programs fit


def fits(shape: tuple[int, int], itemsize: int, processors: int) -> bool:
    """Whether programs can hold matrices [M, K] until they are measured.

    A tile is cast three turns after its measurement. Two turns measure all tiles of a matrix with as many tiles as
    there are programs, and the third one covers the delay of a publication.
    """
    tiles = ceil_div(shape[0], _TILE[0]) * ceil_div(shape[1], _TILE[1])
    return itemsize == 2 and tiles <= 2 * _PROGRAMS * processors


@functools.lru_cache(maxsize=1024)
def held_cast(
    shape: tuple[int, int],
    groups: int,
    element: Element,
    power_of_two: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    *,
    processors: int,
) -> Launch:
    """Launch (one of the matrices [M, K] with even M, table) -> codes, codes_t, scale [groups, 4], slots.

    codes is present if rowwise, codes_t if columnwise. The matrices must satisfy `fits`.

    Args:
        processors: Number of multiprocessors on the GPU.
    """
    block_m, block_k, warps = _TILE
    rows, depth = shape
    parts = ceil_div(rows, block_m)
    tiles = parts * ceil_div(depth, block_k)
    even = rows % block_m == 0 and depth % block_k == 0
    codes, codes_t = cast_codes(shape, groups, False, element, rowwise, columnwise)
    return Launch(
        held_cast_kernel,
        (min(_PROGRAMS * processors, tiles * groups), 1, 1),
        (
            codes,
            codes_t,
            Output((groups, SCALE_SLOT), "float32"),
            Output((groups * tiles,), "float32", begins=-1.0),
        ),
        (rows, depth, parts, tiles, tiles * groups),
        (
            triton.next_power_of_2(tiles),
            element.maximum,
            epsilon,
            power_of_two,
            block_m,
            block_k,
            even,
            NATIVE,
        ),
        warps,
        registers=_REGISTERS,
        cooperative=True,
        tables=(AddressTable(1, (READ,)),),
    )


def held_scaled(
    shape: tuple[int, int],
    groups: int,
    element: Element,
    power_of_two: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    *,
    processors: int,
) -> Program:
    """Program (x, table, layout | None, codes, codes_t, scale) with one scale per matrix, from its maximum.

    The arguments are as in `held_cast`; the caller allocates codes, codes_t and scale.
    """
    into = ("codes", "codes_t", "scale")
    launch = held_cast(
        shape, groups, element, power_of_two, epsilon, rowwise, columnwise, processors=processors
    )
    steps = (step(launch, ("x", "table"), (*into, "slots")),)
    return Program(
        ("x", "table", "layout"),
        steps,
        (),
        tuple(name for name in into if name in steps[0].outputs),
    )
