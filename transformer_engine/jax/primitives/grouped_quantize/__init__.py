"""FP8 codes for a matrix stack, one multiplier per matrix, in both directions; and for grouped rows."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Table
from ....common.formats import Element
from ..platforms import compute
from . import reference, triton
from .reference import RowCodes, RowsRequest, StackCodes, StackRequest, group_of_rows, of_rows

__all__ = [
    "ROWS",
    "TABLE",
    "RowCodes",
    "RowsRequest",
    "StackCodes",
    "StackRequest",
    "group_of_rows",
    "of_rows",
    "quantize_rows",
    "quantize_stack",
]

TABLE: Table[StackRequest] = Table("jax_grouped_quantize", (triton.BACKEND, reference.BACKEND))
ROWS: Table[RowsRequest] = Table("jax_grouped_quantize_rows", (triton.ROWS, reference.ROWS))


def quantize_stack(
    x: Array, multiplier: Array, element: Element, rowwise: bool = True, columnwise: bool = True
) -> StackCodes:
    """Quantize a stack: codes [G, R, C] = saturate(x [G, R, C] * multiplier [G]), their transposes, and the maxima.

    A zero multiplier is read as 1.
    """
    groups, rows, columns = x.shape
    directions = (rowwise, columnwise)
    return compute(
        TABLE,
        lambda platform: StackRequest(groups, rows, columns, jnp.dtype(x.dtype), platform),
        x,
        multiplier.astype(jnp.float32),
        element=element,
        directions=directions,
    )


def quantize_rows(
    x: Array,
    group_sizes: Array,
    multiplier: Array | None,
    element: Element,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    mesh_axes: tuple[str, ...] = (),
) -> RowCodes:
    """Quantize rows in groups: codes [M, K] = saturate(x [M, K] * the row's group multiplier), and the maxima.

    Args:
        x: Values [M, K].
        group_sizes: Rows per group, int32 [G]. Rows after the last group use the multiplier 1 and no maximum.
        multiplier: float32 [G]; None derives the multipliers from the maxima.
        element: Code element type.
        power_of_two: Whether derived multipliers are powers of two.
        epsilon: Least maximum for derived multipliers.
        mesh_axes: Manual mesh axes over which the rows of the groups are sharded: derived multipliers follow from
            the maxima over all rows. With given multipliers, the maxima cover this device only.
    """
    rows, columns = x.shape
    multiplier32 = None if multiplier is None else multiplier.astype(jnp.float32)
    return compute(
        ROWS,
        lambda platform: RowsRequest(
            group_sizes.shape[0], rows, columns, jnp.dtype(x.dtype), platform
        ),
        x,
        group_sizes.astype(jnp.int32),
        multiplier32,
        element=element,
        scaling=(power_of_two, float(epsilon)),
        mesh_axes=mesh_axes,
    )
