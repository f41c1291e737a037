"""The product of two unquantized matrices, by whatever XLA takes for it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from ..operand import Operand
from .reference import LAST_AXES
from .request import GemmRequest


def refuses(request: GemmRequest) -> str | None:
    if request.a_format is not None or request.b_format is not None:
        return "an operand is quantized"
    return None


def run(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    product = lax.dot_general(a.codes, b.codes, LAST_AXES, preferred_element_type=jnp.float32)
    return product.astype(dtype)


BACKEND = Backend[GemmRequest]("dot", refuses=refuses, bind=lambda request: run)
