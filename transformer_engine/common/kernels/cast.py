"""codes [M, K] = saturate(x * multiplier), codes_t [K, M] = codes.T, amax = max|x|: one scale per matrix."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..formats import FLOAT32_MAX, Element, ceil_div
from . import tile
from .conversion import NATIVE
from .launch import Launch, Output, codes_dtype
from .program import Program, ProgramStep, step
from .rounding import as_float, magnitude_bits, scale_from_amax, take_multiplier, to_codes

VALUE_FOR_INF = tl.constexpr(FLOAT32_MAX)
_ROWS, _COLUMNS = 8, 256  # tile for `row_maximum_kernel`


class OneScale(NamedTuple):
    """Cast for a kernel's own result, with one scale for the matrix and rowwise codes.

    Attributes:
        columnwise: Also store the transposed codes.
        given: The scale is given, and the kernel computes the codes itself. Otherwise it computes the maximum, and a
            cast with power_of_two and epsilon follows.
        records: With a given scale, a given amax becomes max(amax, result maximum).
        zero_is_one: Read a given zero scale as 1.
    """

    element: Element
    columnwise: bool
    given: bool
    records: bool
    power_of_two: bool
    epsilon: float
    zero_is_one: bool = False

    @property
    def results(self) -> tuple[str | None, ...]:
        """Buffers codes, scale, codes_t, scale_t, amax in a program; both directions share a scale."""
        both = ("codes_t", "scale") if self.columnwise else (None, None)
        return ("codes", "scale", *both, "record" if self.records else "amax")

    def after(self, values: str, shape: tuple[int, int]) -> ProgramStep:
        """Cast stored values [M, K] by their maximum, which an earlier step has computed."""
        launch = cast(
            shape,
            self.element,
            True,
            self.columnwise,
            power_of_two=self.power_of_two,
            epsilon=self.epsilon,
        )
        return step(launch, (values, None, "amax"), ("codes", "codes_t", "scale"))


@triton.jit
def absolute_maximum_kernel(
    x,
    amax,
    SIZE,
    KEPT_FROM,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute amax = max(amax, max|x|) for x [SIZE], NaN if x has one; every program reads BLOCK elements.

    With OVERLAPS, a cast of the same x follows, which may start early and reads the end of x first.
    """
    if OVERLAPS:
        gdc_launch_dependents()
    program = tl.program_id(0)
    start = program.to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    if OVERLAPS and EVEN:
        if program >= KEPT_FROM:
            values = tl.load(x + start + offsets, eviction_policy="evict_last")
        else:
            values = tl.load(x + start + offsets, eviction_policy="evict_first")
    else:
        values = tile.load(x + start + offsets, start + offsets < SIZE, EVEN)
    _record(amax, tl.max(magnitude_bits(values), 0))


@triton.jit
def _record(amax, bits):
    # Compared as integers: they order like non-negative floats, with NaN as the largest.
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def resolve_multiplier(
    program,
    multiplier,
    amax,
    scale,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
):
    """Get the given multiplier, or compute it from amax; program 0 stores its inverse."""
    if multiplier is not None:
        factor = take_multiplier(multiplier, ZERO_IS_ONE)
        decode = tl.div_rn(1.0, factor)
    else:
        factor, decode = scale_from_amax(
            tl.load(amax), MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF
        )
    if program == 0:
        tl.store(scale, decode)
    return factor


@triton.jit
def cast_kernel(
    x,
    multiplier,
    amax,
    codes,
    codes_t,
    scale,
    SIZE,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    RECORDS: tl.constexpr,
    FOLLOWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Compute codes [SIZE] for x [SIZE]: without codes_t, the matrix's shape does not matter."""
    program = tl.program_id(0)
    if FOLLOWS:
        program = tl.num_programs(0) - 1 - program
    start = program.to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    inside = start + offsets < SIZE
    values = tile.load(x + start + offsets, inside, EVEN)
    if FOLLOWS:
        gdc_wait()
    factor = resolve_multiplier(
        program, multiplier, amax, scale, MAXIMUM, EPSILON, POWER_OF_TWO, ZERO_IS_ONE
    )
    narrow = to_codes(values.to(tl.float32) * factor, codes.dtype.element_ty, CONVERSION)
    if FOLLOWS and EVEN:
        tl.store(codes + start + offsets, narrow, eviction_policy="evict_first")
    else:
        tile.store(codes + start + offsets, narrow, inside, EVEN)
    if RECORDS:
        _record(amax, tl.max(magnitude_bits(values), 0))


@triton.jit
def cast_transpose_kernel(
    x,
    multiplier,
    amax,
    codes,
    codes_t,
    scale,
    M,
    K,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    RECORDS: tl.constexpr,
    FOLLOWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Compute codes [M, K] (unless None) and codes_t [K, M] for x [M, K], one tile per program."""
    program = tl.program_id(0)
    if FOLLOWS:
        program = tl.num_programs(0) - 1 - program
    tile_m, tile_k = tile.position(program, tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K), BAND)
    half = tl.arange(0, BLOCK_M // 2)
    k = tl.arange(0, BLOCK_K)
    first_m = (tile_m * BLOCK_M).to(tl.int64)
    first_k = (tile_k * BLOCK_K).to(tl.int64)
    even = tile.load_rows(x, M, K, first_m, first_k, half * 2, k, EVEN)
    odd = tile.load_rows(x, M, K, first_m, first_k, half * 2 + 1, k, EVEN)
    if FOLLOWS:
        gdc_wait()
    factor = resolve_multiplier(
        program, multiplier, amax, scale, MAXIMUM, EPSILON, POWER_OF_TWO, ZERO_IS_ONE
    )
    if codes is not None:
        element = codes.dtype.element_ty
        narrow = to_codes(even.to(tl.float32) * factor, element, CONVERSION)
        tile.store_rows(codes, M, K, first_m, first_k, half * 2, k, narrow, EVEN)
        narrow = to_codes(odd.to(tl.float32) * factor, element, CONVERSION)
        tile.store_rows(codes, M, K, first_m, first_k, half * 2 + 1, k, narrow, EVEN)
    pairs = to_codes(
        tl.join(even, odd).to(tl.float32) * factor, codes_t.dtype.element_ty, CONVERSION
    )
    tile.store_pairs_transposed(codes_t, M, K, first_m, first_k, half, k, pairs, PAIRS, EVEN)
    if RECORDS:
        _record(amax, tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd))))


@triton.jit
def row_maximum_kernel(x, amax, M, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute amax [M] = max|x| per row of x [M, K], NaN for a row with a NaN."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    bits = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, K, COLUMNS):
        inside = (row < M)[:, None] & (start + column < K)[None, :]
        values = tl.load(x + (row[:, None] * K + (start + column)[None, :]), mask=inside, other=0.0)
        bits = tl.maximum(bits, magnitude_bits(values))
    tl.store(amax + row, as_float(tl.max(bits, 1)), mask=row < M)


@functools.lru_cache(maxsize=4096)
def absolute_maximum(size: int, *, overlaps: bool = False) -> Launch:
    """Launch (x contiguous, with `size` elements) -> amax float32 [1].

    With `overlaps`, the next launch is `cast(follows=True)` of the same x.
    """
    block, warps = (16384, 16) if size > 1 << 22 else (2048, 4)
    programs = ceil_div(size, block)
    return Launch(
        absolute_maximum_kernel,
        grid=(programs, 1, 1),
        outputs=(Output((1,), "float32", begins=0.0),),
        scalars=(size, max(programs - _KEPT // block, 0)),
        constants=(block, size % block == 0, overlaps),
        warps=warps,
    )


@functools.lru_cache(maxsize=4096)
def row_maxima(shape: tuple[int, int]) -> Launch:
    """Launch (x [M, K] contiguous) -> amax float32 [M]."""
    rows, _ = shape
    grid = (ceil_div(rows, _ROWS), 1, 1)
    outputs = (Output((rows,), "float32"),)
    return Launch(row_maximum_kernel, grid, outputs, shape, (_ROWS, _COLUMNS), warps=4)


@functools.lru_cache(maxsize=4096)
def cast(
    shape: tuple[int, int],
    element: Element,
    rowwise: bool,
    columnwise: bool,
    *,
    records: bool = False,
    measures: bool = False,
    follows: bool = False,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    zero_is_one: bool = False,
) -> Launch:
    """Launch (x [M, K] contiguous, multiplier [1] | None, amax float32 [1]) -> codes, codes_t, scale [1].

    Without a multiplier (None), it is computed from amax.

    Args:
        records: amax becomes max(amax, max|x|).
        measures: The first output is amax = max|x|.
        follows: The previous launch is `absolute_maximum(overlaps=True)` of x. This launch reads x before that one
            ends, then waits for amax.
        zero_is_one: Read a given zero multiplier as 1.
    """
    rows, depth = shape
    dtype = codes_dtype(element)
    outputs = (
        Output((rows, depth), dtype) if rowwise else None,
        Output((depth, rows), dtype) if columnwise else None,
        Output((1,), "float32"),
    )
    if measures:
        outputs = (Output((1,), "float32", begins=0.0), *outputs)
    steps = (element.maximum, epsilon, power_of_two, zero_is_one, records or measures, follows)
    if not columnwise:
        size = rows * depth
        block, warps = (16384, 16) if size > 1 << 22 else (2048, 4)
        grid, scalars, tiles = ceil_div(size, block), (size,), (block, size % block == 0)
        kernel = cast_kernel
    else:
        block_m, block_k, band, warps = (
            (64, 256, 4, 8) if rows * depth > 1 << 22 else (64, 64, 4, 4)
        )
        grid, scalars = ceil_div(rows, block_m) * ceil_div(depth, block_k), (rows, depth)
        tiles = (
            block_m,
            block_k,
            band,
            rows % 2 == 0,
            rows % block_m == 0 and depth % block_k == 0,
        )
        kernel = cast_transpose_kernel
    return Launch(
        kernel,
        (grid, 1, 1),
        outputs,
        scalars,
        (*steps, *tiles, NATIVE),
        warps,
        dependent=follows,
        in_place=(2,) if records else (),
    )


def one_scale(
    shape: tuple[int, int],
    element: Element,
    rowwise: bool,
    columnwise: bool,
    amax: str,
    *,
    overlaps: bool = False,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    zero_is_one: bool = False,
) -> Program:
    """Program (x [M, K] contiguous, ..) -> codes, scale, codes_t, scale_t, amax; directions share a scale.

    The value of `amax` determines how the maximum is used, and the inputs after x:

    * RECORDED (.., multiplier, amax): amax becomes max(amax, max|x|).
    * MEASURED (.., multiplier): amax = max|x|, computed by the same kernel.
    * GIVEN (.., multiplier | None, amax): without a multiplier (None), it is computed from amax.
    * SCALES (..): a first pass computes max|x|, from which the scale is computed; the passes may overlap.

    With zero_is_one, a given zero multiplier is read as 1.
    """
    plain = (shape, element, rowwise, columnwise)
    scaling = {"power_of_two": power_of_two, "epsilon": epsilon, "zero_is_one": zero_is_one}
    names = ("codes", "codes_t", "scale")
    inputs = ("x", "multiplier", "amax")
    if amax == SCALES:
        inputs = ("x",)
        steps = (
            ProgramStep(
                absolute_maximum(shape[0] * shape[1], overlaps=overlaps), inputs, ("amax",)
            ),
            step(cast(*plain, follows=overlaps, **scaling), ("x", None, "amax"), names),
        )
    elif amax == MEASURED:
        inputs = ("x", "multiplier")
        steps = (step(cast(*plain, measures=True, **scaling), inputs, ("amax", *names)),)
    else:
        steps = (step(cast(*plain, records=amax == RECORDED, **scaling), inputs, names),)
    codes, codes_t, _ = names
    rows = (codes, "scale") if rowwise else (None, None)
    columns = (codes_t, "scale") if columnwise else (None, None)
    return Program(inputs, steps, (*rows, *columns, "amax"))


RECORDED, MEASURED, GIVEN, SCALES = "recorded", "measured", "given", "scales"

# Elements at the end of x that the amax pass leaves in the L2 for the cast: 24 MiB in bfloat16. H200, 8192 x 14336: the
# two passes take 0.1376 ms, 0.1383 without it, 0.1404 without the early start.
_KEPT = 12 << 20
