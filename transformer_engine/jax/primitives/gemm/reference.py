"""The literal product in float32, for every format and device: the oracle, and the emulation on a CPU."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from ....common.formats import FLOAT8
from ..operand import Operand, contraction
from ..quantize import decoded
from .request import GemmRequest


def run(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    """sum_k a[m, k] b[n, k] in float32, m, n and k being several axes each.

    One scale for a whole tensor is applied to the sum, block scales before it.
    """
    # HIGHEST: float32 operands would be rounded to TF32 on a GPU.
    product = lax.dot_general(_values(a), _values(b), contraction(a, b), precision=lax.Precision.HIGHEST)
    for operand in (a, b):
        if operand.format == FLOAT8:
            assert operand.scale is not None
            product = product * operand.scale.reshape((1,) * product.ndim)
    return product.astype(dtype)


def _values(operand: Operand) -> Array:
    if operand.format is None or operand.format == FLOAT8:
        return operand.codes.astype(jnp.float32)
    return decoded(operand)


BACKEND = Backend[GemmRequest]("reference", bind=lambda request: run)
