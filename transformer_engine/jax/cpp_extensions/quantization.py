"""Quantization for tensors and row groups, and column sums for gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array

from ...common.checks import member, switch
from ...common.dispatch import use_backend
from ..quantize.grouped import GroupedNoScaleTensor, GroupedQuantizer, group_of_rows
from ..quantize.quantizers import Quantizer
from ..quantize.tensors import NoScaleTensor, positive_axis
from ..runtime.checks import check_optional, check_sizes, check_values
from .amax import AmaxScope, calculate_amax
from .base import BasePrimitive

Function = TypeVar("Function", bound=Callable[..., Any])


class QuantizePrimitive(BasePrimitive):
    """Switch for quantization kernels."""


class DBiasQuantizePrimitive(BasePrimitive):
    """Switch for kernels that quantize and compute column sums."""


def by_reference(function: Function) -> Function:
    """Wrap a function to use the reference implementations in jnp on every device."""

    @functools.wraps(function)
    def plain(*arguments: Any, **options: Any) -> Any:
        with use_backend(
            jax_quantize="reference", jax_activation="reference", jax_norm="reference"
        ):
            return function(*arguments, **options)

    return cast(Function, plain)


def quantize(
    x: Array,
    quantizer: Quantizer | None,
    flatten_axis: int = -1,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
) -> Any:
    """Quantize x and advance the state of the quantizer.

    Args:
        x: Tensor [*rows, *columns], float32, bfloat16 or float16.
        quantizer: Quantizer, or None.
        flatten_axis: First column axis in x.
        amax_scope: Devices that share the maximum inside shard_map.
        transpose_batch_sequence: Whether the sequence axis precedes the batch axis; does not change the result.

    Returns:
        The quantized tensor; a NoScaleTensor without a quantizer.
    """
    switch("transpose_batch_sequence", transpose_batch_sequence)
    check_values("x", x)
    check_optional("quantizer", quantizer, Quantizer)
    member("amax_scope", amax_scope, AmaxScope)
    if quantizer is None:
        return NoScaleTensor(x)
    return quantizer.quantize(x, flatten_axis=flatten_axis, mesh_axes=amax_scope.axes())


def quantize_dbias(
    dz: Array,
    quantizer: Quantizer | None,
    is_dbias: bool = True,
    flatten_axis: int = -1,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
) -> tuple[Any, Array | None]:
    """Quantize dz, and sum it over the axes before flatten_axis in dz's dtype (None unless is_dbias)."""
    check_values("dz", dz)
    switch("is_dbias", is_dbias)
    dbias = None
    if is_dbias:
        rows = tuple(range(positive_axis(flatten_axis, dz.ndim)))
        dbias = dz.astype(jnp.float32).sum(axis=rows).astype(dz.dtype)
    return quantize(dz, quantizer, flatten_axis, amax_scope, transpose_batch_sequence), dbias


def quantize_result(
    y: Array,
    quantizer: Quantizer | None,
    amax_scope: AmaxScope,
    transpose_batch_sequence: bool,
    output_amax_when_no_scaling: bool,
    flatten_axis: int = -1,
) -> Any:
    """Quantize the result of an operation as `quantize`.

    Without a quantizer, the NoScaleTensor contains its absolute maximum if output_amax_when_no_scaling.
    """
    switch("output_amax_when_no_scaling", output_amax_when_no_scaling)
    tensor = quantize(y, quantizer, flatten_axis, amax_scope, transpose_batch_sequence)
    if quantizer is None and output_amax_when_no_scaling:
        return NoScaleTensor(y, calculate_amax(y, amax_scope, transpose_batch_sequence))
    return tensor


def grouped_dbias(grad: Array, group_sizes: Array) -> Array:
    """Compute per-group row sums [G, N] over grad [M, N], in grad's dtype.

    Args:
        grad: Gradient [M, N], float32, bfloat16 or float16.
        group_sizes: Rows per group, integers [G]. Rows after the last group are not summed.
    """
    check_values("grad", grad)
    if grad.ndim != 2:
        raise ValueError(f"grad has shape {grad.shape}; pass a matrix [M, N]")
    check_sizes("group_sizes", group_sizes, None, grad.shape[0])
    groups = group_of_rows(group_sizes, grad.shape[0])
    sums = jax.ops.segment_sum(grad.astype(jnp.float32), groups, group_sizes.shape[0] + 1)
    return sums[:-1].astype(grad.dtype)


def grouped_quantize(
    x: Array,
    quantizer: GroupedQuantizer | None,
    group_sizes: Array | None = None,
    *,
    flatten_axis: int = -1,
) -> Any:
    """Quantize the groups of x and advance the quantizer's state.

    Args:
        x: Rows in groups [M, K], or a matrix stack [G, *rows, *columns].
        quantizer: Grouped quantizer, or None.
        group_sizes: Rows per group, int32 [G]; None for a stack.
        flatten_axis: First column axis in x.

    Returns:
        The quantized groups; a GroupedNoScaleTensor without a quantizer.
    """
    check_values("x", x)
    check_optional("quantizer", quantizer, GroupedQuantizer)
    if quantizer is None:
        return GroupedNoScaleTensor(x, group_sizes=group_sizes)
    return quantizer.quantize(x, group_sizes=group_sizes, flatten_axis=flatten_axis)


_jax_quantize = by_reference(quantize)
_jax_quantize_dbias = by_reference(quantize_dbias)
