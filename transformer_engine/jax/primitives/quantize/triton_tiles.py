"""Formats with a scale a tile by kernels, both directions in one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common.formats import BLOCK_1D, BLOCK_2D, MXFP8, ceil_div
from ....common.kernels.launch import Launch
from ...platform import processors
from ..kernels import Kernel
from ..launching import run
from ..partitioning import Extent, extent
from ..several_axes import call_on_axes
from .float8 import value_for_inf
from .format_row import PlannedCall
from .spec import Given, Quantized, QuantizeSpec, Request, jax_dtype


def _row_blocks(spec: QuantizeSpec, shape: tuple[int, int], dtype: jnp.dtype) -> Launch:
    from ....common.kernels import block_cast  # it imports triton

    return block_cast.row_blocks(
        shape, spec.element, spec.rowwise, spec.columnwise, power_of_two=spec.power_of_two, epsilon=spec.epsilon,
        value_for_inf=value_for_inf(dtype), processors=processors().count,
    )  # fmt: skip


def _square_blocks(spec: QuantizeSpec, shape: tuple[int, int], dtype: jnp.dtype) -> Launch:
    from ....common.kernels import block_cast

    return block_cast.square_blocks(
        shape, spec.element, spec.rowwise, spec.columnwise, power_of_two=spec.power_of_two, epsilon=spec.epsilon,
        value_for_inf=value_for_inf(dtype),
    )  # fmt: skip


def _mxfp8(spec: QuantizeSpec, shape: tuple[int, int], dtype: jnp.dtype) -> Launch:
    from ....common.kernels import mxfp8

    return mxfp8.blocks(shape, spec.element, spec.rowwise, spec.columnwise, square=spec.two_dimensional)


_LAUNCHES: dict[str, Callable[[QuantizeSpec, tuple[int, int], jnp.dtype], Launch]] = {
    BLOCK_1D.name: _row_blocks, BLOCK_2D.name: _square_blocks, MXFP8.name: _mxfp8,
}  # fmt: skip


@dataclass(frozen=True)
class Tiles(Kernel):
    """x [M, K] -> [codes, scale], [codes_t, scale_t]; shape: of the whole matrix, whose tiles are not cut"""

    spec: QuantizeSpec
    shape: tuple[int, int]

    @property
    def extents(self) -> tuple[Extent, Extent]:
        spec = self.spec
        assert spec.tile is not None
        down, along = spec.tile
        # The columns' codes have the tile turned.
        down = max(down, along) if spec.columnwise else down
        return extent("m", self.shape[0], down), extent("k", self.shape[1], along)

    @property
    def rule(self) -> str:
        spec, (m, k) = self.spec, self.extents
        # Of 128 x 128 blocks one scale; else every row has its own.
        rows, columns = (m.blocks, k.blocks) if spec.format == BLOCK_2D else (m.whole, k.whole)
        made = []
        if spec.rowwise:
            made += [f"{m.whole} {k.whole}", f"{rows} {k.blocks}"]
        if spec.columnwise:
            made += [f"{k.whole} {m.whole}", f"{columns} {m.blocks}"]
        return f"{m.whole} {k.whole} -> {', '.join(made)}"

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        spec, (rows, depth) = self.spec, operands[0].shape
        made = []
        if spec.rowwise:
            made += self._direction(rows, depth)
        if spec.columnwise:
            made += self._direction(depth, rows)
        return tuple(made)

    def _direction(self, rows: int, depth: int) -> list[jax.ShapeDtypeStruct]:
        spec = self.spec
        assert spec.format.block is not None
        down, along = spec.format.block
        codes = jax.ShapeDtypeStruct((rows, depth), jax_dtype(spec.element))
        dtype = jnp.float8_e8m0fnu if spec.format == MXFP8 else jnp.float32
        return [codes, jax.ShapeDtypeStruct((ceil_div(rows, down), ceil_div(depth, along)), dtype)]

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        rows, depth = arrays[0].shape
        launch = _LAUNCHES[self.spec.format.name](self.spec, (rows, depth), arrays[0].dtype)
        made = [array for array in run(launch, arrays) if array is not None]
        if self.spec.format != MXFP8:
            return tuple(made)
        exponents = [lax.bitcast_convert_type(array, jnp.float8_e8m0fnu) for array in made[1::2]]
        return tuple(array for pair in zip(made[::2], exponents, strict=True) for array in pair)


def plan(request: Request) -> PlannedCall:
    """The codes and scales of matrices, as one spec asks for them."""
    spec = request.spec
    kernel = Tiles(spec, request.shape)
    flat = kernel.results(jax.ShapeDtypeStruct(request.shape, request.dtype))

    def quantize(x: Array, given: Given) -> Quantized:
        results = call_on_axes(kernel, {"m": request.axis, "k": x.ndim - request.axis}, x)
        # Scales are those of the matrix; they are few.
        made = [one.reshape(flat[i].shape) if i % 2 else one for i, one in enumerate(results)]
        rows = (made.pop(0), made.pop(0)) if spec.rowwise else (None, None)
        columns = (made.pop(0), made.pop(0)) if spec.columnwise else (None, None)
        return Quantized(*rows, *columns).with_axes(x.shape, request.axis)

    return quantize
