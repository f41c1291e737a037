"""The literal product in float32, for every format and device: the oracle, and the emulation on a CPU."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from ....common.formats import FLOAT8
from ..operand import Operand, contraction
from ..quantize import decoded
from .request import GemmRequest


def run(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    """sum_k a[m, k] b[n, k] in float32, m, n and k being several axes each.

    One scale for a whole tensor is applied to the sum, block scales before it. Where an operand has a second-level
    scale per row, the second level of both is applied to the sum.
    """
    per_row = any(operand.format is not None and operand.format.row_scaled for operand in (a, b))
    of_a, of_b = (_values(_at_unit_amax(operand) if per_row else operand) for operand in (a, b))
    # HIGHEST: float32 operands would be rounded to TF32 on a GPU.
    product = lax.dot_general(of_a, of_b, contraction(a, b), precision=lax.Precision.HIGHEST)
    if per_row:
        product = _with_second_level(product, a, b)
    for operand in (a, b):
        if operand.format == FLOAT8:
            assert operand.scale is not None
            product = product * operand.scale.reshape((1,) * product.ndim)
    return product.astype(dtype)


def _at_unit_amax(operand: Operand) -> Operand:
    """The operand with its second-level scale left out; itself where the format has none."""
    unit = None if operand.format is None else operand.format.unit_amax
    if unit is None or operand.amax is None:
        return operand
    return replace(operand, amax=jnp.full(operand.amax.shape, unit, jnp.float32))


def _with_second_level(product: Array, a: Operand, b: Operand) -> Array:
    """product [*M, *N] of operands `_at_unit_amax`, times the maxima of a and b divided by each format's unit_amax.

    Where one of the operands has a single maximum, the two are multiplied first and the product by that vector.
    """
    ranges = 1.0
    factors: list[Array] = []
    both_vary = True
    for operand, trailing in ((a, b.axis), (b, 0)):
        form, amax = operand.format, operand.amax
        if form is None or form.unit_amax is None or amax is None:
            continue
        ranges *= form.unit_amax
        both_vary = both_vary and form.row_scaled
        shape = operand.codes.shape[: operand.axis] if form.row_scaled else (1,) * operand.axis
        factors.append(amax.reshape(*shape, *(1,) * trailing))
    product = product * jnp.float32(1.0 / ranges)
    if len(factors) == 2 and not both_vary:
        factors = [factors[0] * factors[1]]
    for factor in factors:
        product = product * factor
    return product


def _values(operand: Operand) -> Array:
    if operand.format is None or operand.format == FLOAT8:
        return operand.codes.astype(jnp.float32)
    return decoded(operand)


BACKEND = Backend[GemmRequest]("reference", bind=lambda request: run)
