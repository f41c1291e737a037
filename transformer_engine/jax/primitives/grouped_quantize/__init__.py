"""FP8 codes of a stack of matrices, one multiplier a matrix, in both directions."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Table
from ....common.formats import Element
from ..platforms import computed
from . import reference, triton
from .request import StackCodes, StackRequest

__all__ = ["TABLE", "StackCodes", "StackRequest", "quantize_stack"]

TABLE: Table[StackRequest] = Table("jax_grouped_quantize", (triton.BACKEND, reference.BACKEND))


def quantize_stack(
    x: Array, multiplier: Array, element: Element, rowwise: bool = True, columnwise: bool = True
) -> StackCodes:
    """codes [G, R, C] = saturate(x [G, R, C] * multiplier [G]), their transposes [G, C, R], and every maximum.

    A multiplier of 0 is read as 1.
    """
    groups, rows, columns = x.shape
    directions = (rowwise, columnwise)
    return computed(
        TABLE, lambda platform: StackRequest(groups, rows, columns, jnp.dtype(x.dtype), platform), x,
        multiplier.astype(jnp.float32), element=element, directions=directions,
    )  # fmt: skip
