"""Quantized tensors: codes and scales of one direction, or of both.

Axes in front of flatten_axis are the rows of a matrix [M, N], those from it on its columns. A row-wise tensor is to be
contracted over N, a column-wise one over M.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ...common.checks import member
from ..primitives.operand import Operand, turned
from ..primitives.quantize import dequantize
from ..primitives.quantize.hadamard import inverse_transform
from ..sharding import with_sharding_constraint_by_logical_axes
from .scaling_modes import QuantizeLayout, ScalingMode, TensorUsage

__all__ = ["NoScaleTensor", "ScaledTensor", "ScaledTensor1x", "ScaledTensor2x", "ScaledTensorFactory"]

_ROW_USAGES = (TensorUsage.LHS, TensorUsage.RHS_TRANS)


def positive_axis(flatten_axis: int, ndim: int) -> int:
    """flatten_axis counted from the front; ValueError unless axes remain on both sides of it."""
    axis = flatten_axis + ndim if flatten_axis < 0 else flatten_axis
    if not 0 < axis < max(ndim, 1):
        raise ValueError(
            f"flatten_axis={flatten_axis} leaves no rows or no columns of {ndim} axes; give one between them"
        )
    return axis


class ScaledTensor:
    """What ScaledTensor1x and ScaledTensor2x have in common."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor, in its own order of axes."""
        raise NotImplementedError


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scale_inv", "amax"],
    meta_fields=[
        "scaling_mode",
        "dq_dtype",
        "_dq_func",
        "is_colwise",
        "data_layout",
        "flatten_axis",
        "has_rht_applied",
    ],
)
@dataclass
class ScaledTensor1x(ScaledTensor):
    """codes [*shape] and scales of one direction.

    data             row-wise [*rows, *columns]; column-wise [*columns, *rows] with data_layout "T", else as row-wise
    scale_inv        what a code is multiplied by: float32 [1], or one a block of the matrix as data lies
    amax             float32 [1] of the values, [rows] where rows have scales of their own; [0] without such a scale
    flatten_axis     where the columns of data begin (with data_layout "T": where its rows begin)
    has_rht_applied  are the values Hadamard transformed along the contracted axis?
    """

    data: Array
    scale_inv: Array
    amax: Array
    scaling_mode: ScalingMode
    dq_dtype: jnp.dtype
    _dq_func: Callable[..., Array] | None
    is_colwise: bool
    data_layout: str
    flatten_axis: int
    has_rht_applied: bool = False

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor, in its own order of axes."""
        shape = self.data.shape
        if not self.transposed:
            return shape
        axis = positive_axis(self.flatten_axis, self.ndim)
        return (*shape[axis:], *shape[:axis])

    @property
    def transposed(self) -> bool:
        """Does data begin with the columns of the tensor?"""
        return self.data_layout == "T"

    def operand(self) -> Operand:
        """The codes with the contracted axes last."""
        axis = positive_axis(self.flatten_axis, self.ndim)
        codes, scale = self.data, self.scale_inv
        if self.is_colwise and not self.transposed:
            codes, axis = turned(codes, axis), self.ndim - axis
            scale = scale if scale.ndim == 1 else scale.T
        amax = self.amax if self.amax.size else None
        form = self.scaling_mode.format
        form = form.columnwise if form is not None and self.is_colwise else form
        dtype = jnp.dtype(self.dq_dtype)
        return Operand(codes, scale, amax, form, dtype, axis, self.has_rht_applied)

    def dequantize(self) -> Array:
        """The values in dq_dtype, in the tensor's own order of axes."""
        if self._dq_func is not None:
            return self._dq_func(self)
        operand = self.operand()
        values = dequantize(operand)
        if self.has_rht_applied:
            values = inverse_transform(values.reshape(operand.rows, operand.depth)).reshape(values.shape)
        return turned(values, operand.axis) if self.is_colwise or self.transposed else values

    def values(self) -> Array:
        """The values in float32, in the tensor's own order of axes."""
        return replace(self, dq_dtype=jnp.dtype(jnp.float32)).dequantize()

    def get_tensor(self, usage: TensorUsage) -> ScaledTensor1x:
        """This tensor, if it is the direction that a product needs it in."""
        member("usage", usage, TensorUsage)
        wanted = usage not in _ROW_USAGES
        if wanted is not self.is_colwise:
            have, want = (("column-wise" if c else "row-wise") for c in (self.is_colwise, wanted))
            raise ValueError(
                f"{usage} needs a {want} tensor, this one is {have}; quantize with q_layout=ROWWISE_COLWISE"
            )
        return self

    def apply_sharding_constraint_by_logical_axes(
        self, logical_axis_names: tuple[str | None, ...]
    ) -> ScaledTensor1x:
        """The tensor with its data laid over the mesh as the names of the tensor's own axes say."""
        if not logical_axis_names:
            return self
        names = tuple(logical_axis_names)
        if self.transposed:
            axis = self.ndim - positive_axis(self.flatten_axis, self.ndim)
            names = (*names[axis:], *names[:axis])
        return self._with(data=with_sharding_constraint_by_logical_axes(self.data, names))

    def checkpoint(self, quantizer: object) -> ScaledTensor1x:
        """The tensor with its leaves named for recomputation policies, where the quantizer has a name."""
        name = getattr(quantizer, "checkpoint_name", None)
        return self if name is None else jax.tree.map(lambda leaf: checkpoint_name(leaf, name), self)

    def _with(self, data: Array) -> ScaledTensor1x:
        leaves, tree = jax.tree.flatten(self)
        return jax.tree.unflatten(tree, [data, *leaves[1:]])


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rowwise_tensor", "colwise_tensor"], meta_fields=[]
)
@dataclass
class ScaledTensor2x(ScaledTensor):
    """Both directions of one tensor."""

    rowwise_tensor: ScaledTensor1x
    colwise_tensor: ScaledTensor1x

    @property
    def ndim(self) -> int:
        return self.rowwise_tensor.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rowwise_tensor.shape

    @property
    def flatten_axis(self) -> int:
        return self.rowwise_tensor.flatten_axis

    def dequantize(self) -> Array:
        """The values of the row-wise codes."""
        return self.rowwise_tensor.dequantize()

    def get_tensor(self, usage: TensorUsage) -> ScaledTensor1x:
        """The direction that a product needs."""
        member("usage", usage, TensorUsage)
        return self.rowwise_tensor if usage in _ROW_USAGES else self.colwise_tensor

    def apply_sharding_constraint_by_logical_axes(
        self, logical_axis_names: tuple[str | None, ...]
    ) -> ScaledTensor2x:
        """Both directions laid over the mesh as the names of the tensor's axes say."""
        return ScaledTensor2x(
            self.rowwise_tensor.apply_sharding_constraint_by_logical_axes(logical_axis_names),
            self.colwise_tensor.apply_sharding_constraint_by_logical_axes(logical_axis_names),
        )

    def checkpoint(self, quantizer: object) -> ScaledTensor2x:
        """Both directions with their leaves named."""
        return ScaledTensor2x(
            self.rowwise_tensor.checkpoint(quantizer), self.colwise_tensor.checkpoint(quantizer)
        )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data", "amax"], meta_fields=[])
@dataclass
class NoScaleTensor:
    """A tensor that is not quantized, in the place of one that is."""

    data: Array
    amax: Array | None = None

    @property
    def ndim(self) -> int:
        return self.data.ndim

    def dequantize(self) -> Array:
        return self.data

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def get_tensor(self, usage: TensorUsage) -> NoScaleTensor:
        """Itself: a product takes its values in any order of axes."""
        return self

    def apply_sharding_constraint_by_logical_axes(
        self, logical_axis_names: tuple[str | None, ...]
    ) -> NoScaleTensor:
        return NoScaleTensor(
            with_sharding_constraint_by_logical_axes(self.data, logical_axis_names), self.amax
        )

    def checkpoint(self, quantizer: object) -> NoScaleTensor:
        return self


class ScaledTensorFactory:
    """Tensors from codes and scales that exist already."""

    @staticmethod
    def create_1x(
        data: Array,
        scale_inv: Array,
        amax: Array | None = None,
        scaling_mode: ScalingMode = ScalingMode.NO_SCALING,
        dq_dtype: jnp.dtype = jnp.bfloat16,
        is_colwise: bool = False,
        data_layout: str = "N",
        flatten_axis: int = -1,
        has_rht_applied: bool = False,
    ) -> ScaledTensor1x:
        """One direction; see ScaledTensor1x."""
        member("scaling_mode", scaling_mode, ScalingMode)
        if scaling_mode.format is None:
            raise ValueError(f"scaling_mode={scaling_mode} has no scales; choose another, or NoScaleTensor")
        if data_layout not in ("N", "T"):
            raise ValueError(f"data_layout={data_layout!r}; choose 'N' (as it is) or 'T' (transposed)")
        amax = jnp.zeros(0, jnp.float32) if amax is None else amax
        axis = positive_axis(flatten_axis, data.ndim)
        return ScaledTensor1x(
            data,
            scale_inv,
            amax,
            scaling_mode,
            jnp.dtype(dq_dtype),
            None,
            is_colwise,
            data_layout,
            axis,
            has_rht_applied,
        )

    @staticmethod
    def create(
        rowwise: ScaledTensor1x | None, colwise: ScaledTensor1x | None, q_layout: QuantizeLayout
    ) -> ScaledTensor1x | ScaledTensor2x:
        """What a layout keeps of both directions; ValueError where one that it keeps is None."""
        member("q_layout", q_layout, QuantizeLayout)
        kept = []
        for name, tensor, there in (
            ("rowwise", rowwise, q_layout.has_rowwise), ("colwise", colwise, q_layout.has_colwise),
        ):  # fmt: skip
            if there and tensor is None:
                raise ValueError(
                    f"{name}=None with q_layout={q_layout.name}; give the tensor of that direction"
                )
            kept += [tensor] * there
        return kept[0] if len(kept) == 1 else ScaledTensor2x(*kept)
