"""Codes of a tensor, with the sums of its columns beside them, and of groups of rows."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array

from ...common.checks import member, switch
from ...common.dispatch import use_backend
from ..checks import check_optional, check_values
from ..quantize.grouped import GroupedNoScaleTensor, GroupedQuantizer
from ..quantize.quantizers import Quantizer
from ..quantize.tensors import NoScaleTensor, positive_axis
from ..sharding import automatic_axes, is_mesh_available, mesh_resource_or_default
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


class AmaxScope(enum.Enum):
    """Devices whose absolute maximum a scale is made from, for calls inside shard_map.

    LOCAL   this device alone
    TPSP    the devices along MeshResource.tpsp_resource
    FSDP    the devices along MeshResource.fsdp_resource
    """

    LOCAL = 1
    TPSP = 2
    FSDP = 3

    def axes(self) -> tuple[str, ...]:
        """The mesh axis of the scope if it is manual here; outside of shard_map maxima cover all devices anyway."""
        resource = mesh_resource_or_default()
        axis = {AmaxScope.TPSP: resource.tpsp_resource, AmaxScope.FSDP: resource.fsdp_resource}.get(self)
        return () if axis is None or not is_mesh_available() or axis in automatic_axes() else (axis,)


def quantize(
    x: Array, quantizer: Quantizer | None, flatten_axis: int = -1, amax_scope: AmaxScope = AmaxScope.LOCAL
) -> Any:
    """Quantize x and advance the quantizer's state; without a quantizer return a NoScaleTensor."""
    check_values("x", x)
    check_optional("quantizer", quantizer, Quantizer)
    member("amax_scope", amax_scope, AmaxScope)
    if quantizer is None:
        return NoScaleTensor(x)
    return quantizer.quantize(x, flatten_axis=flatten_axis, over=amax_scope.axes())


def quantize_dbias(
    dz: Array,
    quantizer: Quantizer | None,
    is_dbias: bool = True,
    flatten_axis: int = -1,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
) -> tuple[Any, Array | None]:
    """Return dz quantized and its sums over the axes in front of flatten_axis, in dz's dtype."""
    check_values("dz", dz)
    switch("is_dbias", is_dbias)
    dbias = None
    if is_dbias:
        rows = tuple(range(positive_axis(flatten_axis, dz.ndim)))
        dbias = dz.astype(jnp.float32).sum(axis=rows).astype(dz.dtype)
    return quantize(dz, quantizer, flatten_axis, amax_scope), dbias


def grouped_quantize(
    x: Array, quantizer: GroupedQuantizer | None, group_sizes: Array | None = None, *, flatten_axis: int = -1
) -> Any:
    """Quantize the groups of x [M, K], or of a stack [G, ..]; flatten_axis is where the columns begin."""
    check_values("x", x)
    check_optional("quantizer", quantizer, GroupedQuantizer)
    if quantizer is None:
        return GroupedNoScaleTensor(x, group_sizes=group_sizes)
    return quantizer.quantize(x, group_sizes=group_sizes, flatten_axis=flatten_axis)


_jax_quantize = by_reference(quantize)
_jax_quantize_dbias = by_reference(quantize_dbias)
