"""Activations with the kernels of common/kernels/activation.py, on arrays [rows, n, width].

Several axes may form the rows. Rows and columns may be sharded; the unit and gate axis n may not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from ....common.dispatch import Backend
from ..kernels import Kernel
from ..launching import platform_failure, run, run_first
from ..partitioning import ShardingRule
from ..several_axes import call_on_axes, with_rows
from .reference import ActivationParams, ActivationRequest

# Activation names in common/kernels.
_CURVES = {
    "gelu": "gelu",
    "silu": "silu",
    "relu": "relu",
    "quick_gelu": "qgelu",
    "squared_relu": "srelu",
    "clamped_silu": "clamped_swiglu",
}


def unsupported_reason(request: ActivationRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if request.elements == 0:
        return "an array without elements"
    name = "ActLuPrimitive" if request.operation == "forward" else "DActLuDBiasQuantizePrimitive"
    return platform_failure(request.platform, name)


@dataclass(frozen=True)
class ActivationKernel(Kernel):
    """Base class for one activation's kernels."""

    names: tuple[str, ...]
    params: ActivationParams

    @property
    def curve(self) -> tuple[str, bool]:
        """Activation name in the kernel module, and whether a gate multiplies it."""
        return _CURVES[self.names[0]], len(self.names) == 2

    @property
    def constants(self) -> tuple[float, float, float]:
        """Constants for the clamped activations: limit, alpha and linear offset."""
        return self.params.limit, self.params.alpha, self.params.glu_linear_offset


@dataclass(frozen=True)
class ActivationForward(ActivationKernel):
    """Compute the activation y [rows, width] of x [rows, n, width]."""

    @property
    def rule(self) -> ShardingRule:
        return ShardingRule("r n w -> r w", ("n",))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        (x,) = operands
        return (jax.ShapeDtypeStruct((x.shape[0], x.shape[2]), x.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import activation

        (x,) = arrays
        rows, parts, width = x.shape
        launch = activation.forward(
            *self.curve, rows, width, parts * width, x.dtype.name, self.constants
        )
        return (run_first(launch, [x.reshape(rows, parts * width)]),)


@dataclass(frozen=True)
class ActivationBackward(ActivationKernel):
    """Compute the gradient dx [rows, n, width] from dy [rows, width] and x."""

    @property
    def rule(self) -> ShardingRule:
        return ShardingRule("r w, r n w -> r n w", ("n",))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        _, x = operands
        return (jax.ShapeDtypeStruct(x.shape, x.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import activation

        dy, x = arrays
        rows, parts, width = x.shape
        launch = activation.backward(
            *self.curve, rows, width, (width, parts * width), x.dtype.name, self.constants
        )
        # dx reuses the memory of x: at the peak of a layer's backward pass they are the two largest arrays.
        (dx,) = run(launch, [dy, x.reshape(rows, parts * width)], reuses={1: 0})
        assert dx is not None
        return (dx.reshape(x.shape),)


def forward(x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    """See `activation_forward`."""
    matrix, count = with_rows(x, 2)
    (y,) = call_on_axes(ActivationForward(names, params), {"r": count}, matrix)
    return y.reshape(*x.shape[:-2], x.shape[-1])


def backward(dy: Array, x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    """See `activation_backward`."""
    (matrix, count), (gradient, _) = with_rows(x, 2), with_rows(dy, 1)
    (dx,) = call_on_axes(ActivationBackward(names, params), {"r": count}, gradient, matrix)
    return dx.reshape(x.shape)


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}
BACKEND = Backend[ActivationRequest](
    "triton",
    unsupported_reason=unsupported_reason,
    bind=lambda request: OPERATIONS[request.operation],
)
