"""The product of two unquantized matrices, by whatever XLA takes for it."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from ..operand import Operand, contraction
from .request import GemmRequest


def refuses(request: GemmRequest) -> str | None:
    if request.a_format is not None or request.b_format is not None:
        return "an operand is quantized"
    return None


def run(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    product = lax.dot_general(a.codes, b.codes, contraction(a, b), preferred_element_type=jnp.float32)
    return product.astype(dtype)


def run_narrow(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    """cuBLASLt sums in float32 and rounds once, where XLA would write float32 and round in a kernel of its own."""
    return lax.dot_general(a.codes, b.codes, contraction(a, b), preferred_element_type=dtype)


def bind(request: GemmRequest) -> Callable[..., Array]:
    narrow = request.platform == "cuda" and request.a_element == request.b_element == request.dtype
    return run_narrow if narrow else run


BACKEND = Backend[GemmRequest]("dot", refuses=refuses, bind=bind)
