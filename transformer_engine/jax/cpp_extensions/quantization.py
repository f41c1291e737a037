"""Codes of a tensor, with the sums of its columns beside them, and of groups of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array

from ...common.checks import switch
from ...common.dispatch import use_backend
from ..checks import check_optional, check_values
from ..quantize.grouped import GroupedNoScaleTensor, GroupedQuantizer
from ..quantize.quantizers import Quantizer
from ..quantize.tensors import NoScaleTensor, positive_axis
from .base import BasePrimitive

Function = TypeVar("Function", bound=Callable[..., Any])


class QuantizePrimitive(BasePrimitive):
    """Quantization."""


class DBiasQuantizePrimitive(BasePrimitive):
    """Quantization with the sums of columns beside it."""


def by_reference(function: Function) -> Function:
    """The function as the references in jnp compute it, on any device."""

    @functools.wraps(function)
    def plain(*arguments: Any, **options: Any) -> Any:
        with use_backend(jax_quantize="reference", jax_activation="reference", jax_norm="reference"):
            return function(*arguments, **options)

    return plain  # pyright: ignore[reportReturnType]


def quantize(x: Array, quantizer: Quantizer | None, flatten_axis: int = -1) -> Any:
    """The quantized tensor, whose state advances; a NoScaleTensor without a quantizer."""
    check_values("x", x)
    check_optional("quantizer", quantizer, Quantizer)
    return NoScaleTensor(x) if quantizer is None else quantizer.quantize(x, flatten_axis=flatten_axis)


def quantize_dbias(
    dz: Array, quantizer: Quantizer | None, is_dbias: bool = True, flatten_axis: int = -1
) -> tuple[Any, Array | None]:
    """(quantized dz, its sums over the axes in front of flatten_axis in dz's dtype)."""
    check_values("dz", dz)
    switch("is_dbias", is_dbias)
    dbias = None
    if is_dbias:
        rows = tuple(range(positive_axis(flatten_axis, dz.ndim)))
        dbias = dz.astype(jnp.float32).sum(axis=rows).astype(dz.dtype)
    return quantize(dz, quantizer, flatten_axis), dbias


def grouped_quantize(x: Array, quantizer: GroupedQuantizer | None, group_sizes: Array | None = None) -> Any:
    """The groups of x [M, K], or of a stack, as their quantizer makes them."""
    check_values("x", x)
    check_optional("quantizer", quantizer, GroupedQuantizer)
    if quantizer is None:
        return GroupedNoScaleTensor(x, group_sizes=group_sizes)
    return quantizer.quantize(x, group_sizes=group_sizes)


_jax_quantize = by_reference(quantize)
_jax_quantize_dbias = by_reference(quantize_dbias)
