"""NVFP4: codes [R, K] = e2m1(x / (s * g)), an E4M3 scale s per 16 elements and a float32 scale g per matrix or row.

Two-level scaling from "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .....common.formats import E2M1, E4M3, FLOAT32_MAX, NVFP4_FORMATS, TensorFormat, ceil_div
from ... import exact
from ...kernels import Kernel
from ...launching import run
from ...operand import Operand, turned
from ...partitioning import ShardingRule, extent
from ...several_axes import call_on_axes
from .. import four_over_six, tiles
from ..elements import absolute_maximum, cast, encode_e2m1, row_maxima, unpack_e2m1
from ..hadamard import GROUP, hadamard_transform
from ..spec import FormatRow, Quantized, QuantizeInputs, QuantizeRequest, QuantizeSpec
from .float8 import AbsoluteMaximum


def _clamp_to_largest(scale: Array) -> Array:
    """Replace infinite float32 scales by the largest finite number."""
    bits = exact.float_bits(scale)
    return exact.bits_to_float(
        jnp.where(bits == exact.INFINITY, exact.bits_of_constant(FLOAT32_MAX), bits)
    )


def encode(
    x: Array, spec: QuantizeSpec, form: TensorFormat, amax: Array, random: Array | None, axis: int
) -> tuple[Array, Array]:
    """Quantize x [*R, *K] in one direction.

    Args:
        x: Values.
        spec: Format and options.
        form: Format for this direction; form.unit_amax is 6 times the largest block scale.
        amax: Absolute maxima, float32 [1], or per row [prod(R)].
        random: Uniform numbers for stochastic rounding, or None.
        axis: Where K begins.

    Returns:
        Codes float4_e2m1fn [*R, *K], and block scales float8_e4m3fn [.., ceil(R/r), .., ceil(K/16)].
    """
    assert spec.tile is not None and form.unit_amax is not None
    blocks = tiles.cut(x, spec.tile, axis)
    amax = tile_maxima(amax, form, x.shape, axis)
    # S = 6 * (largest block scale) / amax, at most FLOAT32_MAX; 1 where amax or S is 0.
    scale_bits = exact.float_bits(_clamp_to_largest(exact.divide(form.unit_amax, amax)))
    idle = (exact.float_bits(amax) == 0) | (scale_bits == 0)
    encode_scale = tiles.materialize_scales(
        exact.bits_to_float(jnp.where(idle, exact.bits_of_constant(1.0), scale_bits))
    )

    def scale_multiplier(scale: Array) -> Array:
        decode = exact.multiply(scale.astype(jnp.float32), exact.reciprocal(encode_scale))
        return _clamp_to_largest(exact.reciprocal(decode))

    if spec.four_over_six:
        codes, block_scale = four_over_six.encode(
            blocks, axis, spec.four_over_six, form.unit_amax, amax, encode_scale, scale_multiplier
        )
        return tiles.join(codes, x.shape, axis), block_scale
    amax_tiles = tiles.tile_amax(blocks, axis)
    ideal = amax_tiles * (encode_scale * jnp.float32(1.0 / E2M1.maximum))
    block_scale = cast(jnp.minimum(ideal, FLOAT32_MAX), E4M3)
    block_scale, multiplier = tiles.materialize_scales((block_scale, scale_multiplier(block_scale)))
    random_tiles = None if random is None else tiles.cut(random.reshape(x.shape), spec.tile, axis)
    codes = encode_e2m1(blocks.astype(jnp.float32) * tiles.spread(multiplier, axis), random_tiles)
    return tiles.join(codes, x.shape, axis), block_scale


def tile_maxima(amax: Array, form: TensorFormat, shape: tuple[int, ...], axis: int) -> Array:
    """Expand the maxima of an array [*R, *K], [1] or per row [prod(R)], to the dimensions of the array.

    Maxima per matrix tile, [tiles, 1] or [1, tiles], are returned unchanged.
    """
    if amax.ndim == 2:
        return amax
    if form.row_scaled:
        return amax.reshape(*shape[:axis], *(1,) * (len(shape) - axis))
    return amax.reshape((1,) * len(shape))


def quantize(x: Array, spec: QuantizeSpec, inputs: QuantizeInputs, axis: int) -> Quantized:
    """Quantize x [*M, *K], whose K begins at axis, in the directions that spec requests."""
    amax, amax_t = inputs.amax, inputs.amax_t
    random_rows, random_columns = (
        inputs.random if spec.stochastic and inputs.random is not None else (None, None)
    )
    codes = scales = codes_t = scales_t = None
    form = spec.format
    if amax is None and form.row_scaled:
        amax = row_maxima(x, axis) if spec.rowwise else None
    elif amax is None and (spec.rowwise or not spec.hadamard):
        amax = exact.maximum_over_axes(absolute_maximum(x), inputs.mesh_axes)
    if amax is not None and (spec.rowwise or spec.transposes):
        codes, scales = encode(x, spec, form, amax, random_rows, axis)
    if spec.columnwise:
        if codes is not None and scales is not None and spec.transposes:
            codes_t, scales_t, amax_t = turned(codes, axis), turned(scales, axis), amax
        else:
            x_t = turned(x, axis)
            x_t = hadamard_transform(x_t, spec.random_sign) if spec.hadamard else x_t
            if amax_t is None:
                separate = spec.hadamard or form.row_scaled
                amax_t = (
                    exact.maximum_over_axes(absolute_maximum(x_t), inputs.mesh_axes)
                    if separate
                    else amax
                )
            assert amax_t is not None
            codes_t, scales_t = encode(
                x_t, spec, form.columnwise, amax_t, random_columns, x.ndim - axis
            )
    return Quantized(
        codes=codes if spec.rowwise else None,
        scale=tiles.matrix_of_scales(scales, spec, x.shape, axis) if spec.rowwise else None,
        codes_t=codes_t,
        scale_t=tiles.matrix_of_scales(
            scales_t, spec, (*x.shape[axis:], *x.shape[:axis]), x.ndim - axis
        ),
        amax=amax if spec.rowwise else None,
        amax_t=amax_t if spec.columnwise else None,
    )


def dequantize(operand: Operand, scale: Array) -> Array:
    """Compute code * block scale * g, with g = amax / (6 * largest block scale)."""
    form = operand.format
    assert form is not None and form.block is not None and form.unit_amax is not None
    if operand.amax is None:
        raise ValueError(
            f"an {form.name} operand needs the tensor's amax for its second scale, which is None; "
            "pass the one that `quantize` returned"
        )
    axis = operand.axis
    codes = tiles.cut(operand.codes.astype(jnp.float32), form.block, axis)
    # The first product has at most 6 significant bits and is exact, so only the second rounds.
    spread = tiles.spread(scale.astype(jnp.float32), axis)
    amax = tile_maxima(operand.amax, form, operand.codes.shape, axis)
    global_scale = exact.divide(amax, jnp.full(amax.shape, form.unit_amax, jnp.float32))
    values = exact.scaled(codes * spread, tiles.spread(global_scale, axis))
    return tiles.join(values, operand.codes.shape, axis)


def check(rows: int, depth: int, spec: QuantizeSpec) -> None:
    """Raise ValueError if codes do not fill whole bytes, or rows are not whole groups of the transform."""
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
    """Compute max|transform(x.T)| [1] of x [M, K].

    Attributes:
        random_sign: Whether the transform multiplies by signs.
        rows: M for the full matrix; each shard contains full groups.
    """

    random_sign: bool
    rows: int

    @property
    def rule(self) -> ShardingRule:
        rows = extent("m", self.rows, GROUP)
        return ShardingRule.from_extents(f"{rows.whole} k -> o", rows, maxed=(0,))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((1,), jnp.float32),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from .....common.kernels import nvfp4

        rows, depth = arrays[0].shape
        (amax,) = run(nvfp4.hadamard_maximum((rows, depth), self.random_sign), arrays)
        assert amax is not None
        return (amax,)


@dataclass(frozen=True)
class NVFP4Blocks(Kernel):
    """Quantize x [M, K] to NVFP4: codes and scale, codes_t and scale_t, or both.

    Operands: x, then amax, amax_t, random [M, K] and random_t [K, M] where they are given.

    A byte holds two codes: uint8 [M, K / 2].

    Attributes:
        spec: Format, options and directions.
        shape: Full matrix shape; each shard contains full blocks.
        given: Which optional operands, out of four, are present.
        by_tile: Whether amax is [M], one maximum per row, and amax_t [ceil(M / 16)], one per 16 rows.
    """

    spec: QuantizeSpec
    shape: tuple[int, int]
    given: tuple[bool, bool, bool, bool]
    by_tile: bool = False

    @property
    def rule(self) -> ShardingRule:
        columns_have_blocks = self.spec.columnwise or self.spec.two_dimensional
        m = extent("m", self.shape[0], GROUP if columns_have_blocks else 1)
        k = extent("k", self.shape[1], GROUP)
        matrix, transposed = f"{m.whole} {k.whole}", f"{k.whole} {m.whole}"
        maxima = m.whole if self.spec.format.row_scaled or self.by_tile else "p"
        maxima_t = m.blocks if self.by_tile else "q"
        optional = zip((maxima, maxima_t, matrix, transposed), self.given, strict=True)
        takes = [matrix, *(operand_axes for operand_axes, present in optional if present)]
        outputs = []
        if self.spec.rowwise:
            outputs += [f"{m.whole} {k.bytes}", f"{m.whole} {k.blocks}"]
        if self.spec.columnwise:
            outputs += [f"{k.whole} {m.bytes}", f"{k.whole} {m.blocks}"]
        return ShardingRule.from_extents(f"{', '.join(takes)} -> {', '.join(outputs)}", m, k)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows, depth = operands[0].shape
        descriptions = []
        for r, c in ((rows, depth),) * self.spec.rowwise + ((depth, rows),) * self.spec.columnwise:
            descriptions.append(jax.ShapeDtypeStruct((r, c // 2), jnp.uint8))
            descriptions.append(jax.ShapeDtypeStruct((r, ceil_div(c, GROUP)), jnp.float8_e4m3fn))
        return tuple(descriptions)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from .....common.kernels import nvfp4

        spec, (x, *rest) = self.spec, arrays
        rows, depth = x.shape
        remaining = iter(rest)
        inputs = [next(remaining) if present else None for present in self.given]
        options = nvfp4.Options.of(spec, self.by_tile)
        launch = nvfp4.blocks((rows, depth), spec.rowwise, spec.columnwise, options)
        return tuple(array for array in run(launch, [x, *inputs]) if array is not None)


def quantize_by_kernels(x: Array, inputs: QuantizeInputs, request: QuantizeRequest) -> Quantized:
    """Compute a request with kernels."""
    spec = request.spec
    counts = {"m": request.axis, "k": x.ndim - request.axis}
    if request.maxima_per_tile:
        amax, amax_t = _maxima_of_tiles(spec, inputs, request.shape[0])
    else:
        amax, amax_t = _maxima(x, spec, inputs, counts)
    random = inputs.random if spec.stochastic and inputs.random is not None else (None, None)
    of_columns = random[1]
    if spec.transposes and random[0] is not None:
        of_columns = turned(random[0], request.axis)
    # For columns alone the kernel reads no row numbers, and the reverse.
    used = (
        amax if spec.rowwise else None,
        amax_t if spec.columnwise else None,
        random[0] if spec.rowwise else None,
        of_columns if spec.columnwise else None,
    )
    present = tuple(array is not None for array in used)
    kernel = NVFP4Blocks(spec, request.shape, present, request.maxima_per_tile)  # pyright: ignore
    results = list(call_on_axes(kernel, counts, x, *(array for array in used if array is not None)))
    rows = (results.pop(0), results.pop(0)) if spec.rowwise else (None, None)
    columns = (results.pop(0), results.pop(0)) if spec.columnwise else (None, None)
    scale, scale_t = (
        None if array is None else array.reshape(size, ceil_div(depth, GROUP))
        for array, (size, depth) in ((rows[1], request.shape), (columns[1], request.shape[::-1]))
    )
    codes, codes_t = (
        None if array[0] is None else unpack_e2m1(array[0]) for array in (rows, columns)
    )
    maxima = used[:2]
    if request.maxima_per_tile:
        maxima = (
            inputs.amax if spec.rowwise else None,
            inputs.amax if spec.transposes else inputs.amax_t,
        )
    quantized = Quantized(
        codes, scale, codes_t, scale_t, maxima[0], maxima[1] if spec.columnwise else None
    )
    return quantized.reshaped(x.shape, request.axis)


def _maxima_of_tiles(
    spec: QuantizeSpec, inputs: QuantizeInputs, rows: int
) -> tuple[Array | None, Array | None]:
    """Expand the caller's per-tile maxima to rows [M], and to 16-row tiles."""
    assert spec.tile is not None
    by_row = None if inputs.amax is None else jnp.repeat(inputs.amax[:, 0], spec.tile[0])[:rows]
    by_tile = inputs.amax if spec.transposes else inputs.amax_t
    return by_row, None if by_tile is None else by_tile.reshape(-1)


def _maxima(
    x: Array, spec: QuantizeSpec, inputs: QuantizeInputs, counts: dict[str, int]
) -> tuple[Array | None, Array | None]:
    """Maxima for both directions, float32 [1], or [M] for one scale per row; absent maxima are measured."""
    amax, amax_t = inputs.amax, inputs.amax_t
    if spec.format.row_scaled:
        if amax is None and spec.rowwise:
            (amax,) = call_on_axes(
                AbsoluteMaximum(by_rows=True), {"r": counts["m"], "w": counts["k"]}, x
            )
            amax = amax.reshape(-1)
        if amax_t is None and spec.columnwise:
            (amax_t,) = call_on_axes(AbsoluteMaximum(), {"r": counts["m"], "w": counts["k"]}, x)
            amax_t = exact.maximum_over_axes(amax_t, inputs.mesh_axes)
        return amax, amax_t
    if amax is None and (spec.rowwise or not spec.hadamard):
        (amax,) = call_on_axes(AbsoluteMaximum(), {"r": counts["m"], "w": counts["k"]}, x)
        amax = exact.maximum_over_axes(amax, inputs.mesh_axes)
    if not spec.columnwise or spec.transposes:
        return amax, amax
    if amax_t is None:
        kernel = TransformedMaximum(spec.random_sign, prod(x.shape[: counts["m"]]))
        measured = call_on_axes(kernel, counts, x)[0] if spec.hadamard else None
        amax_t = amax if measured is None else exact.maximum_over_axes(measured, inputs.mesh_axes)
    return amax, amax_t


FORMAT_ROWS = tuple(
    FormatRow(form, quantize, dequantize, quantize_by_kernels, check)
    for form in NVFP4_FORMATS.values()
)
