"""Grouped tensors: codes and scales for ragged rows or a matrix stack, and their unquantized form."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...common.checks import switch
from ..primitives import exact
from ..primitives.grouped_gemm import group_alignment
from ..primitives.grouped_quantize import group_of_rows, of_rows
from ..primitives.operand import Operand
from .scaling_modes import ScalingMode, TensorUsage
from .tensors import AbstractBaseTensor1x, ScaledTensor, ScaledTensor1x, ScaledTensorFactory


@dataclass(frozen=True)
class RowLayout:
    """Mapping between M grouped rows and P padded rows, in which every group begins at a multiple of a block.

    Attributes:
        group: Group index for every padded row, int32 [P]; G for rows outside any group.
        row: Row index that each padded row contains, int32 [P], M for padding; None: there is no padding.
        padded_row: Padded index for every row, int32 [M], P for rows after the last group; None likewise.
    """

    group: Array
    row: Array | None = None
    padded_row: Array | None = None

    def pad(self, x: Array) -> Array:
        """Pad rows [M, ..]; zeros fill the padding."""
        return x if self.row is None else jnp.take(x, self.row, 0, mode="fill", fill_value=0)

    def unpad(self, x: Array) -> Array:
        """Extract the rows from a padded array [P, ..]; zeros for rows after the last group."""
        return (
            x
            if self.padded_row is None
            else jnp.take(x, self.padded_row, 0, mode="fill", fill_value=0)
        )


def row_layout(group_sizes: Array, rows: int, block: int) -> RowLayout:
    """Lay out M rows so that the groups begin at multiples of a block.

    It has P = (M // block + G) * block rows, which suffice for any sizes with a sum of at most M.
    """
    groups = group_sizes.shape[0]
    sizes = group_sizes.astype(jnp.int32)
    padded_sizes = -(-sizes // block) * block
    group = group_of_rows(padded_sizes, (rows // block + groups) * block)
    ends, padded_ends = jnp.cumsum(sizes), jnp.cumsum(padded_sizes)
    shift = jnp.append(padded_ends - padded_sizes - ends + sizes, 0)
    row = jnp.arange(group.shape[0], dtype=jnp.int32) - shift[group]
    row = jnp.where(row < jnp.append(ends, 0)[group], row, rows)
    group_of_row = group_of_rows(sizes, rows)
    padded_row = jnp.where(
        group_of_row < groups,
        jnp.arange(rows, dtype=jnp.int32) + shift[group_of_row],
        group.shape[0],
    )
    return RowLayout(group, row, padded_row)


def to_rows(values: Array, group: Array) -> Array:
    """Broadcast per-group values [G] to rows, by the group of every row; 1 for rows without a group."""
    return jnp.append(values, jnp.ones(1, values.dtype))[group]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scale_inv", "amax", "group_sizes"],
    meta_fields=[
        "scaling_mode",
        "dq_dtype",
        "is_colwise",
        "data_layout",
        "flatten_axis",
        "has_rht_applied",
        "original_shape",
    ],
)
@dataclass
class GroupedScaledTensor1x(AbstractBaseTensor1x, ScaledTensor):
    """Codes and scales in one direction for all groups.

    Attributes:
        data: Codes as in ScaledTensor1x; the groups are the first axis of a stack. With blocks along ragged rows, every
            group begins at a common multiple r of the block and 32, among (M // r + G) * r rows.
        scale_inv: float32 [G] with one scale per group, otherwise as in ScaledTensor1x, for data's blocks.
        amax: Absolute maxima, [G] with one scale per group, or one second-level scale per group.
        group_sizes: Rows per group, int32 [G]; None for a stack.
        original_shape: Shape [M, K] for grouped rows; None: data's shape.
        first_dims: Constructor argument: another name for group_sizes.
        last_dims: Constructor argument: group_sizes of transposed data.
        pre_swizzled: Constructor argument: False, since products swizzle the scales.

    The other arguments are as in `ScaledTensor1x`.
    """

    data: Array
    scale_inv: Array
    amax: Array
    group_sizes: Array | None
    scaling_mode: ScalingMode
    dq_dtype: Any
    is_colwise: bool
    data_layout: str
    flatten_axis: int
    has_rht_applied: bool
    original_shape: tuple[int, ...] | None

    def __init__(
        self,
        data: Array,
        scale_inv: Array,
        amax: Array,
        group_sizes: Array | None = None,
        scaling_mode: ScalingMode = ScalingMode.NO_SCALING,
        dq_dtype: Any = jnp.bfloat16,
        is_colwise: bool = False,
        data_layout: str = "N",
        flatten_axis: int = 1,
        has_rht_applied: bool = False,
        *,
        first_dims: Array | None = None,
        last_dims: Array | None = None,
        original_shape: tuple[int, ...] | None = None,
        pre_swizzled: bool = False,
    ):
        switch("pre_swizzled", pre_swizzled)
        if pre_swizzled:
            raise ValueError(
                "pre_swizzled=True, but scale_inv is stored row by row; leave pre_swizzled out"
            )
        # The fields are not checked, since the leaves of a pytree may be tracers, shapes or arbitrary objects.
        ragged = first_dims if first_dims is not None else last_dims
        self.data, self.scale_inv, self.amax = data, scale_inv, amax  # pyright: ignore[reportIncompatibleVariableOverride]
        self.group_sizes = group_sizes if ragged is None else ragged
        self.scaling_mode, self.dq_dtype, self.is_colwise = scaling_mode, dq_dtype, is_colwise
        self.data_layout, self.flatten_axis, self.has_rht_applied = (
            data_layout,
            flatten_axis,
            has_rht_applied,
        )
        self.original_shape = original_shape

    @property
    def first_dims(self) -> Array | None:
        """Group extents along data's first axis; None where they are equal."""
        return None if self.data_layout == "T" else self.group_sizes

    @property
    def last_dims(self) -> Array | None:
        """Group extents along data's last axis; None where they are equal."""
        return self.group_sizes if self.data_layout == "T" else None

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [M, K] for grouped rows, or the stack's shape, in the original axis order."""
        if self.original_shape is not None:
            return self.original_shape
        if self.data_layout != "T":
            return self.data.shape
        groups = int(self.group_sizes is None)  # the groups are the first axis of a stack
        leading, axes = self.data.shape[:groups], self.data.shape[groups:]
        return (*leading, *axes[self.flatten_axis :], *axes[: self.flatten_axis])

    def get_tensor(self, usage: TensorUsage) -> GroupedScaledTensor1x:
        """Return this tensor; raise ValueError if a matrix product reads the other direction for this usage."""
        self._one(self.data, self.scale_inv, self.amax).get_tensor(usage)
        return self

    @property
    def scales(self) -> Array | None:
        """Factors of the codes, float32 [G], if each group has one scale, otherwise None."""
        return self.scale_inv.reshape(-1) if self.scaling_mode.is_tensor_scaling() else None

    @property
    def codes(self) -> Array:
        """Codes [M, K] for grouped rows; a stack's data, [G, columns, rows] with data_layout "T"."""
        return (
            self.data.T if self.group_sizes is not None and self.data_layout == "T" else self.data
        )

    def operand(self) -> Operand:
        """Codes with the contracted axis last: [rows, K], or [G, rows, K] for a stack."""
        if self.group_sizes is not None:
            return self._one(self.data, self.scale_inv, self.amax).operand()
        each: Any = jax.vmap(lambda *leaves: self._one(*leaves).operand())
        return each(self.data, self.scale_inv, self.amax)

    def dequantize(self) -> Array:
        """Compute the values in dq_dtype: [M, K], or the stack."""
        if self.group_sizes is None:
            values: Any = jax.vmap(lambda *leaves: self._one(*leaves).values(self.dq_dtype))
            return values(self.data, self.scale_inv, self.amax)
        if not self.scaling_mode.is_tensor_scaling():
            return self._rows_of_blocks(self.group_sizes)
        codes = self.codes
        scales = of_rows(self.scale_inv, self.group_sizes, codes.shape[0])
        return exact.scaled(codes.astype(jnp.float32), scales[:, None]).astype(self.dq_dtype)

    def _rows_of_blocks(self, group_sizes: Array) -> Array:
        """Compute the values [M, K] from rows with block scales; see `grouped_blocks.encode_rows`."""
        form = self.scaling_mode.format
        assert form is not None
        form = form.columnwise if self.is_colwise else form
        assert form.block is not None
        rows, block = self.shape[0], form.block[int(self.is_colwise)]
        padded = rows != self.data.shape[int(self.data_layout == "T")]
        alignment = group_alignment(block)
        layout = (
            row_layout(group_sizes, rows, alignment)
            if padded
            else RowLayout(group_of_rows(group_sizes, rows))
        )
        amax = self.amax
        if form.levels is not None and not form.row_scaled and amax.size == group_sizes.size:
            of_rows = to_rows(amax, layout.group)
            amax = of_rows[None, ::block] if self.is_colwise else of_rows[:, None]
        values = self._one(self.data, self.scale_inv, amax).values(self.dq_dtype)
        return layout.unpad(values)

    def _one(self, data: Array, scale_inv: Array, amax: Array) -> ScaledTensor1x:
        return ScaledTensorFactory.create_1x(
            data,
            scale_inv,
            amax,
            self.scaling_mode,
            self.dq_dtype,
            self.is_colwise,
            self.data_layout,
            self.flatten_axis,
            self.has_rht_applied,
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "amax", "first_dims", "last_dims"],
    meta_fields=["original_shape"],
)
@dataclass
class GroupedNoScaleTensor(AbstractBaseTensor1x):
    """Unquantized value groups, with the quantized groups' interface.

    Args:
        data: Rows in groups, or a stack with the groups as first axis.
        amax: Absolute maxima, or None.
        first_dims: Rows per group, int32 [G]; None for a stack.
        last_dims: Columns per group for groups along the last axis, or None.
        original_shape: Shape of the values, by default data's shape.
        group_sizes: Former name for first_dims, read if first_dims is None.
    """

    data: Array
    amax: Array | None
    first_dims: Array | None
    last_dims: Array | None
    original_shape: tuple[int, ...] | None

    def __init__(
        self,
        data: Array,
        amax: Array | None = None,
        first_dims: Array | None = None,
        last_dims: Array | None = None,
        original_shape: tuple[int, ...] | None = None,
        *,
        group_sizes: Array | None = None,
    ):
        self.data, self.amax, self.last_dims = data, amax, last_dims
        self.first_dims = group_sizes if first_dims is None else first_dims
        self.original_shape = original_shape

    @property
    def group_sizes(self) -> Array | None:
        """Group extents, int32 [G]; None for a stack."""
        return self.last_dims if self.first_dims is None else self.first_dims

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def scales(self) -> Array | None:
        """None, since the values are unscaled."""
        return None

    @property
    def codes(self) -> Array:
        return self.data

    def dequantize(self) -> Array:
        return self.data

    def get_tensor(self, usage: TensorUsage) -> GroupedNoScaleTensor:
        """Return this tensor, which serves every usage."""
        return self
