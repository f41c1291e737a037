"""Quantized tensors: codes and scales in one direction, or in both.

In a matrix [M, N], the axes before flatten_axis are the rows, the axes from flatten_axis on the columns. Matrix
products contract a row-wise tensor over N and a column-wise tensor over M.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ...common.checks import member
from ..primitives.operand import Operand, turned
from ..primitives.quantize import dequantize
from ..primitives.quantize.hadamard import inverse_transform
from ..runtime.checks import check_array, check_floating, check_instance
from ..runtime.code_bits import name_leaves
from ..sharding import with_sharding_constraint_by_logical_axes
from .scaling_modes import QuantizeLayout, ScalingMode, TensorUsage

__all__ = [
    "AbstractBaseTensor",
    "AbstractBaseTensor1x",
    "NoScaleTensor",
    "ScaledTensor",
    "ScaledTensor1x",
    "ScaledTensor2x",
    "ScaledTensorFactory",
    "ScalingModeToDequantizerMap",
]


def positive_axis(flatten_axis: int, ndim: int) -> int:
    """Make flatten_axis non-negative; raise ValueError unless axes remain on both sides."""
    axis = flatten_axis + ndim if flatten_axis < 0 else flatten_axis
    if not 0 < axis < max(ndim, 1):
        raise ValueError(
            f"flatten_axis={flatten_axis} leaves no rows or no columns of {ndim} axes; choose an axis between them"
        )
    return axis


class AbstractBaseTensor(abc.ABC):
    """Base class for quantized tensors and for unquantized tensors' containers."""

    @abc.abstractmethod
    def dequantize(self) -> Array:
        """Compute the values in high precision."""

    @abc.abstractmethod
    def get_tensor(self, usage: TensorUsage) -> AbstractBaseTensor:
        """Select the direction that a matrix product reads for a usage."""


class AbstractBaseTensor1x(AbstractBaseTensor):
    """Base class for tensors with one direction: `data` and its absolute maximum `amax`."""

    data: Array
    amax: Array | None


class ScaledTensor(AbstractBaseTensor):
    """Base class for tensors that hold codes and scales."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Tensor shape in its original axis order."""


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
class ScaledTensor1x(AbstractBaseTensor1x, ScaledTensor):
    """Codes and scales in one direction.

    Attributes:
        data: Codes [*rows, *columns]; [*columns, *rows] for a column-wise tensor with data_layout "T".
        scale_inv: Factor of the codes: float32 [1], or one per matrix block in data's layout.
        amax: Absolute maximum of the values, float32 [1]; [rows] if each row has a scale, [0] if the format stores
            no maximum.
        scaling_mode: Scaling mode, which determines the format.
        dq_dtype: dtype of the dequantized values.
        is_colwise: Whether matrix products contract the tensor over its rows.
        data_layout: "N", or "T" if data is transposed.
        flatten_axis: First column axis in data; with data_layout "T" its first row axis.
        has_rht_applied: Whether the values are Hadamard transformed along the contracted axis.
    """

    data: Array
    scale_inv: Array
    amax: Array  # pyright: ignore[reportIncompatibleVariableOverride]
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
        """Tensor shape in its original axis order."""
        shape = self.data.shape
        if not self.transposed:
            return shape
        axis = positive_axis(self.flatten_axis, self.ndim)
        return (*shape[axis:], *shape[:axis])

    @property
    def transposed(self) -> bool:
        """Whether the tensor's column axes are the first axes of data."""
        return self.data_layout == "T"

    def operand(self) -> Operand:
        """Codes with the contracted axes last."""
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
        """Compute the values in dq_dtype, in data's axis order: transposed with data_layout "T"."""
        if self._dq_func is not None:
            return self._dq_func(self)
        operand = self.operand()
        values = dequantize(operand)
        if self.has_rht_applied:
            values = inverse_transform(values.reshape(operand.rows, operand.depth)).reshape(
                values.shape
            )
        return turned(values, operand.axis) if self.is_colwise and not self.transposed else values

    def values(self, dtype: DTypeLike = jnp.float32) -> Array:
        """Compute the values in a dtype, in the original axis order."""
        values = replace(self, dq_dtype=jnp.dtype(dtype)).dequantize()
        return (
            turned(values, positive_axis(self.flatten_axis, self.ndim))
            if self.transposed
            else values
        )

    def get_tensor(self, usage: TensorUsage) -> ScaledTensor1x:
        """Return this tensor.

        Raises:
            ValueError: A matrix product reads the other direction for this usage.
        """
        member("usage", usage, TensorUsage)
        columnwise = self.scaling_mode.get_quantize_layout(usage).has_colwise
        if columnwise is not self.is_colwise:
            have, needed = (
                ("column-wise" if c else "row-wise") for c in (self.is_colwise, columnwise)
            )
            raise ValueError(
                f"{usage} needs a {needed} tensor, this one is {have}; quantize with q_layout=ROWWISE_COLWISE"
            )
        return self

    def apply_sharding_constraint_by_logical_axes(
        self, logical_axis_names: tuple[str | None, ...]
    ) -> ScaledTensor1x:
        """Add a sharding constraint to data; the names refer to the original axes."""
        if not logical_axis_names:
            return self
        names = tuple(logical_axis_names)
        if self.transposed:
            axis = self.ndim - positive_axis(self.flatten_axis, self.ndim)
            names = (*names[axis:], *names[:axis])
        leaves, tree = jax.tree.flatten(self)
        data = with_sharding_constraint_by_logical_axes(self.data, names)
        return jax.tree.unflatten(tree, [data, *leaves[1:]])

    def checkpoint(self, quantizer: object) -> ScaledTensor1x:
        """Name the tensor's leaves for recomputation policies if the quantizer has a name."""
        return name_leaves(self, getattr(quantizer, "checkpoint_name", None))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rowwise_tensor", "colwise_tensor"],
    meta_fields=[],
)
@dataclass
class ScaledTensor2x(ScaledTensor):
    """Both directions of one tensor.

    Attributes:
        rowwise_tensor: Codes that matrix products contract over the columns.
        colwise_tensor: Codes that matrix products contract over the rows.
    """

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
        """Compute the values of the row-wise codes."""
        return self.rowwise_tensor.dequantize()

    def get_tensor(self, usage: TensorUsage) -> ScaledTensor1x:
        """Select the direction that a matrix product reads for a usage."""
        member("usage", usage, TensorUsage)
        layout = self.rowwise_tensor.scaling_mode.get_quantize_layout(usage)
        return self.rowwise_tensor if layout.has_rowwise else self.colwise_tensor

    def apply_sharding_constraint_by_logical_axes(
        self, logical_axis_names: tuple[str | None, ...]
    ) -> ScaledTensor2x:
        """Add sharding constraints to both directions' data."""
        return ScaledTensor2x(
            self.rowwise_tensor.apply_sharding_constraint_by_logical_axes(logical_axis_names),
            self.colwise_tensor.apply_sharding_constraint_by_logical_axes(logical_axis_names),
        )

    def checkpoint(self, quantizer: object) -> ScaledTensor2x:
        """Name both directions' leaves for recomputation policies."""
        return ScaledTensor2x(
            self.rowwise_tensor.checkpoint(quantizer), self.colwise_tensor.checkpoint(quantizer)
        )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data", "amax"], meta_fields=[])
@dataclass
class NoScaleTensor(AbstractBaseTensor1x):
    """An unquantized tensor with the quantized-tensor interface.

    Args:
        data: The values.
        amax: Absolute maximum of the values, or None.
    """

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
        """Return this tensor, which serves every usage."""
        return self

    def apply_sharding_constraint_by_logical_axes(
        self, logical_axis_names: tuple[str | None, ...]
    ) -> NoScaleTensor:
        return NoScaleTensor(
            with_sharding_constraint_by_logical_axes(self.data, logical_axis_names), self.amax
        )

    def checkpoint(self, quantizer: object) -> NoScaleTensor:
        return self


@dataclass(frozen=True)
class Dequantizer:
    """Computes values from quantized tensors with one scaling mode.

    Args:
        scaling_mode: Scaling mode for the tensors that `dequantize` accepts.
    """

    scaling_mode: ScalingMode

    def dequantize(self, scaled_tensor: AbstractBaseTensor) -> Array:
        """Compute a tensor's values in its dq_dtype; the tensor must have this mode.

        Raises:
            TypeError: scaled_tensor is not a transformer_engine.jax.quantize tensor.
            ValueError: The tensor has another scaling mode.
        """
        check_instance("scaled_tensor", scaled_tensor, AbstractBaseTensor)
        one = (
            scaled_tensor.rowwise_tensor
            if isinstance(scaled_tensor, ScaledTensor2x)
            else scaled_tensor
        )
        # plain-value containers have no mode
        mode = getattr(one, "scaling_mode", ScalingMode.NO_SCALING)
        if mode is not self.scaling_mode:
            raise ValueError(
                f"scaled_tensor has {mode}; this is the dequantizer of {self.scaling_mode}; call dequantize() of the "
                "tensor"
            )
        return scaled_tensor.dequantize()


ScalingModeToDequantizerMap = {mode: Dequantizer(mode) for mode in ScalingMode}
"""The `Dequantizer` of each scaling mode."""


class ScaledTensorFactory:
    """Creates tensors from existing codes and scales."""

    @staticmethod
    def create_1x(
        data: Array,
        scale_inv: Array,
        amax: Array | None = None,
        scaling_mode: ScalingMode = ScalingMode.NO_SCALING,
        dq_dtype: DTypeLike = jnp.bfloat16,
        is_colwise: bool = False,
        data_layout: str = "N",
        flatten_axis: int = -1,
        has_rht_applied: bool = False,
    ) -> ScaledTensor1x:
        """Create a one-direction tensor.

        Args:
            data: Codes.
            scale_inv: Factors that codes are multiplied by.
            amax: Absolute maximum; None for an empty array.
            scaling_mode: Format of the scales.
            dq_dtype: dtype of the dequantized tensor.
            is_colwise: Whether scales belong to columns.
            data_layout: "N", or "T" for transposed codes.
            flatten_axis: Axis at which data is flattened to a matrix.
            has_rht_applied: Whether the codes are Hadamard transformed.

        Raises:
            TypeError: data or scale_inv is not an array, or scaling_mode is not a ScalingMode.
            ValueError: scaling_mode is NO_SCALING, or data_layout or flatten_axis is outside its range.
        """
        check_array("data", data)
        check_array("scale_inv", scale_inv)
        member("scaling_mode", scaling_mode, ScalingMode)
        if scaling_mode.format is None:
            raise ValueError(
                f"scaling_mode={scaling_mode} has no scales; use another mode, or NoScaleTensor"
            )
        if data_layout not in ("N", "T"):
            raise ValueError(
                f"data_layout={data_layout!r}; choose 'N' (not transposed) or 'T' (transposed)"
            )
        amax = jnp.zeros(0, jnp.float32) if amax is None else amax
        axis = positive_axis(flatten_axis, data.ndim)
        return ScaledTensor1x(
            data,
            scale_inv,
            amax,
            scaling_mode,
            check_floating("dq_dtype", dq_dtype),
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
        """Select the directions that a layout includes.

        Args:
            rowwise: Row-wise tensor, or None.
            colwise: Column-wise tensor, or None.
            q_layout: Directions to return.

        Raises:
            ValueError: A direction that the layout includes is None.
        """
        member("q_layout", q_layout, QuantizeLayout)
        tensors = []
        for name, tensor, present in (
            ("rowwise", rowwise, q_layout.has_rowwise),
            ("colwise", colwise, q_layout.has_colwise),
        ):
            if present and tensor is None:
                raise ValueError(
                    f"{name}=None with q_layout={q_layout.name}; pass the tensor of that direction"
                )
            tensors += [tensor] * present
        return tensors[0] if len(tensors) == 1 else ScaledTensor2x(*tensors)
