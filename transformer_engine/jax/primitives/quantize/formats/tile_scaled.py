"""Formats with a scale per tile that depends on that tile only: FP8 with block scales, and MXFP8.

BLOCK_1D, BLOCK_2D: codes [R, K] = saturate(x * multiplier of its tile), tiles 1 x 128 or 128 x 128, float32 scales;
DeepSeek-V3's scheme (arXiv:2412.19437, section 3.3).

MXFP8: codes [R, K] = saturate(x * 2^(127 - e)), e = one byte for 32 elements; OCP Microscaling Formats (MX) 1.0, with
the exponent rounded up so that no element saturates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .....common.formats import BLOCK_1D, BLOCK_2D, MXFP8, ceil_div
from .....common.kernels.launch import Machine
from .....common.warning import warn_once
from ....runtime.checks import is_symbolic
from ....runtime.platform import hardware, processors
from ... import exact
from ...kernels import Kernel
from ...launching import run
from ...operand import Operand, turned
from ...partitioning import ShardingRule, extent
from ...several_axes import call_on_axes
from .. import tiles
from ..elements import (
    E8M0_LARGEST,
    E8M0_NAN,
    cast,
    e8m0_from_float,
    scale_from_amax,
    times_power,
    value_for_inf,
)
from ..spec import FormatRow, Quantized, QuantizeInputs, QuantizeRequest, QuantizeSpec, jax_dtype

# (x [*R, *K], spec, where K begins) -> codes [*R, *K], and one scale per tile [.., ceil(R/r), .., ceil(K/c)]
Encode = Callable[[Array, QuantizeSpec, int], tuple[Array, Array]]
MXFP8_BLOCK = 32


def encode_blocks(x: Array, spec: QuantizeSpec, axis: int) -> tuple[Array, Array]:
    """Encode to codes [*R, *K], and scales float32 [.., ceil(R/r), .., ceil(K/128)]."""
    assert spec.tile is not None
    blocks = tiles.cut(x, spec.tile, axis)
    scale = scale_from_amax(
        tiles.tile_amax(blocks, axis),
        spec.element.maximum,
        power_of_two=spec.power_of_two,
        epsilon=spec.epsilon,
        value_for_inf=value_for_inf(x.dtype),
    )
    scale, inverse = tiles.materialize_scales((scale, exact.reciprocal(scale)))
    codes = cast(blocks.astype(jnp.float32) * tiles.spread(scale, axis), spec.element)
    return tiles.join(codes, x.shape, axis), inverse


def encode_mxfp8(x: Array, spec: QuantizeSpec, axis: int) -> tuple[Array, Array]:
    """Encode to codes [*R, *K], exponents float8_e8m0fnu [.., ceil(R/r), .., ceil(K/32)], one per r x 32 tile."""
    assert spec.tile is not None
    blocks = tiles.cut(x, spec.tile, axis)
    amax = tiles.tile_amax(blocks, axis)
    exponents = e8m0_from_float(exact.multiply(amax, 1.0 / spec.element.maximum))
    exponents = tiles.materialize_scales(exponents)
    # 1 / 2^(e - 127) = 2^((254 - e) - 127); NaN stays NaN.
    inverse = jnp.where(exponents == E8M0_NAN, E8M0_NAN, E8M0_LARGEST - exponents)
    codes = cast(times_power(blocks.astype(jnp.float32), tiles.spread(inverse, axis)), spec.element)
    return tiles.join(codes, x.shape, axis), lax.bitcast_convert_type(
        exponents.astype(jnp.uint8), jnp.float8_e8m0fnu
    )


def check_mxfp8(rows: int, depth: int, spec: QuantizeSpec) -> None:
    """Warn once about a matrix with partial blocks; its codes are right, but NVIDIA's MXFP8 products reject it.

    Only extents along blocks count: K for row-wise codes [M, K], M for column-wise codes.
    """
    extents = {"K": depth} if spec.rowwise or spec.two_dimensional else {}
    extents |= {"M": rows} if spec.columnwise or spec.two_dimensional else {}
    partial = [
        name for name, extent in extents.items() if not is_symbolic(extent) and extent % MXFP8_BLOCK
    ]
    if partial:
        warn_once(
            "MXFP8: partial blocks",
            f"a matrix [M={rows}, K={depth}] is quantized to MXFP8, whose scales cover {MXFP8_BLOCK} elements: blocks "
            f"at the edge are padded with zeros; pad {' and '.join(partial)} to a multiple of {MXFP8_BLOCK}",
            stacklevel=4,
        )


def multiply_mxfp8(values: Array, scale: Array) -> Array:
    """Multiply float32 tiles by E8M0 scales."""
    return times_power(values, lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32))


def quantize(
    x: Array, spec: QuantizeSpec, inputs: QuantizeInputs, axis: int, encode: Encode
) -> Quantized:
    """Quantize x [*M, *K], whose K begins at axis, in the directions that spec requests."""
    codes = scale = codes_t = scale_t = None
    if spec.rowwise or spec.transposes:
        codes, scale = encode(x, spec, axis)
    if spec.columnwise:
        if codes is not None and scale is not None and spec.transposes:
            codes_t, scale_t = turned(codes, axis), turned(scale, axis)
        else:
            codes_t, scale_t = encode(turned(x, axis), spec, x.ndim - axis)
    turned_shape = (*x.shape[axis:], *x.shape[:axis])
    return Quantized(
        codes=codes if spec.rowwise else None,
        scale=tiles.matrix_of_scales(scale, spec, x.shape, axis) if spec.rowwise else None,
        codes_t=codes_t,
        scale_t=tiles.matrix_of_scales(scale_t, spec, turned_shape, x.ndim - axis),
    )


def dequantize(operand: Operand, scale: Array, multiply: Callable[[Array, Array], Array]) -> Array:
    """Compute codes * scale; multiply: (float32 tiles, their scales) -> the product."""
    assert operand.format is not None and operand.format.block is not None
    axis = operand.axis
    values = tiles.cut(operand.codes.astype(jnp.float32), operand.format.block, axis)
    return tiles.join(multiply(values, tiles.spread(scale, axis)), operand.codes.shape, axis)


@dataclass(frozen=True)
class Tiles(Kernel):
    """Quantize x [M, K] with block scales: codes and scale, codes_t and scale_t, or both.

    Attributes:
        spec: Format and directions.
        shape: Full matrix shape; each shard contains full tiles.
    """

    spec: QuantizeSpec
    shape: tuple[int, int]

    @property
    def rule(self) -> ShardingRule:
        spec = self.spec
        assert spec.tile is not None
        down, along = spec.tile
        # Columnwise codes have the transposed tile.
        down = max(down, along) if spec.columnwise else down
        m, k = extent("m", self.shape[0], down), extent("k", self.shape[1], along)
        # 128 x 128 blocks have one scale; otherwise every row has its own.
        rows, columns = (m.blocks, k.blocks) if spec.format == BLOCK_2D else (m.whole, k.whole)
        outputs = []
        if spec.rowwise:
            outputs += [f"{m.whole} {k.whole}", f"{rows} {k.blocks}"]
        if spec.columnwise:
            outputs += [f"{k.whole} {m.whole}", f"{columns} {m.blocks}"]
        return ShardingRule.from_extents(f"{m.whole} {k.whole} -> {', '.join(outputs)}", m, k)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        spec, (rows, depth) = self.spec, operands[0].shape
        assert spec.format.block is not None
        down, along = spec.format.block
        scale_dtype = jnp.float8_e8m0fnu if spec.format == MXFP8 else jnp.float32
        descriptions = []
        for r, c in ((rows, depth),) * spec.rowwise + ((depth, rows),) * spec.columnwise:
            descriptions.append(jax.ShapeDtypeStruct((r, c), jax_dtype(spec.element)))
            descriptions.append(
                jax.ShapeDtypeStruct((ceil_div(r, down), ceil_div(c, along)), scale_dtype)
            )
        return tuple(descriptions)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from .....common.kernels import block_cast, mxfp8

        spec, (x,) = self.spec, arrays
        rows, depth = x.shape
        options = ((rows, depth), spec.element, spec.rowwise, spec.columnwise)
        if spec.format == MXFP8:
            results = run(mxfp8.blocks(*options, square=spec.two_dimensional), arrays)
            return tuple(
                lax.bitcast_convert_type(array, jnp.float8_e8m0fnu) if index % 2 else array
                for index, array in enumerate(array for array in results if array is not None)
            )
        scaling: dict[str, Any] = {
            "power_of_two": spec.power_of_two,
            "epsilon": spec.epsilon,
            "value_for_inf": value_for_inf(x.dtype),
        }
        if spec.format == BLOCK_2D:
            launch = block_cast.square_blocks(*options, **scaling)
        else:
            gpu = processors()
            machine = Machine(gpu.count, gpu.shared_memory, x.dtype.itemsize, hardware().threads)
            launch = block_cast.row_blocks(*options, **scaling, machine=machine)
        return tuple(array for array in run(launch, arrays) if array is not None)


def quantize_by_kernels(x: Array, inputs: QuantizeInputs, request: QuantizeRequest) -> Quantized:
    """Compute a request with kernels: both directions in one launch."""
    spec = request.spec
    kernel = Tiles(spec, request.shape)
    matrices = kernel.results(jax.ShapeDtypeStruct(request.shape, request.dtype))
    results = call_on_axes(kernel, {"m": request.axis, "k": x.ndim - request.axis}, x)
    # Scales take the matrix layout; they are few.
    parts = [
        result.reshape(matrices[i].shape) if i % 2 else result for i, result in enumerate(results)
    ]
    rows = (parts.pop(0), parts.pop(0)) if spec.rowwise else (None, None)
    columns = (parts.pop(0), parts.pop(0)) if spec.columnwise else (None, None)
    return Quantized(*rows, *columns).reshaped(x.shape, request.axis)


_BLOCK_ROWS = (
    FormatRow(
        form,
        functools.partial(quantize, encode=encode_blocks),
        functools.partial(dequantize, multiply=exact.scaled),
        quantize_by_kernels,
    )
    for form in (BLOCK_1D, BLOCK_2D)
)
FORMAT_ROWS = (
    *_BLOCK_ROWS,
    FormatRow(
        MXFP8,
        functools.partial(quantize, encode=encode_mxfp8),
        functools.partial(dequantize, multiply=multiply_mxfp8),
        quantize_by_kernels,
        check_mxfp8,
    ),
)
