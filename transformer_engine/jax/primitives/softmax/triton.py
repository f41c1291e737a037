"""The masked softmax by the kernels of common/kernels/softmax.py, and its gradient dx = p * (dp - sum(dp * p))."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ..kernels import Kernel, call
from ..launching import refuses_on, run
from ..partitioning import broadcast_factors, strides_over_scores
from .request import SoftmaxRequest

_LIMIT = 1 << 31  # rows are numbered in 32 bits


def refuses(request: SoftmaxRequest) -> str | None:
    if request.sink:
        return "a sink; the kernel has none"
    if len(request.shape) != 4 or 0 in request.shape:
        return f"scores of shape {request.shape}; it takes [b, h, q, k] with elements"
    batch, heads, queries, _ = request.shape
    if batch * heads * queries >= _LIMIT:
        return f"{request.shape} has {_LIMIT} rows or more"
    name = "ScaledMaskedSoftmaxFwdPrimitive" if request.hidden else "ScaledSoftmaxFwdPrimitive"
    return refuses_on(request.platform, name)


@dataclass(frozen=True)
class Forward(Kernel):
    """(x [b, h, q, k], [hidden uint8, with 1 in place of an extent]) -> p

    mask   the factors of hidden's axes; None: nothing is hidden
    """

    mask: str | None
    whole = ("q", "k")

    @property
    def rule(self) -> str:
        return "b h q k -> b h q k" if self.mask is None else f"b h q k, {self.mask} -> b h q k"

    def results(self, x: Any, *_: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(x.shape, x.dtype),)

    def run(self, x: Array, hidden: Array | None = None) -> tuple[Array, ...]:
        from ....common.kernels import softmax  # it imports triton

        launch = softmax.forward(x.shape, strides_over_scores(hidden), x.dtype.name, 1.0, None)  # pyright: ignore
        return (run(launch, [x, hidden])[0],)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Backward(Kernel):
    """(dp, p [b, h, q, k]) -> dx"""

    whole = ("q", "k")

    @property
    def rule(self) -> str:
        return "b h q k, b h q k -> b h q k"

    def results(self, dp: Any, p: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(p.shape, p.dtype),)

    def run(self, dp: Array, p: Array) -> tuple[Array, ...]:
        from ....common.kernels import softmax  # it imports triton

        launch = softmax.backward(p.shape, p.dtype.name, 1.0, None)  # pyright: ignore
        return (run(launch, [dp, p])[0],)  # pyright: ignore[reportReturnType]


@jax.custom_vjp
def softmax(scores: Array, hidden: Array | None) -> Array:
    """See `masked_softmax`; hidden uint8 of four axes."""
    if hidden is None:
        return call(Forward(None), scores)[0]
    mask = broadcast_factors("m", hidden.shape, [*zip("bhqk", scores.shape, strict=True)])
    return call(Forward(mask), scores, hidden)[0]


def _forward(scores: Array, hidden: Array | None) -> tuple[Array, Array]:
    p = softmax(scores, hidden)
    return p, p


def _backward(p: Array, dp: Array) -> tuple[Array, None]:
    return call(Backward(), dp, p)[0], None


softmax.defvjp(_forward, _backward)


def run_masked(scores: Array, hidden: Array | None, sink: Array | None) -> Array:
    """See `masked_softmax`."""
    if hidden is not None:
        hidden = hidden.reshape((1,) * (4 - hidden.ndim) + hidden.shape).astype(jnp.uint8)
    return softmax(scores, hidden)


BACKEND = Backend[SoftmaxRequest]("triton", refuses=refuses, bind=lambda request: run_masked)
