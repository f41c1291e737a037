"""codes [M, K] = e2m1(x / (s * g)), s an E4M3 scale for 16 (or 16 x 16) elements, g one scale for the matrix.

The columnwise direction may pass through the Hadamard transform of `primitives.quantize.hadamard` first.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import FLOAT32_MAX, ceil_div
from . import tile
from .cast import absolute_maximum
from .launch import Launch, Output
from .program import Program, Step, step
from .rounding import as_float, magnitude_bits

_GROUP = 16
GROUP = tl.constexpr(_GROUP)
LARGEST = tl.constexpr(FLOAT32_MAX)
_TILE = 64


@triton.jit
def _butterfly(y, DISTANCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums and differences of elements DISTANCE apart, along groups of 2 DISTANCE on the last axis."""
    PAIRS: tl.constexpr = COLUMNS // (2 * DISTANCE)
    first, second = tl.split(y.reshape(ROWS, PAIRS, 2, DISTANCE).permute(0, 1, 3, 2))
    return tl.join(first + second, first - second).permute(0, 1, 3, 2).reshape(ROWS, COLUMNS)


@triton.jit
def _transform(x, RANDOM_SIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [ROWS, COLUMNS] -> its Hadamard transform in groups of 16 along the last axis, rounded to x's dtype."""
    y = x.to(tl.float32)
    if RANDOM_SIGN:
        # Bit i: the sign of element i of a group, +1 +1 +1 -1 +1 -1 -1 -1 -1 -1 -1 +1 -1 +1 -1 -1.
        negative = (0xD7E8 >> (tl.arange(0, COLUMNS) % GROUP)) & 1
        y = y * tl.where(negative == 1, -1.0, 1.0)[None, :]  # not -y: Triton's is 0 - y, which loses -0
    y = _butterfly(y, 1, ROWS, COLUMNS)
    y = _butterfly(y, 2, ROWS, COLUMNS)
    y = _butterfly(y, 4, ROWS, COLUMNS)
    y = _butterfly(y, 8, ROWS, COLUMNS)
    return (y * 0.25).to(x.dtype)


@triton.jit
def _codes(scaled, random, STOCHASTIC: tl.constexpr):
    """E2M1 codes of float32 values: nearest, ties to even, or floor(|x| + random * gap); NaN as +6."""
    number = scaled == scaled
    magnitude = tl.where(number, tl.abs(scaled), 6.0)
    if STOCHASTIC:
        first = tl.where(magnitude > 2.0, 2.0, magnitude) * 2.0
        second = tl.where(magnitude > 4.0, 4.0, tl.where(magnitude < 2.0, 2.0, magnitude)) - 2.0
        third = (tl.where(magnitude > 6.0, 6.0, tl.where(magnitude < 4.0, 4.0, magnitude)) - 4.0) * 0.5
        whole = tl.floor(first) + tl.floor(second) + tl.floor(third)
        fraction = (first - tl.floor(first)) + (second - tl.floor(second)) + (third - tl.floor(third))
        code = (whole + tl.floor(fraction + random)).to(tl.int32)
    else:
        # The midpoints of neighbouring magnitudes; a tie goes to the even code.
        code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
        code += (magnitude > 1.25).to(tl.int32) + (magnitude >= 1.75).to(tl.int32)
        code += (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
        code += (magnitude > 5.0).to(tl.int32)
    sign = (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    return code | tl.where(number, sign, 0)


@triton.jit
def _encode_scale(amax):
    """6 * 448 / amax, at most the largest float32; 1 where amax or the quotient is 0."""
    scale = tl.div_rn(2688.0, amax)
    scale = tl.where(scale > LARGEST, LARGEST, scale)
    return tl.where((amax == 0.0) | (scale == 0.0), 1.0, scale)


@triton.jit
def _store_direction(
    x,
    bits,
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
    EVEN: tl.constexpr,
):
    """Codes and scales of a tile x [ROWS, COLUMNS] of a matrix [R, C]; bits [ROWS, COLUMNS / 16]: its blocks' amax."""
    GROUPS: tl.constexpr = COLUMNS // GROUP
    global_scale = _encode_scale(tl.load(amax))
    wanted = as_float(bits) * (global_scale * (1.0 / 6.0))
    block_scale = tl.where(wanted > LARGEST, LARGEST, wanted).to(tl.float8e4nv)
    multiplier = tl.div_rn(1.0, block_scale.to(tl.float32) * tl.div_rn(1.0, global_scale))
    multiplier = tl.where(multiplier > LARGEST, LARGEST, multiplier)
    scaled = x.to(tl.float32).reshape(ROWS, GROUPS, GROUP) * multiplier[:, :, None]
    scaled = scaled.reshape(ROWS, COLUMNS)
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    inside_r = first_r + r < R
    uniform = scaled
    if random is not None:
        inside = inside_r[:, None] & (first_c + c < C)[None, :]
        corner = random + (first_r * C + first_c)
        uniform = tile.load(corner + (r[:, None] * C + c[None, :]), inside, EVEN)
    code = _codes(scaled, uniform, random is not None)
    low, high = tl.split(code.reshape(ROWS, COLUMNS // 2, 2))
    byte = tl.arange(0, COLUMNS // 2)
    inside = inside_r[:, None] & (first_c + byte * 2 < C)[None, :]
    corner = codes + (first_r * (C // 2) + first_c // 2)
    tile.store(
        corner + (r[:, None] * (C // 2) + byte[None, :]), (low | (high << 4)).to(tl.uint8), inside, EVEN
    )
    width = tl.cdiv(C, GROUP)
    group = tl.arange(0, GROUPS)
    inside = inside_r[:, None] & (first_c // GROUP + group < width)[None, :]
    corner = scale + (first_r * width + first_c // GROUP)
    tile.store(corner + (r[:, None] * width + group[None, :]), block_scale, inside, EVEN)


@triton.jit
def _square_tile(x, M, K, TILE: tl.constexpr, EVEN: tl.constexpr):
    """(values [TILE, TILE], first row, first column) of this program's tile of x [M, K]."""
    program = tl.program_id(0)
    tiles_k = tl.cdiv(K, TILE)
    m = tl.arange(0, TILE)
    k = tl.arange(0, TILE)
    first_m = (program // tiles_k * TILE).to(tl.int64)
    first_k = (program % tiles_k * TILE).to(tl.int64)
    inside = (first_m + m < M)[:, None] & (first_k + k < K)[None, :]
    values = tile.load(x + (first_m * K + first_k) + (m[:, None] * K + k[None, :]), inside, EVEN)
    return values, first_m, first_k


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
    TILE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Both directions of a TILE x TILE tile; SQUARE: the columnwise one repeats the rowwise random numbers."""
    GROUPS: tl.constexpr = TILE // GROUP
    values, first_m, first_k = _square_tile(x, M, K, TILE, EVEN)
    bits = tl.max(magnitude_bits(values).reshape(TILE, GROUPS, GROUP), 2)
    if SQUARE:
        square = tl.max(bits.reshape(GROUPS, GROUP, GROUPS), 1)
        bits = square[:, None, :].broadcast_to(GROUPS, GROUP, GROUPS).reshape(TILE, GROUPS)
    if codes is not None:
        _store_direction(values, bits, amax, random, codes, scale, M, K, first_m, first_k, TILE, TILE, EVEN)
    if codes_t is not None:
        turned = tl.trans(values)
        if HADAMARD:
            turned = _transform(turned, RANDOM_SIGN, TILE, TILE)
        if SQUARE:
            bits = tl.trans(square)[:, None, :].broadcast_to(GROUPS, GROUP, GROUPS).reshape(TILE, GROUPS)
        else:
            bits = tl.max(magnitude_bits(turned).reshape(TILE, GROUPS, GROUP), 2)
        _store_direction(
            turned, bits, amax_t, random_t, codes_t, scale_t, K, M, first_k, first_m, TILE, TILE, EVEN
        )


@triton.jit
def transformed_maximum_kernel(
    x, amax, M, K, RANDOM_SIGN: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr
):
    """amax = max(amax, max|transform of x.T|)."""
    values, _, _ = _square_tile(x, M, K, TILE, EVEN)
    turned = _transform(tl.trans(values), RANDOM_SIGN, TILE, TILE)
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), tl.max(magnitude_bits(turned)), sem="relaxed")


def _grid(shape: tuple[int, int]) -> tuple[int, int, int]:
    return (ceil_div(shape[0], _TILE) * ceil_div(shape[1], _TILE), 1, 1)


def _even(shape: tuple[int, int]) -> bool:
    return shape[0] % _TILE == 0 and shape[1] % _TILE == 0


@functools.lru_cache(maxsize=4096)
def transformed_maximum(shape: tuple[int, int], random_sign: bool) -> Launch:
    """Inputs: x [M, K] contiguous, M a multiple of 16; outputs: amax float32 [1]."""
    constants = (random_sign, _TILE, _even(shape))
    outputs = (Output((1,), "float32", begins=0.0),)
    return Launch(transformed_maximum_kernel, _grid(shape), outputs, shape, constants, warps=4)


@functools.lru_cache(maxsize=4096)
def blocks(
    shape: tuple[int, int],
    rowwise: bool,
    columnwise: bool,
    *,
    square: bool,
    hadamard: bool,
    random_sign: bool,
) -> Launch:
    """Inputs: x [M, K] contiguous, amax, amax_t float32 [1], random [M, K], random_t [K, M] float32 or None;
    outputs: codes [M, K / 2], scale [M, ceil(K/16)], codes_t [K, M / 2], scale_t [K, ceil(M/16)]."""
    rows, depth = shape
    outputs = (
        Output((rows, depth // 2), "uint8") if rowwise else None,
        Output((rows, ceil_div(depth, _GROUP)), "float8_e4m3fn") if rowwise else None,
        Output((depth, rows // 2), "uint8") if columnwise else None,
        Output((depth, ceil_div(rows, _GROUP)), "float8_e4m3fn") if columnwise else None,
    )
    constants = (square, hadamard, random_sign, _TILE, _even(shape))
    return Launch(block_kernel, _grid(shape), outputs, shape, constants, warps=4)


def program(
    shape: tuple[int, int],
    rowwise: bool,
    columnwise: bool,
    *,
    square: bool,
    hadamard: bool,
    random_sign: bool,
    amax_given: bool,
    amax_t_given: bool,
) -> Program:
    """(x [M, K] contiguous, random | None, random_t | None, amax if given, amax_t if given) -> codes, scale, codes_t,
    scale_t, amax, amax_t.

    Maxima that are not given are found by passes before: of x, and of its transpose where that is transformed.
    """
    given = ("x", "random", "random_t")
    steps: list[Step] = []
    amax: str | None = "amax"
    if amax_given:
        given += ("amax",)
    elif rowwise or not hadamard:
        steps.append(Step(absolute_maximum(shape[0] * shape[1]), ("x",), ("amax",)))
    else:
        amax = None
    amax_t = amax
    if columnwise and not square and (amax_t_given or hadamard):
        amax_t = "amax_t"
        if not amax_t_given:
            steps.append(Step(transformed_maximum(shape, random_sign), ("x",), ("amax_t",)))
    given += ("amax_t",) if amax_t_given else ()
    launch = blocks(shape, rowwise, columnwise, square=square, hadamard=hadamard, random_sign=random_sign)
    names = ("codes", "scale", "codes_t", "scale_t")
    last = step(launch, ("x", amax, amax_t, "random", "random_t"), names)
    maxima = (amax if rowwise else None, amax_t if columnwise else None)
    return Program(given, (*steps, last), (*last.outputs, *maxima))
