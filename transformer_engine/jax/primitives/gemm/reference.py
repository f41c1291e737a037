"""XLA products: from values in their dtype, and in float32 for every format and device.

The float32 product is the reference, and the emulation on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from ....common.formats import FLOAT8
from ..operand import Operand, contraction
from ..quantize import decoded
from .request import GemmRequest

_IN_FLOAT32: Any = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}


def run(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool, widens: bool = False) -> Array:
    """Compute sum_k a[m, k] b[n, k] in float32, rounded to dtype; m, n and k may be several axes each.

    A per-tensor scale is applied to the sum, block scales are applied before it. If an operand has a
    second-level scale per row, or if the factors are narrow, the second level of both operands is applied to the sum.

    Args:
        a: Operand [*M, *K].
        b: Operand [*N, *K].
        dtype: dtype of the product.
        exact: Accepted without effect; partial sums are always float32.
        widens: Whether the factors are bfloat16, which must represent the codes times their block scales.
    """
    per_row = any(operand.format is not None and operand.format.row_scaled for operand in (a, b))
    on_sum = per_row or widens
    values = []
    for operand in (a, b):
        form = operand.format
        if on_sum and form is not None and form.unit_amax is not None and operand.amax is not None:
            # Omits the second-level scale.
            operand = replace(
                operand, amax=jnp.full(operand.amax.shape, form.unit_amax, jnp.float32)
            )
        one_scale = form is None or form == FLOAT8
        factor = operand.codes.astype(jnp.float32) if one_scale else decoded(operand)
        values.append(factor.astype(jnp.bfloat16) if widens else factor)
    # HIGHEST: float32 operands would be rounded to TF32 on a GPU.
    product = lax.dot_general(values[0], values[1], contraction(a, b), **_IN_FLOAT32)
    if on_sum:
        product = with_second_level(product, a, b)
    for operand in (a, b):
        if operand.format == FLOAT8:
            assert operand.scale is not None
            product = product * operand.scale.reshape((1,) * product.ndim)
    return product.astype(dtype)


def with_second_level(product: Array, a: Operand, b: Operand) -> Array:
    """Multiply a product [*M, *N] without second-level scales by the maxima of a and b, over each format's unit_amax.

    If one operand has a single maximum, the maxima are multiplied first, and the product by that vector.
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


def unsupported_reason(request: GemmRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if request.a_format is not None or request.b_format is not None:
        return "an operand is quantized"
    return None


def run_values(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    product = lax.dot_general(
        a.codes, b.codes, contraction(a, b), preferred_element_type=jnp.float32
    )
    return product.astype(dtype)


def run_narrow(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    """Sum in float32 and round once in cuBLASLt; XLA would write float32 and round in another kernel."""
    return lax.dot_general(a.codes, b.codes, contraction(a, b), preferred_element_type=dtype)


def bind_values(request: GemmRequest) -> Callable[..., Array]:
    narrow = request.platform == "cuda" and request.a_element == request.b_element == request.dtype
    return run_narrow if narrow else run_values


DOT = Backend[GemmRequest]("dot", unsupported_reason=unsupported_reason, bind=bind_values)
BACKEND = Backend[GemmRequest]("reference", bind=lambda request: run)
