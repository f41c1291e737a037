"""The norms by the kernels of common/kernels/norm.py, on matrices [rows, width]."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ...platform import processors
from ..kernels import Kernel, call
from ..launching import perform, refuses_on, run
from .request import NormRequest


def refuses(request: NormRequest) -> str | None:
    if request.rows == 0:
        return "an array without rows"
    name = "NormFwdPrimitive" if request.operation == "forward" else "NormBwdPrimitive"
    return refuses_on(request.platform, name)


@dataclass(frozen=True)
class _Norm(Kernel):
    """A norm, which needs whole rows."""

    centered: bool
    zero_centered: bool
    whole = ("w",)


@dataclass(frozen=True)
class Forward(_Norm):
    """(x [rows, width], gamma, [beta]) -> y, [mean [rows]], rstdev [rows]"""

    epsilon: float

    @property
    def rule(self) -> str:
        return "r w, w, w -> r w, r, r" if self.centered else "r w, w -> r w, r"

    def results(self, x: Any, *_: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        statistic = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
        return (jax.ShapeDtypeStruct(x.shape, x.dtype), *(statistic,) * (2 if self.centered else 1))

    def run(self, x: Array, gamma: Array, beta: Array | None = None) -> tuple[Array, ...]:
        from ....common.kernels import norm  # it imports triton

        rows, width = x.shape
        norms = (self.epsilon, self.zero_centered, self.centered)
        launch = norm.forward(norm.Rows(rows, width, width, x.dtype.name, *norms, processors().count))
        _, _, y, mean, rstdev, *_ = run(launch, [x, gamma, beta, None, None])
        return tuple(made for made in (y, mean, rstdev) if made is not None)


@dataclass(frozen=True)
class Backward(_Norm):
    """(dy, x [rows, width], gamma, [mean], rstdev) -> dx, dgamma, [dbeta]; dtype: of the last two"""

    dtype: str

    @property
    def summed(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (1, 2) if self.centered else (1,)

    @property
    def rule(self) -> str:
        return "r w, r w, w, r, r -> r w, w, w" if self.centered else "r w, r w, w, r -> r w, w"

    @property
    def in_parts(self) -> Backward:
        return dataclasses.replace(self, dtype="float32")

    def results(self, dy: Any, x: Any, *_: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        gradient = jax.ShapeDtypeStruct(x.shape[1:], jnp.dtype(self.dtype))
        return (jax.ShapeDtypeStruct(x.shape, x.dtype), *(gradient,) * (2 if self.centered else 1))

    def run(self, dy: Array, x: Array, gamma: Array, *statistics: Array) -> tuple[Array, ...]:
        from ....common.kernels import norm  # it imports triton

        rows, width = x.shape
        machine = processors()
        program = norm.backward(
            rows, width, (width, width, 0), x.dtype.name, self.dtype, self.zero_centered, self.centered,
            dy.dtype.itemsize + x.dtype.itemsize, machine.count, machine.shared_memory,
        )  # fmt: skip
        mean = statistics[0] if self.centered else None
        made = perform(program, [dy, x, None, gamma, mean, statistics[-1]])
        return tuple(array for array in made if array is not None)


def forward(
    x: Array, gamma: Array, beta: Array | None, centered: bool, zero_centered: bool, epsilon: float
) -> tuple[Array, Array | None, Array]:
    """See `norm_forward`."""
    given = (gamma, beta) if centered and beta is not None else (gamma,)
    y, *statistics = call(Forward(centered, zero_centered, epsilon), _matrix(x), *given)
    rows = (*x.shape[:-1], 1)
    mean = statistics[0].reshape(rows) if centered else None
    return y.reshape(x.shape), mean, statistics[-1].reshape(rows)


def backward(
    dy: Array, x: Array, mean: Array | None, rstdev: Array, gamma: Array, zero_centered: bool, dtype: str
) -> tuple[Array, Array, Array]:
    """See `norm_backward`."""
    statistics = (rstdev.ravel(),) if mean is None else (mean.ravel(), rstdev.ravel())
    kernel = Backward(mean is not None, zero_centered, dtype)
    made = call(kernel, _matrix(dy), _matrix(x), gamma, *statistics)
    dbeta = made[2] if mean is not None else jnp.zeros_like(made[1])
    return made[0].reshape(x.shape), made[1], dbeta


def _matrix(x: Array) -> Array:
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}
BACKEND = Backend[NormRequest]("triton", refuses=refuses, bind=lambda request: OPERATIONS[request.operation])
