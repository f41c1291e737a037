"""Block scales with the padding that matrix instructions read: 128 matrix rows, and 4 blocks along K.

Tensors in this package store scales without padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from ...common.checks import member, switch
from ...common.formats import ceil_div, round_up
from ..runtime.checks import check_array
from .scaling_modes import ScalingMode

_ROWS, _BLOCKS = 128, 4


def apply_padding_to_scale_inv(
    scale_inv: Array,
    scaling_mode: ScalingMode,
    data_shape: Sequence[int],
    is_colwise: bool = False,
    flatten_axis: int = -1,
) -> Array:
    """Append zero bits to block scales, up to multiples of 128 rows and 4 blocks.

    Args:
        scale_inv: Scales without padding; per-tensor scales are returned unchanged.
        scaling_mode: Format of the scales.
        data_shape: Shape of the quantized array.
        is_colwise: Whether the scales belong to columns.
        flatten_axis: Axis at which data is flattened to a matrix.

    Raises:
        ValueError: `scale_inv` does not have the expected scale shape.
    """
    shape = _shape(scale_inv, scaling_mode, data_shape, is_colwise, flatten_axis)
    if shape is None:
        return scale_inv
    if scale_inv.shape != shape:
        raise ValueError(
            f"scale_inv has shape {scale_inv.shape} for data {tuple(data_shape)}; pass scales {shape} without padding"
        )
    multiples = _multiples(scaling_mode, is_colwise)
    padded = [
        (0, round_up(size, multiple) - size)
        for size, multiple in zip(shape, multiples, strict=True)
    ]
    if scale_inv.dtype.itemsize > 1:
        return jnp.pad(scale_inv, padded)
    # The bits are zeros: float8_e8m0fnu has no value 0.
    return jnp.pad(scale_inv.view(jnp.uint8), padded).view(scale_inv.dtype)


def remove_padding_from_scale_inv(
    scale_inv: Array,
    scaling_mode: ScalingMode,
    data_shape: Sequence[int],
    is_colwise: bool = False,
    flatten_axis: int = -1,
) -> Array:
    """Slice an array's block scales from padded ones; the inverse of `apply_padding_to_scale_inv`.

    Args:
        scale_inv: Scales with or without padding.
        scaling_mode: Format of the scales.
        data_shape: Shape of the quantized array.
        is_colwise: Whether the scales belong to columns.
        flatten_axis: Axis at which data is flattened to a matrix.

    Raises:
        ValueError: `scale_inv` is smaller than the scales.
    """
    shape = _shape(scale_inv, scaling_mode, data_shape, is_colwise, flatten_axis)
    if shape is None:
        return scale_inv
    if scale_inv.ndim != 2 or any(
        have < need for have, need in zip(scale_inv.shape, shape, strict=True)
    ):
        raise ValueError(
            f"scale_inv has shape {scale_inv.shape} for data {tuple(data_shape)}; pass at least {shape}"
        )
    return scale_inv[: shape[0], : shape[1]]


def _shape(
    scale_inv: Array,
    mode: ScalingMode,
    data_shape: Sequence[int],
    is_colwise: bool,
    flatten_axis: int,
) -> tuple[int, int] | None:
    """Scale shape without padding; None for one scale per tensor."""
    check_array("scale_inv", scale_inv)
    member("scaling_mode", mode, ScalingMode)
    switch("is_colwise", is_colwise)
    if mode.format is None or mode.format.block is None:
        return None
    rows, depth = math.prod(data_shape[:flatten_axis]), math.prod(data_shape[flatten_axis:])
    if is_colwise:
        rows, depth = depth, rows
    block = mode.format.block
    outer, inner = ceil_div(rows, block[0]), ceil_div(depth, block[1])
    return (inner, outer) if is_colwise and not mode.is_colwise_transposed else (outer, inner)


def _multiples(mode: ScalingMode, is_colwise: bool) -> tuple[int, int]:
    columns_last = is_colwise and not mode.is_colwise_transposed
    return (_BLOCKS, _ROWS) if columns_last else (_ROWS, _BLOCKS)
