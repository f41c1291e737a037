"""Matrix products for arrays and quantized tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...common.checks import described, integers, member, switch, whole
from ..collective import (
    CollectiveOp,
    CollectiveOpSet,
    collective_gemm_bootstrap,
    noop_collective_op_set,
)
from ..dense import dense, grouped_dense
from ..explain import explain
from ..primitives.grouped_gemm import KERNELS, grouped_contraction
from ..quantize.grouped import GroupedQuantizer
from ..quantize.quantizers import Quantizer, QuantizerSet, noop_quantizer_set
from ..quantize.tensors import (
    AbstractBaseTensor,
    NoScaleTensor,
    ScaledTensor,
    ScaledTensor1x,
    ScaledTensor2x,
)
from ..runtime.checks import (
    check_axis_pairs,
    check_floating,
    check_instance,
    check_integers,
    check_optional,
    check_sizes,
    check_values,
)
from .base import BasePrimitive

__all__ = [
    "CollectiveOp",
    "CollectiveOpSet",
    "collective_gemm_bootstrap",
    "gemm",
    "get_non_contracting_dims",
    "grouped_gemm",
    "grouped_gemm_copy_group_sizes",
    "is_v2_grouped_gemm_supported",
    "noop_collective_op_set",
    "sanitize_dims",
    "transpose_dims",
]

# contracting_dims that contract the rows
_OF_ROWS = tuple(((a,), (b,)) for a in (0, -2) for b in (0, -2))


class GemmPrimitive(BasePrimitive):
    """Switch for matrix-product kernels."""


class GroupedGemmPrimitive(BasePrimitive):
    """Switch for grouped matrix-product kernels."""


def sanitize_dims(ndim: int, dims: int | Sequence[int]) -> tuple[int, ...]:
    """Normalize axes to non-negative integers.

    Args:
        ndim: Number of array axes.
        dims: One axis or several; negative axes count from the last one.

    Raises:
        ValueError: An axis is outside the array.
    """
    whole("ndim", ndim, 0)
    axes = dims if isinstance(dims, Sequence) else (dims,)
    integers("dims", axes)
    for axis in axes:
        if not -ndim <= axis < ndim:
            raise ValueError(
                f"dims={described(dims)}: an array of {ndim} axes has no axis {axis}; choose another"
            )
    return tuple(axis % ndim for axis in axes)


def get_non_contracting_dims(ndim: int, contracting_dims: int | Sequence[int]) -> tuple[int, ...]:
    """Axes in an array with ndim axes that are not among contracting_dims, in ascending order.

    Args:
        ndim: Number of axes.
        contracting_dims: One or several axes; negative ones count from the end.
    """
    contracted = sanitize_dims(ndim, contracting_dims)
    return tuple(axis for axis in range(ndim) if axis not in contracted)


def transpose_dims(
    ndim: int, dims_to_transpose: int | Sequence[int], flatten_axis: int = -1
) -> tuple[int, ...]:
    """Positions of axes in data with layout "T", whose axes from flatten_axis on come first.

    Args:
        ndim: Number of array axes.
        dims_to_transpose: One axis or several; negative axes count from the last one.
        flatten_axis: Axis at which the array is flattened to a matrix.

    Raises:
        ValueError: An axis is outside the array.
    """
    (axis,) = sanitize_dims(ndim, flatten_axis)
    return tuple((dim - axis) % ndim for dim in sanitize_dims(ndim, dims_to_transpose))


def gemm(
    lhs: Array | ScaledTensor | NoScaleTensor,
    rhs: Array | ScaledTensor | NoScaleTensor,
    bias: Array | None = None,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (0,)),
    lhs_quantizer: Quantizer | None = None,
    rhs_quantizer: Quantizer | None = None,
    transpose_batch_sequence: bool = False,
    collective_op: CollectiveOp = CollectiveOp.NONE,
    *,
    fuse_bias: bool = False,
) -> Array:
    """Compute lhs @ rhs (+ bias), contracted over any axes.

    Args:
        lhs: Left operand: an array, or a quantized tensor.
        rhs: Right operand: an array, or a quantized tensor.
        bias: Bias along the non-contracted rhs axes, or None.
        contracting_dims: Contracted lhs and rhs axes.
        lhs_quantizer: Quantizer for lhs; None leaves lhs as passed.
        rhs_quantizer: Quantizer for rhs; None leaves rhs as passed.
        transpose_batch_sequence: Whether the sequence axis precedes the batch axis; does not change the result.
        collective_op: Collective around the product; XLA inserts collectives from the shardings.
        fuse_bias: Requires a bias; XLA decides whether the addition is fused.

    Returns:
        The product in the dtype of lhs, which is dq_dtype for a quantized tensor.

    Raises:
        ValueError: Extents do not match, or fuse_bias is True without a bias.
    """
    switch("fuse_bias", fuse_bias)
    if fuse_bias and bias is None:
        raise ValueError("fuse_bias=True and bias=None; pass a bias, or leave fuse_bias out")
    for name, quantizer in (("lhs_quantizer", lhs_quantizer), ("rhs_quantizer", rhs_quantizer)):
        check_optional(name, quantizer, Quantizer)
    member("collective_op", collective_op, CollectiveOp)
    lhs, rhs = (x.data if isinstance(x, NoScaleTensor) else x for x in (lhs, rhs))
    if isinstance(lhs, ScaledTensor) or isinstance(rhs, ScaledTensor):
        operand: Any = lhs
        if isinstance(operand, ScaledTensor2x):
            operand = operand.rowwise_tensor
        dtype = operand.dq_dtype if isinstance(operand, ScaledTensor1x) else operand.dtype
        addend = None if bias is None else bias.astype(jnp.float32)
        check_axis_pairs("contracting_dims", contracting_dims)
        values = dense(
            _values(lhs, lhs_quantizer, contracting_dims[0]),
            _values(rhs, rhs_quantizer, contracting_dims[1]),
            addend,
            contracting_dims,
            transpose_batch_sequence,
        )
        return values.astype(dtype)
    quantizers = QuantizerSet(lhs_quantizer, rhs_quantizer, None)
    return dense(
        lhs, rhs, bias, contracting_dims, transpose_batch_sequence, quantizer_set=quantizers
    )


def _values(operand: Any, quantizer: Quantizer | None, contracted: Sequence[int]) -> Array:
    """Operand values in float32; a high-precision operand is quantized first.

    A block-scaled tensor has different values in its two directions. The product reads the direction whose blocks are
    along the contracted axes: column-wise codes if these are the first axes, otherwise row-wise codes.
    """
    count, axes = len(contracted), sorted(sanitize_dims(operand.ndim, contracted))
    columns = axes == list(range(count)) and count < operand.ndim
    if quantizer is not None and not isinstance(operand, ScaledTensor):
        operand = quantizer.quantize(
            operand, not columns, columns, flatten_axis=count if columns else -count
        )
    if isinstance(operand, ScaledTensor2x):
        operand = operand.colwise_tensor if columns else operand.rowwise_tensor
    return (
        operand.values()
        if isinstance(operand, ScaledTensor1x)
        else jnp.asarray(operand, jnp.float32)
    )


def _with_group_sizes(function: Callable[..., Array]) -> Callable[..., Array]:
    """Decorate `grouped_gemm`, so that it accepts group_sizes as the third argument, an array or None."""

    @functools.wraps(function)
    def grouped_gemm(lhs: Any, rhs: Any, *arguments: Any, **options: Any) -> Array:
        third = bool(arguments) and (arguments[0] is None or hasattr(arguments[0], "shape"))
        if third or "group_sizes" in options:
            if not third:
                arguments = (options.pop("group_sizes"), *arguments)
            options.pop("use_async_d2h_group_sizes", None)
            return _product_of_groups(lhs, rhs, *arguments, **options)
        return function(lhs, rhs, *arguments, **options)

    return grouped_gemm


@_with_group_sizes
def grouped_gemm(
    lhs: Any,
    rhs: Any,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    bias: Array | None = None,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
    preferred_element_type: Any = None,
    group_offset: Array | None = None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
    use_async_d2h_group_sizes: bool = False,
) -> Array:
    """Compute the product [M, N]: the rows of group g in lhs [M, K], times rhs[g] [K, N] (+ bias[g]).

    With contracting_dims=((0,), (0,)), compute one matrix per group [G, K, N]: the rows of group g in lhs [M, K],
    transposed, times its rows in rhs [M, N]. This is the matrices' gradient in the other product.

    Calls with group_sizes, int32 [G], as the third argument or by keyword are also accepted, for rows in a plain array.

    Args:
        lhs: Rows in groups: a grouped quantized tensor or a GroupedNoScaleTensor, which holds their sizes.
        rhs: One matrix per group [G, K, N], or rows in groups: an array or a grouped quantized tensor.
        contracting_dims: ((0,), (0,)), or as in `grouped_dense`, as are the following arguments.
        bias: Bias [G, N], or None.
        precision: Has no effect; partial sums are float32.
        preferred_element_type: Result dtype; None means lhs's.
        group_offset: Must be None.
        quantizer_set: Quantizers for high-precision operands.
        use_async_d2h_group_sizes: Has no effect; the kernels read the sizes on the device.

    Raises:
        ValueError: Extents do not match, or lhs does not hold the rows per group.
    """
    switch("use_async_d2h_group_sizes", use_async_d2h_group_sizes)
    return _product_of_groups(
        lhs,
        rhs,
        None,
        contracting_dims,
        bias,
        precision,
        preferred_element_type,
        group_offset,
        quantizer_set,
    )


def _product_of_groups(
    lhs: Any,
    rhs: Any,
    group_sizes: Array | None = None,
    contracting_dims: Any = ((1,), (1,)),
    bias: Array | None = None,
    precision: Any = jax.lax.Precision.DEFAULT,
    preferred_element_type: Any = None,
    group_offset: Array | None = None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> Array:
    """See `grouped_gemm`; group_sizes: rows per group, by default the sizes that lhs holds."""
    if group_sizes is None:
        rows = lhs.rowwise_tensor if isinstance(lhs, ScaledTensor2x) else lhs
        group_sizes = getattr(rows, "group_sizes", None)
        if group_sizes is None:
            raise ValueError(
                f"group_sizes=None and lhs={described(lhs)} holds no sizes; pass the rows per group as int32 [G]"
            )
    check_axis_pairs("contracting_dims", contracting_dims)
    if tuple(tuple(side) for side in contracting_dims) in _OF_ROWS:
        if bias is not None or group_offset is not None:
            raise ValueError(
                f"contracting_dims={contracting_dims} contracts the rows, which supports neither bias="
                f"{described(bias)} nor group_offset={described(group_offset)}; pass None for both"
            )
        # [G, K, N]: the lhs rows of group g, transposed, times its rhs rows.
        dtype = preferred_element_type
        check_instance("quantizer_set", quantizer_set, QuantizerSet)
        values: list[Array] = []
        for name, operand, quantizer in (
            ("lhs", lhs, quantizer_set.x),
            ("rhs", rhs, quantizer_set.kernel),
        ):
            if quantizer is not None and not isinstance(operand, AbstractBaseTensor):
                check_instance(f"quantizer_set.{name}", quantizer, GroupedQuantizer)
                operand = quantizer.quantize(operand, group_sizes=group_sizes)
            # The contraction over rows reads the column-wise codes.
            columns = operand.colwise_tensor if isinstance(operand, ScaledTensor2x) else operand
            value = _dequantized(columns)
            check_values(name, value)
            values.append(value)
        a, b = values
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[0]:
            raise ValueError(
                f"lhs has shape {a.shape} and rhs {b.shape}; contraction of the rows requires [M, K] and [M, N]"
            )
        check_sizes("group_sizes", group_sizes, None, a.shape[0])
        dtype = a.dtype if dtype is None else check_floating("preferred_element_type", dtype)
        return grouped_contraction(a, b.astype(a.dtype), group_sizes.astype(jnp.int32), dtype)
    if isinstance(rhs, ScaledTensor2x) and tuple(contracting_dims[1]) in ((1,), (-2,)):
        rhs = rhs.colwise_tensor  # blocks in this direction are along the contracted axis
    lhs, rhs = _dequantized(lhs), _dequantized(rhs)
    return grouped_dense(
        lhs,
        rhs,
        group_sizes,
        contracting_dims,
        bias,
        precision,
        preferred_element_type,
        group_offset,
        quantizer_set,
    )


def _dequantized(operand: Any) -> Any:
    """Dequantize an operand to its dq_dtype in the original axis order; arrays are returned unchanged."""
    tensor = operand.rowwise_tensor if isinstance(operand, ScaledTensor2x) else operand
    if isinstance(tensor, ScaledTensor1x):
        return tensor.values(tensor.dq_dtype)
    return tensor.dequantize() if isinstance(tensor, AbstractBaseTensor) else tensor


def grouped_gemm_copy_group_sizes(group_sizes: Array, num_gemms: int) -> Array:
    """Return group_sizes [num_gemms] unchanged; the kernels read them on the device without a copy to the host.

    Args:
        group_sizes: Rows per group, int32 [num_gemms].
        num_gemms: Number of groups.
    """
    whole("num_gemms", num_gemms)
    check_integers("group_sizes", group_sizes)
    if group_sizes.shape != (num_gemms,):
        raise ValueError(
            f"group_sizes has shape {list(group_sizes.shape)}; pass one number per group, [{num_gemms}]"
        )
    return group_sizes


def is_v2_grouped_gemm_supported(
    lhs: Any,
    rhs: Any,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    preferred_element_type: Any = None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> bool:
    """Whether one kernel computes all groups in a `grouped_gemm` with these operands on this machine.

    Nothing is computed. Group sizes stay on the device with and without such a kernel; `transformer_engine.jax.explain`
    reports the reasons against it. The parameters are as in `grouped_gemm`, because NVIDIA's parameters are not
    documented.

    Args:
        lhs: As in `grouped_gemm`, or the shape and dtype of such an array.
        rhs: As in `grouped_gemm`, or the shape and dtype of such an array.
        contracting_dims: As in `grouped_gemm`.
        preferred_element_type: As in `grouped_gemm`.
        quantizer_set: As in `grouped_gemm`.

    Raises:
        ValueError: Extents do not match, or the rows of lhs are contracted and it holds no sizes.
    """
    rows = lhs.rowwise_tensor if isinstance(lhs, ScaledTensor2x) else lhs
    sizes = None
    if getattr(rows, "group_sizes", None) is None and getattr(rhs, "ndim", 0) == 3:
        sizes = jax.ShapeDtypeStruct(rhs.shape[:1], jnp.int32)
    product = functools.partial(
        _product_of_groups,
        contracting_dims=contracting_dims,
        preferred_element_type=preferred_element_type,
        quantizer_set=quantizer_set,
    )
    decisions = explain(product, lhs, rhs, sizes, backward=False).decisions
    products = [decision for decision in decisions if decision.operation in KERNELS]
    return all(decision.chosen in KERNELS[decision.operation] for decision in products)
