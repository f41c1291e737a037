"""NVFP4 casts: codes [M, K] = e2m1(x / (s * g)), an E4M3 scale s per 16 (or 16 x 16) elements, g per matrix or row.

The columnwise direction can be transformed first, by the Hadamard transform in `primitives.quantize.hadamard`. "4over6"
codes every block twice, with its maximum mapped to 6 and to 4, and selects the coding with the smaller error.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from ..formats import ceil_div, round_up
from ..quantize_spec import QuantizeSpec
from . import tile
from .cast import absolute_maximum, row_maxima
from .conversion import NATIVE
from .fp4_blocks import (
    BLOCK,
    ERRORS,
    GROUP,
    LARGEST,
    as_block_scale,
    candidates,
    compute_encode_scale,
    encode_codes,
    scaled_blocks,
    takes_four,
)
from .launch import Launch, Output
from .program import Program, ProgramStep, step
from .rounding import as_float, magnitude_bits
from .swizzled_scales import TILE_COLUMNS, TILE_ROWS, store_in_tiles

_TILE = 64


@triton.jit
def _butterfly(y, DISTANCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute sums and differences of elements DISTANCE apart, in groups of 2 DISTANCE on the last axis."""
    PAIRS: tl.constexpr = COLUMNS // (2 * DISTANCE)
    first, second = tl.split(y.reshape(ROWS, PAIRS, 2, DISTANCE).permute(0, 1, 3, 2))
    return tl.join(first + second, first - second).permute(0, 1, 3, 2).reshape(ROWS, COLUMNS)


@triton.jit
def _transform(x, RANDOM_SIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Hadamard transform x [ROWS, COLUMNS] in groups of 16 on the last axis, rounded to x's dtype."""
    y = x.to(tl.float32)
    if RANDOM_SIGN:
        # Bit i: sign for element i in a group, +1 +1 +1 -1 +1 -1 -1 -1 -1 -1 -1 +1 -1 +1 -1 -1.
        negative = (0xD7E8 >> (tl.arange(0, COLUMNS) % GROUP)) & 1
        # not -y: Triton computes 0 - y, which loses -0
        y = y * tl.where(negative == 1, -1.0, 1.0)[None, :]
    y = _butterfly(y, 1, ROWS, COLUMNS)
    y = _butterfly(y, 2, ROWS, COLUMNS)
    y = _butterfly(y, 4, ROWS, COLUMNS)
    y = _butterfly(y, 8, ROWS, COLUMNS)
    return (y * 0.25).to(x.dtype)


@triton.jit
def _maxima(amax, first_r, R, ROWS: tl.constexpr, PER_ROW: tl.constexpr):
    """Load the maxima for a tile's second-level row scales: [ROWS, 1], or one number for all rows."""
    if PER_ROW:
        r = tl.arange(0, ROWS)
        maxima = tl.load(amax + first_r + r, mask=first_r + r < R, other=0.0)[:, None]
    else:
        maxima = tl.load(amax)
    return maxima


@triton.jit
def _tile_maxima(amax, first_m, M, TILE: tl.constexpr):
    """Load the maxima [TILE / 16] for 16-row tiles from row first_m on."""
    tiles = tl.arange(0, TILE // GROUP)
    return tl.load(amax + first_m // GROUP + tiles, mask=first_m + tiles * GROUP < M, other=0.0)


@triton.jit
def _store_direction(
    x,
    bits,
    four,
    amax,
    random,
    codes,
    scale,
    R,
    C,
    first_r,
    first_c,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANGE: tl.constexpr,
    EVEN: tl.constexpr,
    TILED: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Store codes and scales for a tile x [ROWS, COLUMNS] in a matrix [R, C].

    Args:
        bits: Block maxima [ROWS, COLUMNS / 16].
        four: The blocks that map their maximum to 4; None: all map it to 6.
        amax: Result from `_maxima`, or maxima [1, COLUMNS / 16] for column blocks.
    """
    GROUPS: tl.constexpr = COLUMNS // GROUP
    encode_scale = compute_encode_scale(amax, RANGE)
    if four is not None:
        to_six, to_four = candidates(bits, encode_scale, CONVERSION)
        chosen = tl.where(
            four == 1, to_four.to(tl.uint8, bitcast=True), to_six.to(tl.uint8, bitcast=True)
        )
        block_scale = chosen.to(to_six.dtype, bitcast=True)
    else:
        block_scale = as_block_scale(
            as_float(bits) * (encode_scale * (1.0 / 6.0)), LARGEST, CONVERSION
        )
    scaled = scaled_blocks(x, block_scale, encode_scale, ROWS, COLUMNS, CONVERSION)
    scaled = scaled.reshape(ROWS, COLUMNS)
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    inside_r = first_r + r < R
    uniform = scaled
    if random is not None:
        inside = inside_r[:, None] & (first_c + c < C)[None, :]
        corner = random + (first_r * C + first_c)
        uniform = tile.load(corner + (r[:, None] * C + c[None, :]), inside, EVEN)
    code = encode_codes(scaled, uniform, random is not None)
    low, high = tl.split(code.reshape(ROWS, COLUMNS // 2, 2))
    byte = tl.arange(0, COLUMNS // 2)
    inside = inside_r[:, None] & (first_c + byte * 2 < C)[None, :]
    corner = codes + (first_r * (C // 2) + first_c // 2)
    tile.store(
        corner + (r[:, None] * (C // 2) + byte[None, :]),
        (low | (high << 4)).to(tl.uint8),
        inside,
        EVEN,
    )
    width = tl.cdiv(C, GROUP)
    group = tl.arange(0, GROUPS)
    if TILED:
        store_in_tiles(scale, R, width, first_r, first_c // GROUP, r, group, block_scale)
    else:
        inside = inside_r[:, None] & (first_c // GROUP + group < width)[None, :]
        corner = scale + (first_r * width + first_c // GROUP)
        tile.store(corner + (r[:, None] * width + group[None, :]), block_scale, inside, EVEN)


@triton.jit
def _square_tile(x, M, K, TILE: tl.constexpr, EVEN: tl.constexpr, TILED: tl.constexpr = False):
    """Load this program's tile of x [M, K]: (values [TILE, TILE], first row, first column)."""
    program = tl.program_id(0)
    tiles_k = tl.cdiv(K, 128) * (128 // TILE) if TILED else tl.cdiv(K, TILE)
    m = tl.arange(0, TILE)
    k = tl.arange(0, TILE)
    first_m = (program // tiles_k * TILE).to(tl.int64)
    first_k = (program % tiles_k * TILE).to(tl.int64)
    inside = (first_m + m < M)[:, None] & (first_k + k < K)[None, :]
    values = tile.load(x + (first_m * K + first_k) + (m[:, None] * K + k[None, :]), inside, EVEN)
    return values, first_m, first_k


@triton.jit
def _expand_square(square, TILE: tl.constexpr):
    """Expand [TILE / 16, TILE / 16], one number per square tile, to [TILE, TILE / 16]."""
    GROUPS: tl.constexpr = TILE // GROUP
    return square[:, None, :].broadcast_to(GROUPS, GROUP, GROUPS).reshape(TILE, GROUPS)


@triton.jit
def block_kernel(
    x,
    amax,
    amax_t,
    random,
    random_t,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    SQUARE: tl.constexpr,
    HADAMARD: tl.constexpr,
    RANDOM_SIGN: tl.constexpr,
    PER_ROW: tl.constexpr,
    BY_TILE: tl.constexpr,
    RANGE: tl.constexpr,
    ERROR: tl.constexpr,
    TILE: tl.constexpr,
    EVEN: tl.constexpr,
    TILED: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Quantize both directions of a TILE x TILE tile.

    Args:
        SQUARE: 16 x 16 elements share a scale; the columnwise direction uses the rowwise random numbers.
        PER_ROW: The rowwise direction has one maximum per row, amax [M]; the columnwise direction has one, amax_t [1].
        BY_TILE: As PER_ROW, and the columnwise direction has one maximum per 16 rows of x, amax_t [ceil(M / 16)].
        RANGE: 6 times the largest block scale.
        ERROR: Error for 4over6, a number from `ERRORS`; 0: every block's maximum maps to 6.
    """
    GROUPS: tl.constexpr = TILE // GROUP
    values, first_m, first_k = _square_tile(x, M, K, TILE, EVEN, TILED)
    bits = tl.max(magnitude_bits(values).reshape(TILE, GROUPS, GROUP), 2)
    four, square_four = None, None
    if SQUARE:
        square = tl.max(bits.reshape(GROUPS, GROUP, GROUPS), 1)
        bits = _expand_square(square, TILE)
        if ERROR > 0:
            # Both directions use the rowwise choice, because the summation order matters.
            if BY_TILE and codes is None:
                maximum = _tile_maxima(amax_t, first_m, M, TILE)[:, None].broadcast_to(
                    GROUPS, GROUP
                )
                maximum = maximum.reshape(TILE, 1)
            else:
                maximum = _maxima(amax if codes is not None else amax_t, first_m, M, TILE, BY_TILE)
            square_four = takes_four(
                values, bits, maximum, RANGE, ERROR, BY_TILE, True, TILE, TILE, CONVERSION
            )
    if codes is not None:
        maximum = _maxima(amax, first_m, M, TILE, PER_ROW or BY_TILE)
        if ERROR > 0:
            if SQUARE:
                four = _expand_square(square_four, TILE)
            else:
                four = takes_four(
                    values,
                    bits,
                    maximum,
                    RANGE,
                    ERROR,
                    PER_ROW or BY_TILE,
                    False,
                    TILE,
                    TILE,
                    CONVERSION,
                )
        _store_direction(
            values,
            bits,
            four,
            maximum,
            random,
            codes,
            scale,
            M,
            K,
            first_m,
            first_k,
            TILE,
            TILE,
            RANGE,
            EVEN,
            TILED,
            CONVERSION,
        )
    if codes_t is not None:
        transposed = tl.trans(values)
        if BY_TILE:
            maximum_t = _tile_maxima(amax_t, first_m, M, TILE)[None, :]
        else:
            maximum_t = _maxima(amax_t, first_k, K, TILE, False)
        if HADAMARD:
            transposed = _transform(transposed, RANDOM_SIGN, TILE, TILE)
        if SQUARE:
            bits_t = _expand_square(tl.trans(square), TILE)
        else:
            bits_t = tl.max(magnitude_bits(transposed).reshape(TILE, GROUPS, GROUP), 2)
        four_t = None
        if ERROR > 0:
            if SQUARE:
                four_t = _expand_square(tl.trans(square_four), TILE)
            else:
                four_t = takes_four(
                    transposed,
                    bits_t,
                    maximum_t,
                    RANGE,
                    ERROR,
                    BY_TILE,
                    False,
                    TILE,
                    TILE,
                    CONVERSION,
                )
        _store_direction(
            transposed,
            bits_t,
            four_t,
            maximum_t,
            random_t,
            codes_t,
            scale_t,
            K,
            M,
            first_k,
            first_m,
            TILE,
            TILE,
            RANGE,
            EVEN,
            TILED,
            CONVERSION,
        )


@triton.jit
def transformed_maximum_kernel(
    x, amax, M, K, RANDOM_SIGN: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr
):
    """Compute amax = max(amax, max|transform(x.T)|)."""
    values, _, _ = _square_tile(x, M, K, TILE, EVEN)
    transposed = _transform(tl.trans(values), RANDOM_SIGN, TILE, TILE)
    tl.atomic_max(
        amax.to(tl.pointer_type(tl.int32)), tl.max(magnitude_bits(transposed)), sem="relaxed"
    )


def _grid(shape: tuple[int, int]) -> tuple[int, int, int]:
    return (ceil_div(shape[0], _TILE) * ceil_div(shape[1], _TILE), 1, 1)


@functools.lru_cache(maxsize=4096)
def hadamard_maximum(shape: tuple[int, int], random_sign: bool) -> Launch:
    """Launch (x [M, K] contiguous, M a multiple of 16) -> amax float32 [1]."""
    constants = (random_sign, _TILE, shape[0] % _TILE == 0 and shape[1] % _TILE == 0)
    outputs = (Output((1,), "float32", begins=0.0),)
    return Launch(transformed_maximum_kernel, _grid(shape), outputs, shape, constants, warps=4)


@dataclass(frozen=True)
class Options:
    """Kernel options from a QuantizeSpec, without its directions.

    Attributes:
        square: 16 x 16 elements share a scale.
        hadamard: Transform the columnwise direction first.
        random_sign: Apply signs in the transform.
        per_row: The rowwise direction has one second-level scale per row.
        largest_scale: Largest block scale: 448 or 256.
        four_over_six: Error by which a block's maximum maps to 4 or to 6; empty: always to 6.
        tiled: Scales are in swizzled order, padded to 128 x 4 tiles.
        by_tile: The rowwise direction has one second-level scale per row, the columnwise direction one per 16 rows.
    """

    square: bool = False
    hadamard: bool = False
    random_sign: bool = True
    per_row: bool = False
    largest_scale: float = 448.0
    four_over_six: str = ""
    tiled: bool = False
    by_tile: bool = False

    @classmethod
    def of(cls, spec: QuantizeSpec, by_tile: bool = False) -> Options:
        """Extract the options from a spec in an NVFP4 format."""
        assert spec.format.levels is not None
        return cls(
            spec.two_dimensional,
            spec.hadamard,
            spec.random_sign,
            spec.format.row_scaled,
            spec.format.levels[1].maximum,
            spec.four_over_six,
            spec.tiled,
            by_tile,
        )

    @property
    def constants(self) -> tuple[bool | int | float, ...]:
        error = ERRORS[self.four_over_six]
        flags = (self.square, self.hadamard, self.random_sign, self.per_row, self.by_tile)
        return (*flags, 6.0 * self.largest_scale, error)


@functools.lru_cache(maxsize=4096)
def blocks(shape: tuple[int, int], rowwise: bool, columnwise: bool, options: Options) -> Launch:
    """Launch (x, amax, amax_t, random, random_t) -> codes, scale, codes_t, scale_t.

    x is [M, K] contiguous, amax float32 [1] (per row [M]), amax_t float32 [1] (by tile [ceil(M/16)]), random [M, K] and
    random_t [K, M] float32 or None. codes are [M, K / 2], scale [M, ceil(K/16)], codes_t [K, M / 2], scale_t
    [K, ceil(M/16)].
    """
    rows, depth = shape
    # Further programs write the padding in full tiles.
    covered = (round_up(rows, 128), round_up(depth, 128)) if options.tiled else shape

    def extents(rows: int, columns: int) -> tuple[int, int]:
        padded = round_up(rows, TILE_ROWS), round_up(columns, TILE_COLUMNS)
        return padded if options.tiled else (rows, columns)

    outputs = (
        Output((rows, depth // 2), "uint8") if rowwise else None,
        Output(extents(rows, ceil_div(depth, BLOCK)), "float8_e4m3fn") if rowwise else None,
        Output((depth, rows // 2), "uint8") if columnwise else None,
        Output(extents(depth, ceil_div(rows, BLOCK)), "float8_e4m3fn") if columnwise else None,
    )
    even = covered == shape and rows % _TILE == 0 and depth % _TILE == 0
    constants = (*options.constants, _TILE, even, options.tiled, NATIVE)
    return Launch(
        block_kernel,
        _grid(covered),
        outputs,
        shape,
        constants,
        warps=4,
        fuses=not options.four_over_six,
    )


def program(
    shape: tuple[int, int],
    rowwise: bool,
    columnwise: bool,
    options: Options,
    amax_given: bool,
    amax_t_given: bool,
) -> Program:
    """Program (x, random | None, random_t | None, amax, amax_t) -> codes, scale, codes_t, scale_t, maxima.

    x is [M, K] contiguous; amax and amax_t are inputs if given. Launches before the cast compute the missing maxima:
    for x, for its rows, and for its transpose if the transpose is transformed.
    """
    inputs = ("x", "random", "random_t")
    inputs += ("amax",) if amax_given else ()
    inputs += ("amax_t",) if amax_t_given else ()
    tensor_maximum = absolute_maximum(shape[0] * shape[1])
    steps: list[ProgramStep] = []
    amax: str | None = "amax"
    if options.per_row:
        if rowwise and not amax_given:
            steps.append(ProgramStep(row_maxima(shape), ("x",), ("amax",)))
        amax = "amax" if rowwise else None
    elif not amax_given and (rowwise or not options.hadamard):
        steps.append(ProgramStep(tensor_maximum, ("x",), ("amax",)))
    elif not amax_given:
        amax = None
    amax_t = amax
    if columnwise and not options.square and (amax_t_given or options.hadamard or options.per_row):
        amax_t = "amax_t"
        if not amax_t_given:
            measure = (
                hadamard_maximum(shape, options.random_sign) if options.hadamard else tensor_maximum
            )
            steps.append(ProgramStep(measure, ("x",), ("amax_t",)))
    names = ("codes", "scale", "codes_t", "scale_t")
    last = step(
        blocks(shape, rowwise, columnwise, options),
        ("x", amax, amax_t, "random", "random_t"),
        names,
    )
    maxima = (amax if rowwise else None, amax_t if columnwise else None)
    return Program(inputs, (*steps, last), (*last.outputs, *maxima))
