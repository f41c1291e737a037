"""Masked softmax with the kernels in common/kernels/softmax.py; its gradient is dx = p * (dp - sum(dp * p))."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ..kernels import Kernel, call
from ..launching import platform_failure, run_first
from ..partitioning import ShardingRule, broadcast_factors, strides_over_scores
from .reference import SoftmaxRequest

_LIMIT = 1 << 31  # rows are numbered in 32 bits


def unsupported_reason(request: SoftmaxRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if request.sink:
        return "a sink; the kernel has none"
    if len(request.shape) != 4 or 0 in request.shape:
        return f"scores of shape {request.shape}; supported: [b, h, q, k] with elements"
    batch, heads, queries, _ = request.shape
    if batch * heads * queries >= _LIMIT:
        return f"{request.shape} has {_LIMIT} rows or more"
    name = "ScaledMaskedSoftmaxFwdPrimitive" if request.hidden else "ScaledSoftmaxFwdPrimitive"
    return platform_failure(request.platform, name)


@dataclass(frozen=True)
class SoftmaxForward(Kernel):
    """Compute the softmax p of x [b, h, q, k].

    A mask `hidden`, uint8 with extents of 1 where it broadcasts, may follow as the second operand.

    Attributes:
        mask: Factors for hidden's axes; None without a mask.
    """

    mask: str | None

    @property
    def rule(self) -> ShardingRule:
        mask = "" if self.mask is None else f", {self.mask}"
        return ShardingRule(f"b h q k{mask} -> b h q k", ("q", "k"))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        x = operands[0]
        return (jax.ShapeDtypeStruct(x.shape, x.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import softmax

        x, *masks = arrays
        hidden = masks[0] if masks else None
        launch = softmax.forward(x.shape, strides_over_scores(hidden), x.dtype.name, 1.0, None)  # pyright: ignore
        return (run_first(launch, [x, hidden]),)


@dataclass(frozen=True)
class SoftmaxBackward(Kernel):
    """Compute the gradient dx from dp and p [b, h, q, k]."""

    @property
    def rule(self) -> ShardingRule:
        return ShardingRule("b h q k, b h q k -> b h q k", ("q", "k"))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        _, p = operands
        return (jax.ShapeDtypeStruct(p.shape, p.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import softmax

        dp, p = arrays
        launch = softmax.backward(p.shape, p.dtype.name, 1.0, None)  # pyright: ignore
        return (run_first(launch, [dp, p]),)


@jax.custom_vjp
def softmax(scores: Array, hidden: Array | None) -> Array:
    """See `masked_softmax`; hidden uint8 with four axes."""
    if hidden is None:
        return call(SoftmaxForward(None), scores)[0]
    mask = broadcast_factors("m", hidden.shape, [*zip("bhqk", scores.shape, strict=True)])
    return call(SoftmaxForward(mask), scores, hidden)[0]


softmax.defvjp(
    lambda scores, hidden: ((p := softmax(scores, hidden)), p),
    lambda p, dp: (call(SoftmaxBackward(), dp, p)[0], None),
)


def run_masked(scores: Array, hidden: Array | None, sink: Array | None) -> Array:
    """See `masked_softmax`."""
    if hidden is not None:
        hidden = hidden.reshape((1,) * (4 - hidden.ndim) + hidden.shape).astype(jnp.uint8)
    return softmax(scores, hidden)


BACKEND = Backend[SoftmaxRequest](
    "triton", unsupported_reason=unsupported_reason, bind=lambda request: run_masked
)
