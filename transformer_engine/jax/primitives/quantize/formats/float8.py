"""FP8 with one float32 scale for the whole matrix: given, or made from its absolute maximum."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from .....common.formats import FLOAT8
from ... import exact
from ...operand import Operand
from .. import float8, tiles
from ..format_row import FormatRow
from ..spec import Given, Quantized, QuantizeSpec
from ..triton_float8 import plan


def quantize(x: Array, spec: QuantizeSpec, given: Given, axis: int) -> Quantized:
    """x of any shape -> codes like x, one scale [1], and the maximum; the codes of both directions are the same."""
    amax = given.amax
    if amax is None:
        amax = exact.largest_over(float8.absolute_maximum(x), given.over)
    if given.multiplier is not None:
        multiplier = float8.given_multiplier(given.multiplier)
    else:
        multiplier = float8.scale_from_amax(
            amax, spec.element.maximum, power_of_two=spec.power_of_two, epsilon=spec.epsilon
        )
    multiplier, scale = tiles.settled((multiplier, exact.reciprocal(multiplier.astype(jnp.float32))))
    return Quantized(float8.encode(x, spec.element, multiplier), scale, amax=amax)


def dequantize(operand: Operand, scale: Array) -> Array:
    """codes * scale."""
    return exact.scaled(operand.codes.astype(jnp.float32), scale)


ROWS = (FormatRow(FLOAT8, quantize, dequantize, plan=plan),)
