"""The activations by the kernels of common/kernels/activation.py, on matrices [rows, n * width]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax import Array

from ....common.dispatch import Backend
from ..kernels import Kernel, call
from ..launching import refuses_on, run
from .request import ActivationParams, ActivationRequest

# What the kernels call an activation: its curve.
_CURVES = {
    "gelu": "gelu", "silu": "silu", "relu": "relu", "quick_gelu": "qgelu", "squared_relu": "srelu",
    "clamped_silu": "clamped_swiglu",
}  # fmt: skip


def refuses(request: ActivationRequest) -> str | None:
    if request.elements == 0:
        return "an array without elements"
    name = "ActLuPrimitive" if request.operation == "forward" else "DActLuDBiasQuantizePrimitive"
    return refuses_on(request.platform, name)


@dataclass(frozen=True)
class _Activation(Kernel):
    """One activation, and its constants."""

    names: tuple[str, ...]
    params: ActivationParams
    whole = ("w", "v")

    @property
    def gated(self) -> bool:
        return len(self.names) == 2

    @property
    def constants(self) -> tuple[float, float, float]:
        return self.params.limit, self.params.alpha, self.params.glu_linear_offset

    def made_by(self, module: Any) -> str:
        """The kernels' name of the curve; ValueError where common/kernels has none."""
        name = _CURVES[self.names[0]]
        assert name in module.CURVES, name
        return name


@dataclass(frozen=True)
class Forward(_Activation):
    """x [rows, n * width] -> y [rows, width]"""

    @property
    def rule(self) -> str:
        return "r w -> r v"

    def results(self, x: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // len(self.names)), x.dtype),)

    def run(self, x: Array) -> tuple[Array, ...]:
        from ....common.kernels import activation  # it imports triton

        rows, wide = x.shape
        launch = activation.forward(
            self.made_by(activation), self.gated, rows, wide // len(self.names), wide, x.dtype.name, self.constants
        )  # fmt: skip
        return (run(launch, [x])[0],)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Backward(_Activation):
    """(dy [rows, width], x [rows, n * width]) -> dx like x"""

    @property
    def rule(self) -> str:
        return "r v, r w -> r w"

    def results(self, dy: Any, x: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(x.shape, x.dtype),)

    def run(self, dy: Array, x: Array) -> tuple[Array, ...]:
        from ....common.kernels import activation  # it imports triton

        rows, width = dy.shape
        launch = activation.backward(
            self.made_by(activation), self.gated, rows, width, (width, x.shape[1]), x.dtype.name, self.constants
        )  # fmt: skip
        return (run(launch, [dy, x])[0],)  # pyright: ignore[reportReturnType]


def forward(x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    """See `activation_forward`."""
    rows, width = prod(x.shape[:-2]), x.shape[-1]
    (y,) = call(Forward(names, params), x.reshape(rows, len(names) * width))
    return y.reshape(*x.shape[:-2], width)


def backward(dy: Array, x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    """See `activation_backward`."""
    rows, width = prod(x.shape[:-2]), x.shape[-1]
    (dx,) = call(Backward(names, params), dy.reshape(rows, width), x.reshape(rows, len(names) * width))
    return dx.reshape(x.shape)


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}
BACKEND = Backend[ActivationRequest](
    "triton", refuses=refuses, bind=lambda request: OPERATIONS[request.operation]
)
