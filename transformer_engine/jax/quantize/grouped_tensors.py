"""Grouped tensors: codes and scales of ragged rows or of a stack of matrices, and their unquantized form."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..primitives import exact
from ..primitives.grouped_quantize import of_rows
from .scaling_modes import ScalingMode, TensorUsage
from .tensors import AbstractBaseTensor1x, ScaledTensor, ScaledTensor1x, ScaledTensorFactory


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scale_inv", "amax", "group_sizes"],
    meta_fields=["scaling_mode", "dq_dtype", "is_colwise", "data_layout", "flatten_axis", "has_rht_applied"],
)
@dataclass
class GroupedScaledTensor1x(AbstractBaseTensor1x, ScaledTensor):
    """Codes and scales of one direction of all groups.

    Attributes:
        data: Codes as in ScaledTensor1x; the groups are the first axis of a stack.
        scale_inv: float32 [G] with one scale per group, otherwise as in ScaledTensor1x.
        amax: Absolute maxima, [G] with one scale per group.
        group_sizes: Rows per group, int32 [G]; None for a stack.
        first_dims: Argument of the constructor: another name of group_sizes.
        last_dims: Argument of the constructor: group_sizes of transposed data.

    The other arguments are those of `ScaledTensor1x`.
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

    def __init__(
        self, data: Array, scale_inv: Array, amax: Array, group_sizes: Array | None = None,
        scaling_mode: ScalingMode = ScalingMode.NO_SCALING, dq_dtype: Any = jnp.bfloat16, is_colwise: bool = False,
        data_layout: str = "N", flatten_axis: int = 1, has_rht_applied: bool = False, *,
        first_dims: Array | None = None, last_dims: Array | None = None,
    ):  # fmt: skip
        # The fields are not checked, since the leaves of a pytree may be tracers, shapes or arbitrary objects.
        ragged = first_dims if first_dims is not None else last_dims
        self.data, self.scale_inv, self.amax = data, scale_inv, amax  # pyright: ignore[reportIncompatibleVariableOverride]
        self.group_sizes = group_sizes if ragged is None else ragged
        self.scaling_mode, self.dq_dtype, self.is_colwise = scaling_mode, dq_dtype, is_colwise
        self.data_layout, self.flatten_axis, self.has_rht_applied = data_layout, flatten_axis, has_rht_applied

    @property
    def first_dims(self) -> Array | None:
        """Extents of the groups along the first axis of data; None where they are equal."""
        return None if self.data_layout == "T" else self.group_sizes

    @property
    def last_dims(self) -> Array | None:
        """Extents of the groups along the last axis of data; None where they are equal."""
        return self.group_sizes if self.data_layout == "T" else None

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [M, K] of grouped rows, or shape of the stack, in the original order of axes."""
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
        """Codes [M, K] of grouped rows; the data of a stack, [G, columns, rows] with data_layout "T"."""
        return self.data.T if self.group_sizes is not None and self.data_layout == "T" else self.data

    def dequantize(self) -> Array:
        """Return the values in dq_dtype: [M, K], or the stack."""
        if self.group_sizes is None:
            values: Any = jax.vmap(lambda *leaves: self._one(*leaves).values(self.dq_dtype))
            return values(self.data, self.scale_inv, self.amax)
        if not self.scaling_mode.is_tensor_scaling():
            return self._one(self.data, self.scale_inv, self.amax).values(self.dq_dtype)
        codes = self.codes
        scales = of_rows(self.scale_inv, self.group_sizes, codes.shape[0])
        return exact.scaled(codes.astype(jnp.float32), scales[:, None]).astype(self.dq_dtype)

    def _one(self, data: Array, scale_inv: Array, amax: Array) -> ScaledTensor1x:
        return ScaledTensorFactory.create_1x(
            data, scale_inv, amax, self.scaling_mode, self.dq_dtype, self.is_colwise, self.data_layout,
            self.flatten_axis, self.has_rht_applied,
        )  # fmt: skip


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data", "amax", "group_sizes"], meta_fields=[]
)
@dataclass
class GroupedNoScaleTensor(AbstractBaseTensor1x):
    """Groups of unquantized values, with the interface of quantized groups.

    Args:
        data: Rows of all groups, or a stack with the groups as first axis.
        amax: Absolute maxima, or None.
        group_sizes: Rows per group, int32 [G]; None for a stack.
    """

    data: Array
    amax: Array | None = None
    group_sizes: Array | None = None

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
