"""NVFP4: codes [R, K] = e2m1(x / (s * g)), an E4M3 scale s per 16 elements and a float32 scale g per matrix or row.

Two-level scaling of "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .....common.formats import E2M1, E4M3, FLOAT32_MAX, NVFP4_FORMATS, TensorFormat, ceil_div
from ... import exact
from ...kernels import Kernel
from ...launching import run
from ...operand import Operand, turned
from ...partitioning import Extent, extent
from ...several_axes import call_on_axes
from .. import four_over_six, tiles
from ..e2m1 import encode_e2m1
from ..float8 import absolute_maximum, cast, row_maxima
from ..format_row import FormatRow, PlannedCall
from ..hadamard import GROUP, hadamard_transform
from ..spec import Given, Quantized, QuantizeSpec, Request
from ..tile_scaled import matrix_of_scales, turned_shape
from ..triton_float8 import Maximum


def _range(form: TensorFormat) -> float:
    """6 times the largest block scale."""
    assert form.unit_amax is not None
    return form.unit_amax


def _at_most_largest(scale: Array) -> Array:
    bits = exact.bits_of(scale)
    return exact.float_of(jnp.where(bits == exact.INFINITY, exact.bits_of_constant(FLOAT32_MAX), bits))


def global_encode_scale(amax: Array, form: TensorFormat) -> Array:
    """S = 6 * (largest block scale) / amax, at most FLOAT32_MAX; 1 where amax or S is 0."""
    scale = exact.bits_of(_at_most_largest(exact.divide(_range(form), amax)))
    idle = (exact.bits_of(amax) == 0) | (scale == 0)
    return exact.float_of(jnp.where(idle, exact.bits_of_constant(1.0), scale))


def global_decode_scale(amax: Array, form: TensorFormat) -> Array:
    """g = amax / (6 * largest block scale): a value is code * block scale * g."""
    return exact.divide(amax, jnp.full(amax.shape, _range(form), jnp.float32))


def encode(
    x: Array, spec: QuantizeSpec, form: TensorFormat, amax: Array, random: Array | None, axis: int
) -> tuple[Array, Array]:
    """x [*R, *K], amax [1] or per row [prod(R)] -> codes float4_e2m1fn [*R, *K], block scales e4m3
    [.., ceil(R/r), .., ceil(K/16)]."""
    assert spec.tile is not None
    cut = tiles.cut(x, spec.tile, axis)
    amax = over_tiles(amax, form, x.shape, axis)
    encode_scale = tiles.settled(global_encode_scale(amax, form))

    def multiplier_of(scale: Array) -> Array:
        decode = exact.multiply(scale.astype(jnp.float32), exact.reciprocal(encode_scale))
        return _at_most_largest(exact.reciprocal(decode))

    if spec.four_over_six:
        codes, block_scale = four_over_six.encode(
            cut, axis, spec.four_over_six, _range(form), amax, encode_scale, multiplier_of
        )
        return tiles.join(codes, x.shape, axis), block_scale
    amax_tiles = tiles.tile_amax(cut, axis)
    wanted = amax_tiles * (encode_scale * jnp.float32(1.0 / E2M1.maximum))
    block_scale = cast(jnp.minimum(wanted, FLOAT32_MAX), E4M3)
    block_scale, multiplier = tiles.settled((block_scale, multiplier_of(block_scale)))
    random_tiles = None if random is None else tiles.cut(random.reshape(x.shape), spec.tile, axis)
    codes = encode_e2m1(cut.astype(jnp.float32) * tiles.spread(multiplier, axis), random_tiles)
    return tiles.join(codes, x.shape, axis), block_scale


def over_tiles(amax: Array, form: TensorFormat, shape: tuple[int, ...], axis: int) -> Array:
    """The maxima of an array [*R, *K], [1] or per row [prod(R)], with as many dimensions as the array."""
    if form.row_scaled:
        return amax.reshape(*shape[:axis], *(1,) * (len(shape) - axis))
    return amax.reshape((1,) * len(shape))


def quantize(x: Array, spec: QuantizeSpec, given: Given, axis: int) -> Quantized:
    """x [*M, *K] -> codes, block scales and maxima of the directions that spec asks for."""
    amax, amax_t = given.amax, given.amax_t
    random_rows, random_columns = (
        given.random if spec.stochastic and given.random is not None else (None, None)
    )
    codes = scales = codes_t = scales_t = None
    form = spec.format
    if amax is None and form.row_scaled:
        amax = row_maxima(x, axis) if spec.rowwise else None
    elif amax is None and (spec.rowwise or not spec.hadamard):
        amax = exact.largest_over(absolute_maximum(x), given.over)
    if amax is not None and (spec.rowwise or spec.transposes):
        codes, scales = encode(x, spec, form, amax, random_rows, axis)
    if spec.columnwise:
        if codes is not None and scales is not None and spec.transposes:
            codes_t, scales_t, amax_t = turned(codes, axis), turned(scales, axis), amax
        else:
            x_t = turned(x, axis)
            x_t = hadamard_transform(x_t, spec.random_sign) if spec.hadamard else x_t
            if amax_t is None:
                apart = spec.hadamard or form.row_scaled
                amax_t = exact.largest_over(absolute_maximum(x_t), given.over) if apart else amax
            assert amax_t is not None
            codes_t, scales_t = encode(x_t, spec, form.columnwise, amax_t, random_columns, x.ndim - axis)
    return Quantized(
        codes=codes if spec.rowwise else None,
        scale=matrix_of_scales(scales, spec, x.shape, axis) if spec.rowwise else None,
        codes_t=codes_t,
        scale_t=matrix_of_scales(scales_t, spec, turned_shape(x.shape, axis), x.ndim - axis),
        amax=amax if spec.rowwise else None,
        amax_t=amax_t if spec.columnwise else None,
    )


def dequantize(operand: Operand, scale: Array) -> Array:
    """code * block scale * global scale."""
    form = operand.format
    assert form is not None and form.block is not None
    if operand.amax is None:
        raise ValueError(
            f"an {form.name} operand needs the tensor's amax for its second scale, which is None; "
            "pass the one that `quantize` returned"
        )
    axis = operand.axis
    codes = tiles.cut(operand.codes.astype(jnp.float32), form.block, axis)
    # The first product has at most 6 significant bits and is exact, so only the second rounds.
    spread = tiles.spread(scale.astype(jnp.float32), axis)
    amax = over_tiles(operand.amax, form, operand.codes.shape, axis)
    values = exact.scaled(codes * spread, tiles.spread(global_decode_scale(amax, form), axis))
    return tiles.join(values, operand.codes.shape, axis)


def check(rows: int, depth: int, spec: QuantizeSpec) -> None:
    """ValueError where codes do not fill bytes, or rows the transform's groups."""
    if spec.rowwise and depth % 2:
        raise ValueError(f"K={depth} FP4 codes do not fill whole bytes; pad K to a multiple of 2")
    if spec.columnwise and rows % 2:
        raise ValueError(f"M={rows} FP4 codes do not fill whole bytes; pad M to a multiple of 2")
    if spec.columnwise and spec.hadamard and rows % GROUP:
        raise ValueError(
            f"M={rows} is not a multiple of {GROUP}, the Hadamard transform's group; "
            "pad M, or set hadamard=False (of the recipe: disable_rht=True)"
        )


@dataclass(frozen=True)
class TransformedMaximum(Kernel):
    """x [M, K] -> max|transform of x.T| [1]; rows: M, whose groups are not cut"""

    random_sign: bool
    rows: int
    maxed = (0,)

    @property
    def rule(self) -> str:
        return f"{self.extents[0].whole} k -> o"

    @property
    def extents(self) -> tuple[Extent, ...]:
        return (extent("m", self.rows, GROUP),)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((1,), jnp.float32),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from .....common.kernels import nvfp4  # it imports triton

        rows, depth = arrays[0].shape
        (amax,) = run(nvfp4.transformed_maximum((rows, depth), self.random_sign), arrays)
        assert amax is not None
        return (amax,)


@dataclass(frozen=True)
class RowMaxima(Kernel):
    """x [M, K] -> max|x| of every row [M]"""

    maxed = (0,)

    @property
    def rule(self) -> str:
        return "m k -> m"

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((operands[0].shape[0],), jnp.float32),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from .....common.kernels import nvfp4  # it imports triton

        rows, depth = arrays[0].shape
        (amax,) = run(nvfp4.row_maxima((rows, depth)), arrays)
        assert amax is not None
        return (amax,)


@dataclass(frozen=True)
class Blocks(Kernel):
    """(x [M, K], [amax], [amax_t], [random [M, K]], [random_t [K, M]]) -> [codes, scale], [codes_t, scale_t]

    Codes lie two to a byte, uint8 [M, K / 2]. shape: of the whole matrix, whose blocks are not cut.
    given   which of the four are
    """

    spec: QuantizeSpec
    shape: tuple[int, int]
    given: tuple[bool, bool, bool, bool]

    @property
    def extents(self) -> tuple[Extent, Extent]:
        turned = self.spec.columnwise or self.spec.two_dimensional
        return extent("m", self.shape[0], GROUP if turned else 1), extent("k", self.shape[1], GROUP)

    @property
    def rule(self) -> str:
        m, k = self.extents
        matrix, turned = f"{m.whole} {k.whole}", f"{k.whole} {m.whole}"
        maxima = m.whole if self.spec.format.row_scaled else "p"
        takes = [
            matrix,
            *(one for one, there in zip((maxima, "q", matrix, turned), self.given, strict=True) if there),
        ]
        made = []
        if self.spec.rowwise:
            made += [f"{m.whole} {k.bytes}", f"{m.whole} {k.blocks}"]
        if self.spec.columnwise:
            made += [f"{k.whole} {m.bytes}", f"{k.whole} {m.blocks}"]
        return f"{', '.join(takes)} -> {', '.join(made)}"

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows, depth = operands[0].shape
        made = []
        for r, c in ((rows, depth),) * self.spec.rowwise + ((depth, rows),) * self.spec.columnwise:
            made.append(jax.ShapeDtypeStruct((r, c // 2), jnp.uint8))
            made.append(jax.ShapeDtypeStruct((r, ceil_div(c, GROUP)), jnp.float8_e4m3fn))
        return tuple(made)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from .....common.kernels import nvfp4  # it imports triton

        spec, (x, *rest) = self.spec, arrays
        rows, depth = x.shape
        remaining = iter(rest)
        inputs = [next(remaining) if there else None for there in self.given]
        launch = nvfp4.blocks((rows, depth), spec.rowwise, spec.columnwise, nvfp4.Options.of(spec))
        return tuple(array for array in run(launch, [x, *inputs]) if array is not None)


def _unpacked(codes: Array | None) -> Array | None:
    """uint8 [.., C / 2], low half first -> float4_e2m1fn [.., C]."""
    if codes is None:
        return None
    halves = jnp.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    return lax.bitcast_convert_type(halves.astype(jnp.uint4), jnp.float4_e2m1fn)


def plan(request: Request) -> PlannedCall:
    """The codes, scales and maxima of matrices, as one spec asks for them."""
    spec = request.spec

    def quantize(x: Array, given: Given) -> Quantized:
        counts = {"m": request.axis, "k": x.ndim - request.axis}
        amax, amax_t = _maxima(x, spec, given, counts)
        random = given.random if spec.stochastic and given.random is not None else (None, None)
        of_columns = random[1]
        if spec.transposes and random[0] is not None:
            of_columns = turned(random[0], request.axis)
        # Of columns alone the kernel reads no number of the rows, and the reverse.
        used = (
            amax if spec.rowwise else None, amax_t if spec.columnwise else None,
            random[0] if spec.rowwise else None, of_columns if spec.columnwise else None,
        )  # fmt: skip
        kernel = Blocks(spec, request.shape, tuple(one is not None for one in used))  # pyright: ignore
        made = list(call_on_axes(kernel, counts, x, *(one for one in used if one is not None)))
        rows = (made.pop(0), made.pop(0)) if spec.rowwise else (None, None)
        columns = (made.pop(0), made.pop(0)) if spec.columnwise else (None, None)
        scale, scale_t = (
            None if one is None else one.reshape(size, ceil_div(depth, GROUP))
            for one, (size, depth) in ((rows[1], request.shape), (columns[1], request.shape[::-1]))
        )
        codes = Quantized(_unpacked(rows[0]), scale, _unpacked(columns[0]), scale_t, used[0], used[1])
        return codes.with_axes(x.shape, request.axis)

    return quantize


def _maxima(
    x: Array, spec: QuantizeSpec, given: Given, counts: dict[str, int]
) -> tuple[Array | None, Array | None]:
    """float32 [1] of both directions, or [M] of rows with scales of their own; measured where they are not given."""
    amax, amax_t = given.amax, given.amax_t
    if spec.format.row_scaled:
        if amax is None and spec.rowwise:
            (amax,) = call_on_axes(RowMaxima(), counts, x)
            amax = amax.reshape(-1)
        if amax_t is None and spec.columnwise:
            (amax_t,) = call_on_axes(Maximum(), {"r": counts["m"], "w": counts["k"]}, x)
            amax_t = exact.largest_over(amax_t, given.over)
        return amax, amax_t
    if amax is None and (spec.rowwise or not spec.hadamard):
        (amax,) = call_on_axes(Maximum(), {"r": counts["m"], "w": counts["k"]}, x)
        amax = exact.largest_over(amax, given.over)
    if not spec.columnwise or spec.transposes:
        return amax, amax
    if amax_t is None:
        kernel = TransformedMaximum(spec.random_sign, prod(x.shape[: counts["m"]]))
        measured = call_on_axes(kernel, counts, x)[0] if spec.hadamard else None
        amax_t = amax if measured is None else exact.largest_over(measured, given.over)
    return amax, amax_t


ROWS = tuple(FormatRow(form, quantize, dequantize, plan, check) for form in NVFP4_FORMATS.values())
