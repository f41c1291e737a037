"""FP8 codes of many matrices, each scaled by its own maximum, in one launch that reads memory once.

A tile is visited by two programs: one measures it, and a later one casts it with the scale of its group. The casts of a
group come `lag` groups after its measurements, so that the second read finds the values in the L2 cache (50 MB on an
H200). Two launches would read all groups from memory twice.

A program takes the next number from a counter when it starts. A casting program waits until all tiles of its group are
measured. Programs with lower numbers measure them: these have started and never wait, so that the wait always ends.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import FLOAT32_MAX, Element
from . import tile
from .conversion import NATIVE
from .grouped_cast import address_tables, cast_codes, cast_grid, locate_program, store_transposed
from .grouped_gemm import SCALE_SLOT, SLOT
from .grouped_layout import TILE_ROWS
from .launch import Launch, Output
from .program import Program, step
from .rounding import as_float, magnitude_bits, scale_from_amax, to_codes

VALUE_FOR_INF = tl.constexpr(FLOAT32_MAX)


@triton.jit
def _place_of_rows(layout, place, GROUPS: tl.constexpr, COUNT: tl.constexpr, LAG: tl.constexpr):
    """Get (group, tile, whether it is measured) for a place in the order of tiles; GROUPS after the last place.

    M_g are the tiles of group g to measure, C_g the same tiles to cast. With LAG = 1 the order is M_0, M_1, C_0, M_2,
    C_1, .., M_last, C_last-1, C_last. COUNT is a power of two, at least GROUPS.
    """
    group = tl.arange(0, COUNT)
    # Entry g is the tile count of all groups before group g.
    ends = layout + GROUPS + 1
    before = tl.load(ends + tl.minimum(group, GROUPS))
    tiles = tl.load(ends + tl.minimum(group + 1, GROUPS)) - before
    # Before M_g come the measurements of all earlier groups, and the casts of those before g - LAG.
    of_measured = before + tl.load(ends + tl.minimum(tl.maximum(group - LAG, 0), GROUPS))
    of_cast = before + tl.load(ends + tl.minimum(group + LAG + 1, GROUPS))
    measured = (place >= of_measured) & (place < of_measured + tiles)
    casts = (place >= of_cast) & (place < of_cast + tiles)
    within = before + place - tl.where(measured, of_measured, of_cast)
    found = measured | casts
    exists = tl.max(found.to(tl.int32), 0) > 0
    number = tl.where(exists, tl.sum(tl.where(found, group, 0), 0), GROUPS)
    number = tl.minimum(tl.maximum(number, 0), GROUPS)  # for the analysis of offsets
    return number, tl.sum(tl.where(found, within, 0), 0), tl.max(measured.to(tl.int32), 0) > 0


@triton.jit
def _place_of_matrices(place, parts, GROUPS: tl.constexpr, LAG: tl.constexpr):
    """Get the same for matrices, which have `parts` tiles each; see `_place_of_rows`."""
    block = place // parts
    # M_0 .. M_LAG - 1; then M_g and C_g - LAG in turns; then the last LAG casts.
    turns = block - LAG
    middle = (turns >= 0) & (turns < 2 * (GROUPS - LAG))
    measured = (turns < 0) | (middle & (turns % 2 == 0))
    group = tl.where(
        turns < 0, block, tl.where(middle, turns // 2 + tl.where(measured, LAG, 0), block - GROUPS)
    )
    group = tl.minimum(tl.maximum(group, 0), GROUPS)  # for the analysis of offsets
    return group, group * parts + place % parts, measured


@triton.jit
def measured_cast_kernel(
    x, table, layout, codes, codes_t, scale, state, M, K, TILES_K, GROUPS: tl.constexpr, BY_ROWS: tl.constexpr,
    MAXIMUM: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_TWO: tl.constexpr, COUNT: tl.constexpr,
    LAG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TILED: tl.constexpr,
    CONVERSION: tl.constexpr,
):  # fmt: skip
    """Measure or cast one tile; each row's first entry in scale [GROUPS, SLOT] is written.

    state, zeros [2 GROUPS + 1], holds the maximum of every group, the number of its measured tiles, and the number of
    programs that have started.
    """
    amax = state.to(tl.pointer_type(tl.int32))
    done = amax + GROUPS
    started = tl.atomic_add(done + GROUPS, 1, sem="relaxed")
    # Equal to `started`; the limits are for the analysis of offsets.
    program = tl.minimum(tl.maximum(started, 0), tl.num_programs(0) - 1)
    place = program // TILES_K
    parts = tl.cdiv(M, BLOCK_M)
    if BY_ROWS:
        if program < GROUPS:  # noqa: SIM102  # Triton evaluates both operands of `and`
            if tl.load(layout + program + 1) == tl.load(layout + program):  # no row, hence no tile
                _factor, inverse = scale_from_amax(
                    as_float(program * 0), MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF
                )
                tl.store(scale + program * SLOT, inverse)
        group, position, measures = _place_of_rows(layout, place, GROUPS, COUNT, LAG)
        position = tl.minimum(tl.maximum(position, 0), tl.num_programs(0) // 2 // TILES_K)  # as above
    else:
        group, position, measures = _place_of_matrices(place, parts, GROUPS, LAG)
    if group < GROUPS:
        _owner, matrix, rows, first_m, tile_k, start, first_tile, tiles = locate_program(
            position * TILES_K + program % TILES_K, x, table, layout, M, K, TILES_K, GROUPS, BY_ROWS, BLOCK_M
        )
        first_k = (tile_k * BLOCK_K).to(tl.int64)
        half = tl.arange(0, BLOCK_M // 2)
        k = tl.arange(0, BLOCK_K)
        even = tile.load_rows(matrix, rows, K, first_m, first_k, half * 2, k, EVEN and not BY_ROWS)
        odd = tile.load_rows(matrix, rows, K, first_m, first_k, half * 2 + 1, k, EVEN and not BY_ROWS)
        if measures:
            bits = tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd)))
            tl.atomic_max(amax + group, bits, sem="relaxed")
            tl.atomic_add(done + group, 1, sem="release")
        else:
            expected = (tiles if BY_ROWS else parts) * TILES_K
            while tl.atomic_add(done + group, 0, sem="acquire") < expected:
                pass
            largest = as_float(tl.atomic_max(amax + group, 0, sem="relaxed"))
            factor, decode = scale_from_amax(largest, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
            if first_m + first_k == 0:
                tl.store(scale + group * SLOT, decode)
            if codes is not None:
                pointer = codes + start * K
                narrow = to_codes(even.to(tl.float32) * factor, codes.dtype.element_ty, CONVERSION)
                tile.store_rows(pointer, rows, K, first_m, first_k, half * 2, k, narrow, EVEN and not BY_ROWS)
                narrow = to_codes(odd.to(tl.float32) * factor, codes.dtype.element_ty, CONVERSION)
                tile.store_rows(
                    pointer, rows, K, first_m, first_k, half * 2 + 1, k, narrow, EVEN and not BY_ROWS
                )
            if codes_t is not None:
                pairs = to_codes(
                    tl.join(even, odd).to(tl.float32) * factor, codes_t.dtype.element_ty, CONVERSION
                )
                store_transposed(
                    codes_t, pairs, rows, K, first_m, first_k, half, k, start, first_tile, tiles, BY_ROWS, EVEN, TILED
                )  # fmt: skip


_TILE = (128, 64, 8)  # rows, columns, warps
# Bytes between the first and the second read of a value. As many bytes of codes are written between them.
_WINDOW = 12 << 20


@functools.lru_cache(maxsize=1024)
def measured_cast(
    shape: tuple[int, int], groups: int, by_rows: bool, element: Element, power_of_two: bool, epsilon: float,
    rowwise: bool, columnwise: bool, tiled: bool = False, itemsize: int = 2, window: int = _WINDOW,
) -> Launch:  # fmt: skip
    """Launch (x, table | None, layout | None) -> codes, codes_t, scale [groups, 4], state float32 [2 groups + 1].

    x is [total, K] or one of the matrices [M, K] with even M; codes is present if rowwise, codes_t if columnwise.

    Args:
        shape, groups, by_rows, element, power_of_two, epsilon, rowwise, columnwise, tiled: As in `grouped_cast.cast`.
        itemsize: Bytes of an element of x.
        window: Bytes to measure before the first group is cast.
    """
    block_m, block_k, warps = _TILE
    assert block_m == TILE_ROWS
    grid, scalars, even = cast_grid(shape, groups, by_rows, block_m, block_k)
    mean = shape[0] * shape[1] * itemsize // (groups if by_rows else 1)
    lag = min(groups, max(1, window // max(mean, 1)))
    count = triton.next_power_of_2(groups)
    how = (groups, by_rows, element.maximum, epsilon, power_of_two, count, lag)
    return Launch(
        measured_cast_kernel,
        (2 * grid[0], 1, 1),
        (
            *cast_codes(shape, groups, by_rows, element, rowwise, columnwise),
            Output((groups, SCALE_SLOT), "float32"),
            Output((2 * groups + 1,), "float32", begins=0.0),
        ),
        scalars,
        (*how, block_m, block_k, even, tiled, NATIVE),
        warps,
        tables=address_tables(by_rows),
    )


def measured_scaled(
    shape: tuple[int, int], groups: int, by_rows: bool, element: Element, power_of_two: bool, epsilon: float,
    rowwise: bool, columnwise: bool, tiled: bool = False, itemsize: int = 2,
) -> Program:  # fmt: skip
    """Program (x, table | None, layout | None, codes, codes_t, scale) with one scale per group from its maximum.

    The arguments are as in `measured_cast`; the caller allocates codes, codes_t and scale.
    """
    inputs, into = ("x", "table", "layout"), ("codes", "codes_t", "scale")
    launch = measured_cast(
        shape, groups, by_rows, element, power_of_two, epsilon, rowwise, columnwise, tiled, itemsize
    )
    steps = (step(launch, inputs, (*into, "state")),)
    return Program(inputs, steps, (), tuple(name for name in into if name in steps[0].outputs))
