"""Absolute tensor maxima, and the devices that share them."""

from __future__ import annotations

import enum

import jax.numpy as jnp
from jax import Array

from ...common.checks import member, switch
from ..primitives import exact
from ..primitives.operand import turned
from ..primitives.quantize import absolute_maximum, hadamard_transform
from ..quantize.tensors import positive_axis
from ..runtime.checks import check_values
from ..sharding import automatic_axes, is_mesh_available, mesh_resource_or_default

__all__ = ["AmaxScope", "calculate_amax", "calculate_post_rht_amax"]


class AmaxScope(enum.Enum):
    """Devices that share the absolute maximum of a scale, for calls inside shard_map.

    LOCAL is this device, TPSP the devices along MeshResource.tpsp_resource, and FSDP the devices along
    MeshResource.fsdp_resource.
    """

    LOCAL = 1
    TPSP = 2
    FSDP = 3

    def axes(self) -> tuple[str, ...]:
        """The scope's mesh axis if it is manual here; outside shard_map, maxima include all devices."""
        resource = mesh_resource_or_default()
        axis = {AmaxScope.TPSP: resource.tpsp_resource, AmaxScope.FSDP: resource.fsdp_resource}.get(
            self
        )
        return (
            () if axis is None or not is_mesh_available() or axis in automatic_axes() else (axis,)
        )


def calculate_amax(
    x: Array, amax_scope: AmaxScope = AmaxScope.LOCAL, transpose_batch_sequence: bool = False
) -> Array:
    """Compute max|x| as float32 [1].

    Args:
        x: Tensor, float32, bfloat16 or float16.
        amax_scope: Devices that share the maximum inside shard_map.
        transpose_batch_sequence: Whether the sequence axis precedes the batch axis; does not change the maximum.
    """
    check_values("x", x)
    member("amax_scope", amax_scope, AmaxScope)
    switch("transpose_batch_sequence", transpose_batch_sequence)
    return exact.maximum_over_axes(absolute_maximum(jnp.asarray(x)), amax_scope.axes())


def calculate_post_rht_amax(
    x: Array,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    flatten_axis: int = -1,
) -> Array:
    """Compute the absolute maximum after the Hadamard transform along the rows, as float32 [1].

    Args:
        x: Tensor [*rows, *columns], whose number of rows is a multiple of 16.
        amax_scope: Devices that share the maximum inside shard_map.
        transpose_batch_sequence: Whether the sequence axis precedes the batch axis; does not change the maximum.
        flatten_axis: First column axis in x.
    """
    check_values("x", x)
    transposed = turned(jnp.asarray(x), positive_axis(flatten_axis, x.ndim))
    return calculate_amax(
        hadamard_transform(transposed, True), amax_scope, transpose_batch_sequence
    )
