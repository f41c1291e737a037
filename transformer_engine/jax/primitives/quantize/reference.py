"""Every format in plain jnp operations: float32, on any device, for any request."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
from jax import Array

from ....common.dispatch import Backend
from ..operand import turned
from . import tiles
from .formats import FORMATS
from .spec import Quantized, QuantizeInputs, QuantizeRequest, QuantizeSpec


# Compiled as one program also in eager mode, where it would take seconds operation by operation.
@functools.partial(jax.jit, static_argnames=("spec", "axis"))
def run(x: Array, inputs: QuantizeInputs, spec: QuantizeSpec, axis: int = 1) -> Quantized:
    """Quantize x [*M, *K] in the directions that spec requests."""
    form = FORMATS[spec.format.name]
    if spec.format.block is not None:
        assert spec.tile is not None
        down, along = spec.tile
        # Columnwise codes have the transposed tile.
        split_shape, at = tiles.split_axes(
            x.shape, axis, (max(down, along) if spec.columnwise else down, along)
        )
        return form.quantize(x.reshape(split_shape), spec, inputs, at).reshaped(x.shape, axis)
    result = form.quantize(x, replace(spec, rowwise=True, columnwise=False), inputs, axis)
    assert result.codes is not None
    return Quantized(
        codes=result.codes if spec.rowwise else None,
        scale=result.scale if spec.rowwise else None,
        codes_t=turned(result.codes, axis) if spec.columnwise else None,
        scale_t=result.scale if spec.columnwise else None,
        amax=result.amax,
    )


BACKEND = Backend[QuantizeRequest](
    "reference", bind=lambda request: functools.partial(run, spec=request.spec, axis=request.axis)
)
