"""FP8 codes for many matrices or row groups, each scaled by its own maximum, in one launch that reads memory once.

Written in Gluon, Triton's explicit language, for Hopper (capability 9.0). All programs run at the same time (a
cooperative launch) and visit tiles in turns: program p visits the tiles p, p + P, p + 2 P, .., counted over all groups.
In turn r it starts to load tile r + 2, measures tile r, publishes the maximum, and casts tile r - 3, which is still in
shared memory. All programs have measured that tile's group by then.

A tile's maximum is published in a slot, whose initial value is negative. A program therefore finds out whether a group
is measured by reading its slots, without counters.
"""

from __future__ import annotations

import functools

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..formats import FLOAT32_MAX, Element, ceil_div
from . import rounding
from .grouped_cast import address_tables, cast_codes
from .grouped_gemm import SCALE_SLOT, SLOT
from .grouped_layout import TILE_ROWS, tiles_at_most
from .launch import Launch, Output
from .program import Program, step

TILE_M, TILE_K = TILE_ROWS, 64
ROWS, COLUMNS = gl.constexpr(TILE_M), gl.constexpr(TILE_K)
HALF = gl.constexpr(TILE_M // 2)
VALUE_FOR_INF = gl.constexpr(FLOAT32_MAX)
AHEAD = gl.constexpr(2)  # turns from a load to the measurement
BEHIND = gl.constexpr(3)  # turns from the measurement to the cast
PLACES_HELD = gl.constexpr(6)
PROGRAM_WARPS = 8
WARPS = gl.constexpr(PROGRAM_WARPS)
scale_from_amax = gluon.jit(rounding.scale_from_amax.fn)
# Triton 3.8 renamed the copy, and 3.9 removed its former name.
copy_elements = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)


@gluon.jit
def locate(layout, place, M, K, PARTS, TILES, GROUPS: gl.constexpr, BY_ROWS: gl.constexpr):
    """Locate a tile.

    The place is: group, its row count, the tile's first row and column in it, the group's first row in the codes, its
    first 128-row tile and 128-row tile count, and its first slot and slot count.
    """
    if BY_ROWS:
        tiles_k = K // COLUMNS
        group = gl.load(layout + 2 * (GROUPS + 1) + place // tiles_k)
        start = gl.load(layout + group)
        rows = gl.load(layout + group + 1) - start
        first_tile = gl.load(layout + GROUPS + 1 + group)
        tiles = gl.load(layout + GROUPS + 2 + group) - first_tile
        first_m = (place // tiles_k - first_tile) * ROWS
        first_k = place % tiles_k * COLUMNS
        slot, slots = first_tile * tiles_k, tiles * tiles_k
    else:
        group = place // TILES
        start, rows = group * M, M
        first_tile, tiles = group * PARTS, PARTS
        first_m = place % TILES % PARTS * ROWS
        first_k = place % TILES // PARTS * COLUMNS
        slot, slots = group * TILES, TILES
    return group, rows, first_m, first_k, start, first_tile, tiles, slot, slots


@gluon.jit
def start_load(
    held,
    x,
    table,
    layout,
    turn,
    place,
    PLACES,
    M,
    K,
    PARTS,
    TILES,
    GROUPS: gl.constexpr,
    BY_ROWS: gl.constexpr,
):
    """Start to load a turn's tile, if there is one, as one copy group; rows past the group's become zero."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    if place < PLACES:
        group, rows, first_m, first_k, start, _, _, _, _ = locate(
            layout, place, M, K, PARTS, TILES, GROUPS, BY_ROWS
        )
        m = gl.arange(0, ROWS, gl.SliceLayout(1, LOAD))
        k = gl.arange(0, COLUMNS, gl.SliceLayout(0, LOAD))
        matrix = x + start.to(gl.int64) * K
        if table is not None:
            address = gl.load(table + group).to(gl.pointer_type(x.dtype.element_ty))
            matrix = gl.multiple_of(address, 16)
        corner = gl.multiple_of(matrix + (first_m.to(gl.int64) * K + first_k), 16)
        places = corner + (m[:, None] * K + k[None, :])
        stage = held.index(turn % PLACES_HELD)
        if BY_ROWS:
            copy_elements(stage, places, mask=(first_m + m < rows)[:, None] & (k >= 0)[None, :])
        else:
            copy_elements(stage, places)
    async_copy.commit_group()


@gluon.jit
def cast_tile(
    values,
    codes,
    codes_t,
    factor,
    place,
    K,
    BY_ROWS: gl.constexpr,
    TILED: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """Store a tile's codes, and its transpose's codes."""
    _, rows, first_m, first_k, start, first_tile, tiles, _, _ = place
    if codes is not None:
        m = gl.arange(0, ROWS, gl.SliceLayout(1, WHOLE))
        k = gl.arange(0, COLUMNS, gl.SliceLayout(0, WHOLE))
        narrow = (values.to(gl.float32) * factor).to(codes.dtype.element_ty)
        corner = codes + ((start + first_m).to(gl.int64) * K + first_k)
        places = gl.multiple_of(corner, 16) + (m[:, None] * K + k[None, :])
        if BY_ROWS:
            gl.store(places, narrow, mask=(first_m + m < rows)[:, None] & (k >= 0)[None, :])
        else:
            gl.store(places, narrow)
    if codes_t is not None:
        # Rows 2 r and 2 r + 1 form one word, whose codes must result from one instruction; see `tile`. A thread has
        # both rows: the layout only orders its registers.
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 8, 2], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
        pairs = values.reshape([HALF, 2, COLUMNS]).permute((0, 2, 1))
        pairs = gl.convert_layout(pairs, PAIRS)
        low, high = gl.split((pairs.to(gl.float32) * factor).to(codes_t.dtype.element_ty))
        words = low.to(gl.uint8, bitcast=True).to(gl.uint16) | (
            high.to(gl.uint8, bitcast=True).to(gl.uint16) << 8
        )
        STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        half = gl.arange(0, HALF, gl.SliceLayout(0, STORE))
        k = gl.arange(0, COLUMNS, gl.SliceLayout(1, STORE))
        words_in_row = tiles * HALF
        if TILED:
            first_tile += first_m // ROWS
            first_m = 0
            words_in_row = HALF
        corner = codes_t + (first_tile.to(gl.int64) * ROWS * K + first_m)
        corner = corner.to(gl.pointer_type(gl.uint16)) + first_k.to(gl.int64) * words_in_row
        places = gl.multiple_of(corner, 16) + (k[:, None] * words_in_row + half[None, :])
        gl.store(places, gl.convert_layout(words.permute((1, 0)), STORE))


@gluon.jit
def held_cast_kernel(
    x,
    table,
    layout,
    codes,
    codes_t,
    scale,
    slots,
    PLACES,
    M,
    K,
    PARTS,
    TILES,
    GROUPS: gl.constexpr,
    BY_ROWS: gl.constexpr,
    TILED: gl.constexpr,
    WIDTH: gl.constexpr,
    MAXIMUM: gl.constexpr,
    EPSILON: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
):
    """Measure, hold and cast every P-th tile; each row's first entry in scale [GROUPS, SLOT] is written.

    Args:
        slots: Negative numbers [PLACES], which become the tiles' maxima.
        PLACES: Tile count; for row groups an upper bound, because the layout contains the count.
        PARTS: Tiles along M, for matrices.
        TILES: Tiles per matrix.
        WIDTH: Power of two, at least the tile count for each group.
    """
    WHOLE: gl.constexpr = gl.BlockedLayout([2, 8], [4, 8], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    HELD: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    held = gl.allocate_shared_memory(x.dtype.element_ty, [PLACES_HELD, ROWS, COLUMNS], HELD)
    maxima = slots.to(gl.pointer_type(gl.int32))
    stride = gl.num_programs(0)
    first = gl.program_id(0)
    if BY_ROWS:
        PLACES = gl.load(layout + 2 * GROUPS + 1) * (K // COLUMNS)
        for group in range(first, GROUPS, stride):
            if gl.load(layout + group + 1) == gl.load(layout + group):  # no row, hence no tile
                _factor, inverse = scale_from_amax(
                    (group * 0).to(gl.float32), MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF
                )
                gl.store(scale + group * SLOT, inverse)
    of_group = gl.arange(0, WIDTH, LINE)
    for turn in gl.static_range(AHEAD):
        place = first + turn * stride
        start_load(held, x, table, layout, turn, place, PLACES, M, K, PARTS, TILES, GROUPS, BY_ROWS)
    measured = gl.full([WIDTH], -1, gl.int32, LINE)
    for turn in range(gl.cdiv(PLACES, stride) + BEHIND):
        ahead = turn + AHEAD
        place = first + ahead * stride
        start_load(
            held, x, table, layout, ahead, place, PLACES, M, K, PARTS, TILES, GROUPS, BY_ROWS
        )
        async_copy.wait_group(AHEAD)
        place = first + turn * stride
        if place < PLACES:
            values = held.index(turn % PLACES_HELD).load(WHOLE)
            magnitudes = values.to(gl.float32).to(gl.int32, bitcast=True) & 0x7FFFFFFF
            gl.atomic_max(maxima + place, gl.max(gl.max(magnitudes, 1), 0), sem="relaxed")
        behind = turn - BEHIND
        cast = first + behind * stride
        if (behind >= 0) & (cast < PLACES):
            where = locate(layout, cast, M, K, PARTS, TILES, GROUPS, BY_ROWS)
            group, slot, count = where[0], where[7], where[8]
            own = maxima + slot + of_group
            inside = of_group < count
            if gl.min(measured, 0) < 0:
                while gl.min(gl.load(own, mask=inside, other=0, volatile=True), 0) < 0:
                    pass
                measured = gl.load(own, mask=inside, other=0, volatile=True)
            largest = gl.max(measured, 0).to(gl.float32, bitcast=True)
            factor, inverse = scale_from_amax(
                largest, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF
            )
            if cast == slot:
                gl.store(scale + group * SLOT, inverse)
            cast_tile(
                held.index(behind % PLACES_HELD).load(WHOLE),
                codes,
                codes_t,
                factor,
                where,
                K,
                BY_ROWS,
                TILED,
                WHOLE,
            )
        # The slots that the next turn reads; it waits unless all of them are published by now.
        following = cast + stride
        if (behind + 1 >= 0) & (following < PLACES):
            where = locate(layout, following, M, K, PARTS, TILES, GROUPS, BY_ROWS)
            own = maxima + where[7] + of_group
            measured = gl.load(own, mask=of_group < where[8], other=0, volatile=True)


_PROGRAMS = 2  # per multiprocessor
_REGISTERS = 128  # per thread, so that these programs fit


def _largest_group(processors: int) -> int:
    """Largest tile count for a group.

    A tile is cast three turns after its measurement. Two turns measure a group with twice as many tiles as there are
    programs, and the third one covers the delay before a maximum is visible.
    """
    return 2 * _PROGRAMS * processors


def fits(rows: int, depth: int, by_rows: bool, itemsize: int, processors: int) -> bool:
    """Whether programs can hold groups with at most `rows` rows, or matrices [rows, depth], until they are measured."""
    if itemsize != 2 or depth % TILE_K or (not by_rows and rows % TILE_M):
        return False
    return ceil_div(rows, TILE_M) * (depth // TILE_K) <= _largest_group(processors)


@functools.lru_cache(maxsize=1024)
def held_cast(
    shape: tuple[int, int],
    groups: int,
    by_rows: bool,
    element: Element,
    power_of_two: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    *,
    processors: int,
    tiled: bool = False,
) -> Launch:
    """Launch (x [total, K] or one of the matrices [M, K], table | None, layout | None) -> codes, codes_t, scale, slots.

    codes is present if rowwise, codes_t if columnwise; scale is [groups, 4]. All groups must satisfy `fits`.

    Args:
        processors: Number of multiprocessors on the GPU.
        tiled: codes_t are [K, 128] for every tile of 128 rows.
    """
    rows, depth = shape
    if by_rows:
        parts = tiles = 0
        places = tiles_at_most(rows, groups) * (depth // TILE_K)
        width = _largest_group(processors)
    else:
        parts = rows // TILE_M
        width = tiles = parts * (depth // TILE_K)
        places = tiles * groups
    codes, codes_t = cast_codes(shape, groups, by_rows, element, rowwise, columnwise)
    return Launch(
        held_cast_kernel,
        (min(_PROGRAMS * processors, places), 1, 1),
        (
            codes,
            codes_t,
            Output((groups, SCALE_SLOT), "float32"),
            Output((places,), "float32", begins=-1.0),
        ),
        (places, 0 if by_rows else rows, depth, parts, tiles),
        (
            groups,
            by_rows,
            tiled,
            triton.next_power_of_2(width),
            element.maximum,
            epsilon,
            power_of_two,
        ),
        PROGRAM_WARPS,
        registers=_REGISTERS,
        cooperative=True,
        tables=address_tables(by_rows),
    )


def held_scaled(
    shape: tuple[int, int],
    groups: int,
    by_rows: bool,
    element: Element,
    power_of_two: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    *,
    processors: int,
    tiled: bool = False,
) -> Program:
    """Program (x, table | None, layout | None, codes, codes_t, scale) with one scale per group, from its maximum.

    The arguments are as in `held_cast`; the caller allocates codes, codes_t and scale.
    """
    inputs, into = ("x", "table", "layout"), ("codes", "codes_t", "scale")
    launch = held_cast(
        shape,
        groups,
        by_rows,
        element,
        power_of_two,
        epsilon,
        rowwise,
        columnwise,
        processors=processors,
        tiled=tiled,
    )
    steps = (step(launch, inputs, (*into, "slots")),)
    return Program(inputs, steps, (), tuple(name for name in into if name in steps[0].outputs))
