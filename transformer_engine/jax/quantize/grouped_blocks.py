"""Block-scaled codes for grouped rows: every group is quantized as a separate matrix.

A block never covers rows from two groups: blocks along the rows begin at a group's first row, and each group has its
own NVFP4 second-level scale. Rows are therefore quantized in a padded layout. Every group begins at a multiple of both
the block and the 32 rows that products load together; zeros fill the remaining rows. The padded layout omits rows after
the last group, so they have no effect. Codes with blocks along the rows stay padded, since a Hadamard transform also
moves values into the padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..primitives import exact
from ..primitives.grouped_gemm import group_alignment
from ..primitives.grouped_quantize import group_of_rows
from ..primitives.quantize import hadamard_transform
from ..runtime.code_bits import name_leaves
from .grouped_tensors import GroupedScaledTensor1x, RowLayout, row_layout, to_rows
from .quantizers import Quantizer
from .tensors import ScaledTensor2x


def encode_rows(
    quantizer: Quantizer,
    x: Array,
    group_sizes: Array,
    directions: tuple[bool, bool],
    dtype: Any,
    mesh_axes: tuple[str, ...],
    aligned: bool,
) -> GroupedScaledTensor1x | ScaledTensor2x:
    """Quantize rows x [M, K] in groups with block scales.

    Args:
        quantizer: Quantizer for one group.
        x: Rows in groups.
        group_sizes: Rows per group [G], with a sum of at most M.
        directions: Whether to compute the row-wise and the column-wise codes.
        dtype: dtype of the dequantized tensor.
        mesh_axes: Manual mesh axes that shard the rows of the groups.
        aligned: Whether the caller guarantees that each entry in group_sizes is a multiple of the block.
    """
    spec = quantizer.spec(*directions)
    assert spec.tile is not None
    block_rows, block = spec.tile[0], max(spec.tile)
    name, quantizer = quantizer.checkpoint_name, replace(quantizer, checkpoint_name=None)
    compact = RowLayout(group_of_rows(group_sizes, x.shape[0]))
    padded = compact if aligned else row_layout(group_sizes, x.shape[0], group_alignment(block))
    padded_x = padded.pad(x) if directions[1] or block_rows > 1 else x
    levels = spec.format.levels is not None
    tensors = []
    for columns in (False, True):
        if not directions[columns]:
            continue
        layout, rows = (padded, padded_x) if columns or block_rows > 1 else (compact, x)
        amax, maxima = None, (None, None)
        if levels and not (spec.format.row_scaled and not columns):
            transposed = columns and not spec.two_dimensional
            scaled = (
                hadamard_transform(rows.T, spec.random_sign).T
                if transposed and spec.hadamard
                else rows
            )
            bits = exact.magnitude_bits(scaled).max(axis=1, initial=0)
            amax = exact.maximum_over_axes(
                _group_maxima(bits, layout.group, group_sizes.shape[0]), mesh_axes
            )
            of_rows = to_rows(amax, layout.group)
            maxima = (
                (None, of_rows[None, ::block])
                if transposed
                else (of_rows[::block_rows, None], None)
            )
        quantized: Any = quantizer.encode(rows, not columns, columns, dtype, maxima=maxima)[0]
        data, scale = quantized.data, quantized.scale_inv
        if not columns and scale.shape[0] == rows.shape[0]:  # every row has its own scales
            data, scale = layout.unpad(data), layout.unpad(scale)
        leaves = data, scale, quantized.amax if amax is None else amax
        tensors.append(
            GroupedScaledTensor1x(
                *name_leaves(leaves, name),
                group_sizes,
                quantized.scaling_mode,
                dtype,
                columns,
                quantized.data_layout,
                quantized.flatten_axis,
                quantized.has_rht_applied,
                original_shape=x.shape,
            )
        )
    return tensors[0] if len(tensors) == 1 else ScaledTensor2x(*tensors)


def _group_maxima(bits: Array, group: Array, groups: int) -> Array:
    """Largest magnitude among each group's rows, float32 [G], from the magnitude bits of every row."""
    belongs = group[None] == jnp.arange(groups)[:, None]
    return exact.bits_to_float(jnp.where(belongs, bits[None], 0).max(axis=1, initial=0))
