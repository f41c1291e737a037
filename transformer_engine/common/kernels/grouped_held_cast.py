"""FP8 codes of many matrices, each scaled by its own maximum, in one launch that reads memory once.

Written in Gluon, Triton's explicit language, for Hopper (capability 9.0). All programs run at the same time (a
cooperative launch) and visit tiles in turns: program p visits the tiles p, p + P, p + 2 P, .. of all matrices together.
In turn r it starts to load the tile of turn r + 2, measures the tile of turn r and publishes its maximum, and casts the
tile of turn r - 3, which shared memory holds. All programs have measured that tile's matrix by then.

A maximum is published in a slot per tile, whose initial value is negative. A program therefore finds out whether a
matrix is measured by reading its slots, without counters.
"""

from __future__ import annotations

import functools

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..formats import FLOAT32_MAX, Element
from . import rounding
from .grouped_cast import cast_codes
from .grouped_gemm import SCALE_SLOT, SLOT
from .launch import READ, AddressTable, Launch, Output
from .program import Program, step

TILE_M, TILE_K = 128, 64
ROWS, COLUMNS = gl.constexpr(TILE_M), gl.constexpr(TILE_K)
HALF = gl.constexpr(TILE_M // 2)
VALUE_FOR_INF = gl.constexpr(FLOAT32_MAX)
AHEAD = gl.constexpr(2)  # turns between the begin of a load and the measurement
BEHIND = gl.constexpr(3)  # turns between the measurement and the cast
PLACES_HELD = gl.constexpr(6)
PROGRAM_WARPS = 8
WARPS = gl.constexpr(PROGRAM_WARPS)
scale_from_amax = gluon.jit(rounding.scale_from_amax.fn)


@gluon.jit
def start_load(held, x, table, turn, place, PLACES, M, K, PARTS, TILES):
    """Start to load the tile of a turn, if there is one, as a group of copies."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    if place < PLACES:
        group = place // TILES
        within = place % TILES
        matrix = x + group.to(gl.int64) * M * K
        if table is not None:
            address = gl.load(table + group).to(gl.pointer_type(x.dtype.element_ty))
            matrix = gl.multiple_of(address, 16)
        m = gl.arange(0, ROWS, gl.SliceLayout(1, LOAD))
        k = gl.arange(0, COLUMNS, gl.SliceLayout(0, LOAD))
        corner = (within % PARTS * ROWS).to(gl.int64) * K + within // PARTS * COLUMNS
        async_copy.async_copy_global_to_shared(
            held.index(turn % PLACES_HELD), matrix + corner + (m[:, None] * K + k[None, :])
        )
    async_copy.commit_group()


@gluon.jit
def cast_tile(
    values,
    codes,
    codes_t,
    factor,
    start,
    first_m,
    first_k,
    M,
    K,
    WHOLE: gl.constexpr,
):
    """Store the codes of a tile and of its transpose."""
    if codes is not None:
        m = gl.arange(0, ROWS, gl.SliceLayout(1, WHOLE))
        k = gl.arange(0, COLUMNS, gl.SliceLayout(0, WHOLE))
        narrow = (values.to(gl.float32) * factor).to(codes.dtype.element_ty)
        corner = codes + (start + first_m * K + first_k)
        gl.store(corner + (m[:, None] * K + k[None, :]), narrow)
    if codes_t is not None:
        # Rows 2 r and 2 r + 1 form one word; see `tile`.
        pairs = values.reshape([HALF, 2, COLUMNS]).permute((0, 2, 1))
        low, high = gl.split((pairs.to(gl.float32) * factor).to(codes_t.dtype.element_ty))
        words = low.to(gl.uint8, bitcast=True).to(gl.uint16) | (
            high.to(gl.uint8, bitcast=True).to(gl.uint16) << 8
        )
        STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        half = gl.arange(0, HALF, gl.SliceLayout(0, STORE))
        k = gl.arange(0, COLUMNS, gl.SliceLayout(1, STORE))
        corner = (codes_t + (start + first_k * M + first_m)).to(gl.pointer_type(gl.uint16))
        places = gl.multiple_of(corner, 16) + (k[:, None] * (M // 2) + half[None, :])
        gl.store(places, gl.convert_layout(words.permute((1, 0)), STORE))


@gluon.jit
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
    WIDTH: gl.constexpr,
    MAXIMUM: gl.constexpr,
    EPSILON: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
):
    """Measure, hold and cast every P-th tile; each row's first entry in scale [matrices, SLOT] is written.

    Args:
        slots: Negative numbers [PLACES], which become the maxima of the tiles.
        PARTS: Tiles of a matrix along M.
        TILES: Tiles of a matrix.
        PLACES: Tiles of all matrices.
        WIDTH: Power of two, at least TILES.
    """
    WHOLE: gl.constexpr = gl.BlockedLayout([2, 8], [4, 8], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    HELD: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    held = gl.allocate_shared_memory(x.dtype.element_ty, [PLACES_HELD, ROWS, COLUMNS], HELD)
    maxima = slots.to(gl.pointer_type(gl.int32))
    stride = gl.num_programs(0)
    first = gl.program_id(0)
    of_matrix = gl.arange(0, WIDTH, LINE)
    for turn in gl.static_range(AHEAD):
        start_load(held, x, table, turn, first + turn * stride, PLACES, M, K, PARTS, TILES)
    measured = gl.full([WIDTH], -1, gl.int32, LINE)
    for turn in range(gl.cdiv(PLACES, stride) + BEHIND):
        ahead = turn + AHEAD
        start_load(held, x, table, ahead, first + ahead * stride, PLACES, M, K, PARTS, TILES)
        async_copy.wait_group(AHEAD)
        place = first + turn * stride
        if place < PLACES:
            values = held.index(turn % PLACES_HELD).load(WHOLE)
            magnitudes = values.to(gl.float32).to(gl.int32, bitcast=True) & 0x7FFFFFFF
            gl.atomic_max(maxima + place, gl.max(gl.max(magnitudes, 1), 0), sem="relaxed")
        behind = turn - BEHIND
        cast = first + behind * stride
        if (behind >= 0) & (cast < PLACES):
            group = cast // TILES
            within = cast % TILES
            own = maxima + group * TILES + of_matrix
            while gl.min(measured, 0) < 0:
                measured = gl.load(own, mask=of_matrix < TILES, other=0, volatile=True)
            largest = gl.max(measured, 0).to(gl.float32, bitcast=True)
            factor, decode = scale_from_amax(largest, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
            if within == 0:
                gl.store(scale + group * SLOT, decode)
            cast_tile(
                held.index(behind % PLACES_HELD).load(WHOLE),
                codes,
                codes_t,
                factor,
                group.to(gl.int64) * M * K,
                (within % PARTS * ROWS).to(gl.int64),
                (within // PARTS * COLUMNS).to(gl.int64),
                M,
                K,
                WHOLE,
            )
        # The slots that the next turn reads, if all of them are published by now.
        following = cast + stride
        known = (behind + 1 >= 0) & (following < PLACES)
        own = maxima + gl.maximum(following, 0) // TILES * TILES + of_matrix
        measured = gl.load(own, mask=(of_matrix < TILES) & known, other=0, volatile=True)


_PROGRAMS = 2  # per multiprocessor
_REGISTERS = 128  # per thread, so that these programs fit


def fits(shape: tuple[int, int], itemsize: int, processors: int) -> bool:
    """Whether programs can hold matrices [M, K] until they are measured.

    A tile is cast three turns after its measurement. Two turns measure all tiles of a matrix with twice as many tiles
    as there are programs, and the third one covers the delay of a publication.
    """
    rows, depth = shape
    if itemsize != 2 or rows % TILE_M or depth % TILE_K:
        return False
    return rows // TILE_M * (depth // TILE_K) <= 2 * _PROGRAMS * processors


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
    """Launch (one of the matrices [M, K], table) -> codes, codes_t, scale [groups, 4], slots.

    codes is present if rowwise, codes_t if columnwise. The matrices must satisfy `fits`.

    Args:
        processors: Number of multiprocessors on the GPU.
    """
    rows, depth = shape
    parts = rows // TILE_M
    tiles = parts * (depth // TILE_K)
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
        (triton.next_power_of_2(tiles), element.maximum, epsilon, power_of_two),
        PROGRAM_WARPS,
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
