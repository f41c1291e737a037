"""y = x @ kernel + bias over any axes, in a quantizer set's precision."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..common.checks import switch
from .collective import CollectiveOpSet, noop_collective_op_set
from .functions.grouped_dense import grouped_dense
from .functions.products import (
    biased,
    column_operand,
    encode,
    forward_product,
    gradient_products,
    gradient_quantizer,
    row_operand,
)
from .functions.sources import OperandSource, ValuesSource
from .quantize.grouped import check_ungrouped
from .quantize.quantizers import QuantizerSet, advanced_together, as_cotangent, noop_quantizer_set
from .quantize.sharing import align_mesh_axes
from .runtime.checks import (
    check_axis_names,
    check_axis_pairs,
    check_bias,
    check_instance,
    check_values,
)
from .runtime.code_bits import bits_to_codes, codes_to_bits
from .runtime.explicit_axes import explicit_entries, unique_axes, with_automatic_axes
from .runtime.residual import store_returned_input
from .runtime.undifferentiated import constant, like, undifferentiated
from .sharding import with_sharding_constraint_by_logical_axes

__all__ = ["dense", "grouped_dense"]

Dims = tuple[Sequence[int], Sequence[int]]


def dense(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    contracting_dims: Dims = ((1,), (0,)),
    transpose_batch_sequence: bool = False,
    input_axes: tuple[str | None, ...] | None = None,
    kernel_axes: tuple[str | None, ...] | None = None,
    output_axes: tuple[str | None, ...] | None = None,
    collective_op_set: CollectiveOpSet = noop_collective_op_set,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> Array:
    """Compute y [*batch, *features] = x @ kernel + bias [*features] in x's dtype.

    Args:
        x: Input, float32, bfloat16 or float16.
        kernel: Kernel; without quantizers it is cast to x's dtype.
        bias: Bias, or None.
        contracting_dims: Contracted x and kernel axes.
        transpose_batch_sequence: Whether the sequence is before the batch; the result does not depend on it.
        input_axes: Logical axis names of x, for sharding.
        kernel_axes: Logical axis names of the kernel.
        output_axes: Logical axis names of y.
        collective_op_set: Collective operations around the product. XLA places them by the shardings; the values do not
            depend on it.
        quantizer_set: Quantizers. The set is differentiable: the cotangent of its state is the next step's state.

    Raises:
        TypeError: An argument has another type.
        ValueError: Extents do not match.
    """
    x_dims, kernel_dims = check_contraction(x, kernel, contracting_dims)
    check_instance("collective_op_set", collective_op_set, CollectiveOpSet)
    check_ungrouped("quantizer_set", quantizer_set)
    check_bias(bias, [kernel.shape[axis] for axis in range(kernel.ndim) if axis not in kernel_dims])
    switch("transpose_batch_sequence", transpose_batch_sequence)
    ndim_of_y = x.ndim + kernel.ndim - 2 * len(x_dims)
    for name, axes, ndim in (
        ("input_axes", input_axes, x.ndim),
        ("kernel_axes", kernel_axes, kernel.ndim),
        ("output_axes", output_axes, ndim_of_y),
    ):
        check_axis_names(name, axes, ndim)
    x = with_sharding_constraint_by_logical_axes(x, input_axes)
    kernel = with_sharding_constraint_by_logical_axes(kernel, kernel_axes)
    contracted = len(x_dims)
    x = jnp.moveaxis(x, x_dims, range(x.ndim - contracted, x.ndim))
    kernel = jnp.moveaxis(kernel, kernel_dims, range(contracted))
    shape = (*x.shape[: x.ndim - contracted], *kernel.shape[contracted:])
    # An array whose axes are all contracted is multiplied as a matrix with one row or one column.
    x = x if x.ndim > contracted else x[None]
    kernel = kernel if kernel.ndim > contracted else kernel[..., None]
    if quantizer_set.is_noop:
        kernel = kernel.astype(x.dtype)
    y = multiply_source(ValuesSource(), (x,), kernel, quantizer_set, contracted).reshape(shape)
    return with_sharding_constraint_by_logical_axes(biased(y, bias), output_axes)


def check_contraction(
    x: Array, kernel: Array, dims: Dims
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Normalize the contracted axes to non-negative integers; raise TypeError or ValueError if they do not match."""
    check_values("x", x)
    check_values("kernel", kernel)
    check_axis_pairs("contracting_dims", dims)
    if len(dims[0]) != len(dims[1]) or not dims[0]:
        raise ValueError(
            f"contracting_dims={dims}; give as many axes of x as of kernel, at least one"
        )
    canonical = []
    for name, array, axes in (("x", x, dims[0]), ("kernel", kernel, dims[1])):
        invalid = [axis for axis in axes if not -array.ndim <= axis < array.ndim]
        if invalid:
            raise ValueError(
                f"contracting_dims={dims}: {name} has {array.ndim} axes, there is no axis {invalid[0]}; name axes "
                "that it has"
            )
        canonical.append(tuple(axis % array.ndim for axis in axes))
        if len(set(canonical[-1])) < len(axes):
            raise ValueError(
                f"contracting_dims={dims} name an axis of {name} twice; name each once"
            )
    extents = [
        tuple(array.shape[axis] for axis in axes)
        for array, axes in zip((x, kernel), canonical, strict=True)
    ]
    if extents[0] != extents[1]:
        raise ValueError(
            f"contracting_dims={dims} contract {extents[0]} of x {x.shape} with {extents[1]} of kernel "
            f"{kernel.shape}; both extents must be equal"
        )
    return canonical[0], canonical[1]


def multiply_source(
    source: OperandSource,
    inputs: tuple[Any, ...],
    kernel: Array,
    quantizer_set: QuantizerSet,
    contracted: int,
) -> Array:
    """Compute y [*batch, *features] = operand @ kernel.

    Args:
        source: Computes the operand [*batch, *contracted] from `inputs`.
        inputs: Inputs of the source.
        kernel: Kernel [*contracted, *features].
        quantizer_set: Quantizers for the operand, the kernel and the output gradient.
        contracted: Number of contracted axes, the last of the operand and the first of the kernel.
    """
    (inputs, kernel), quantizer_set = align_mesh_axes((inputs, kernel), quantizer_set)
    y, passed = with_automatic_axes(
        functools.partial(_product, source, contracted),
        inputs,
        kernel,
        quantizer_set,
        out=lambda: (
            unique_axes(
                (*explicit_entries(inputs[0])[:-contracted], *explicit_entries(kernel)[contracted:])
            ),
            tuple(unique_axes(explicit_entries(x)) for x in source.passed(inputs)),
        ),
    )
    store_returned_input(passed)
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    source: OperandSource,
    contracted: int,
    inputs: tuple[Any, ...],
    kernel: Array,
    quantizer_set: QuantizerSet,
) -> tuple[Array, tuple[Array, ...]]:
    return _product_fwd(source, contracted, inputs, kernel, quantizer_set)[0]


def _product_fwd(
    source: OperandSource,
    contracted: int,
    inputs: tuple[Any, ...],
    kernel: Array,
    quantizers: QuantizerSet,
) -> tuple[tuple[Array, tuple[Array, ...]], Any]:
    """Forward pass of `_product`: quantize both operands, multiply, and return the residuals."""
    dtype, of, passed = inputs[0].dtype, (inputs, kernel), source.passed(inputs)
    # Empty arrays carry the gradients' shapes and dtypes.
    likes = jax.tree.map(like, of)
    if not quantizers.is_noop:
        (inputs, kernel), quantizers = constant((of, quantizers))
    operand = source.make(inputs, quantizers.x, -contracted)
    shape = operand.tensor.shape
    batch = len(shape) - contracted
    kernel_codes, kernel_amax = encode(quantizers.kernel, kernel, contracted)
    y = forward_product(
        row_operand(operand.tensor, batch), column_operand(kernel_codes, contracted), dtype
    )
    saved = codes_to_bits(
        (column_operand(operand.tensor, batch), row_operand(kernel_codes, contracted))
    )
    if not quantizers.is_noop:
        y = undifferentiated(y, of)
    x_like = jnp.zeros((0, *shape), dtype)
    return (y, passed), (
        saved,
        (x_like, *likes),
        quantizers,
        (operand.amax, kernel_amax),
        operand.saved,
    )


def _product_bwd(
    source: OperandSource, contracted: int, residuals: Any, cotangents: Any
) -> tuple[Any, ...]:
    """Backward pass of `_product`: gradients of the inputs and the kernel, and the next quantizer states."""
    saved, (x_like, inputs, kernel_like), quantizers, amaxes, source_saved = residuals
    x_columns, kernel_rows = bits_to_codes(saved)
    batch, of = x_like.ndim - 1 - contracted, (cotangents, inputs, kernel_like)
    if not quantizers.is_noop:
        cotangents = constant(cotangents)
    dy, passed = cotangents
    quantizer, transposes_late = gradient_quantizer(quantizers.dgrad, dy)
    codes, amax = encode(quantizer, dy, batch)
    dtypes = x_like.dtype, kernel_like.dtype
    dx, dkernel = gradient_products(codes, transposes_late, batch, kernel_rows, x_columns, dtypes)
    # The three states advance here, in one operation, because the last maximum has just been computed.
    states = (quantizers.x, quantizers.kernel, quantizers.dgrad)
    following = as_cotangent(QuantizerSet(*advanced_together(states, (*amaxes, amax))))
    gradients = (source.gradients(source_saved, dx, passed), dkernel)
    if not quantizers.is_noop:
        gradients = undifferentiated(gradients, of)
    return *gradients, following


_product.defvjp(_product_fwd, _product_bwd)
