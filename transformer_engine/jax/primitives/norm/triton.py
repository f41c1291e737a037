"""Norms with the kernels in common/kernels/norm.py, on matrices [rows, width] whose rows may be several axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ...runtime.platform import processors
from ..kernels import Kernel
from ..launching import perform, platform_failure, run
from ..partitioning import ShardingRule
from ..several_axes import call_on_axes, with_rows
from .reference import NormRequest


def unsupported_reason(request: NormRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if request.rows == 0:
        return "an array without rows"
    name = "NormFwdPrimitive" if request.operation == "forward" else "NormBwdPrimitive"
    return platform_failure(request.platform, name)


@dataclass(frozen=True)
class _NormKernel(Kernel):
    """Base class for norm kernels, whose rows are not sharded along the width."""

    centered: bool
    zero_centered: bool


@dataclass(frozen=True)
class NormForward(_NormKernel):
    """Normalize x [rows, width]: y, the mean [rows] if centered, and rstdev [rows].

    Operands: x, gamma and, if centered, beta.
    """

    epsilon: float

    @property
    def rule(self) -> ShardingRule:
        return ShardingRule(
            "r w, w, w -> r w, r, r" if self.centered else "r w, w -> r w, r", ("w",)
        )

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        x = operands[0]
        statistic = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
        return (jax.ShapeDtypeStruct(x.shape, x.dtype), *(statistic,) * (2 if self.centered else 1))

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import norm

        x, gamma, *offsets = arrays
        beta = offsets[0] if offsets else None
        rows, width = x.shape
        norms = (self.epsilon, self.zero_centered, self.centered)
        gpu = processors()
        launch = norm.forward(
            norm.NormRows(rows, width, width, x.dtype.name, *norms, gpu.count, gpu.shared_memory)
        )
        _, _, y, mean, rstdev, *_ = run(launch, [x, gamma, beta, None, None])
        return tuple(result for result in (y, mean, rstdev) if result is not None)


@dataclass(frozen=True)
class NormBackward(_NormKernel):
    """Gradients dx, dgamma and, if centered, dbeta; `dtype` is the dtype of dgamma and dbeta.

    Operands: dy and x [rows, width], a tensor that is added to dx, if any, gamma, the mean if centered, and rstdev.
    """

    dtype: str
    adds: bool = False

    @property
    def rule(self) -> ShardingRule:
        matrices = ", ".join(["r w"] * (3 if self.adds else 2))
        outputs = "w, r, r -> r w, w, w" if self.centered else "w, r -> r w, w"
        summed = (1, 2) if self.centered else (1,)
        return ShardingRule(f"{matrices}, {outputs}", ("w",), summed=summed)

    @property
    def in_parts(self) -> NormBackward:
        return dataclasses.replace(self, dtype="float32")

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        x = operands[1]
        gradient = jax.ShapeDtypeStruct(x.shape[1:], jnp.dtype(self.dtype))
        return (jax.ShapeDtypeStruct(x.shape, x.dtype), *(gradient,) * (2 if self.centered else 1))

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import norm

        dy, x, *others = arrays
        add = others[0] if self.adds else None
        gamma, *statistics = others[self.adds :]
        rows, width = x.shape
        machine = processors()
        bytes_of_a_column = sum(one.dtype.itemsize for one in (dy, x, add) if one is not None)
        program = norm.backward(
            rows,
            width,
            (width, width, 0 if add is None else width),
            x.dtype.name,
            self.dtype,
            self.zero_centered,
            self.centered,
            bytes_of_a_column,
            machine.count,
            machine.shared_memory,
        )
        mean = statistics[0] if self.centered else None
        results = perform(program, [dy, x, add, gamma, mean, statistics[-1]])
        return tuple(array for array in results if array is not None)


def forward(
    x: Array, gamma: Array, beta: Array | None, centered: bool, zero_centered: bool, epsilon: float
) -> tuple[Array, Array | None, Array]:
    """See `norm_forward`."""
    affine = (gamma, beta) if centered and beta is not None else (gamma,)
    of_rows, count = with_rows(x, 1)
    kernel = NormForward(centered, zero_centered, epsilon)
    y, *statistics = call_on_axes(kernel, {"r": count}, of_rows, *affine)
    rows = (*x.shape[:-1], 1)
    mean = statistics[0].reshape(rows) if centered else None
    return y.reshape(x.shape), mean, statistics[-1].reshape(rows)


def backward(
    dy: Array,
    x: Array,
    mean: Array | None,
    rstdev: Array,
    gamma: Array,
    add: Array | None,
    zero_centered: bool,
    dtype: str,
) -> tuple[Array, Array, Array]:
    """See `norm_backward`."""
    (of_rows, count), (gradient, _) = with_rows(x, 1), with_rows(dy, 1)
    added = () if add is None else (with_rows(add, 1)[0],)
    saved_statistics = (rstdev,) if mean is None else (mean, rstdev)
    statistics = (statistic.reshape(of_rows.shape[:-1]) for statistic in saved_statistics)
    kernel = NormBackward(mean is not None, zero_centered, dtype, add is not None)
    gradients = call_on_axes(kernel, {"r": count}, gradient, of_rows, *added, gamma, *statistics)
    dbeta = gradients[2] if mean is not None else jnp.zeros_like(gradients[1])
    return gradients[0].reshape(x.shape), gradients[1], dbeta


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}
BACKEND = Backend[NormRequest](
    "triton",
    unsupported_reason=unsupported_reason,
    bind=lambda request: OPERATIONS[request.operation],
)
