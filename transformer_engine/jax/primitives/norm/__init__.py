"""y = layernorm(x) or rmsnorm(x), and their gradients, on arrays [..., width]."""

from __future__ import annotations

from jax import Array

from ....common.dispatch import Table
from . import reference
from .request import NormRequest

__all__ = ["TABLE", "NormRequest", "norm_backward", "norm_forward"]

TABLE: Table[NormRequest] = Table("jax_norm", (reference.BACKEND,))


def norm_forward(
    x: Array, gamma: Array, beta: Array | None, centered: bool, zero_centered: bool, epsilon: float
) -> tuple[Array, Array | None, Array]:
    """y in x's dtype; mean (None unless centered) and rstdev, float32 [..., 1].

    centered   layernorm, with mean and beta; else rmsnorm
    """
    run = TABLE.bind(NormRequest("forward", x.shape[-1], x.dtype))
    return run(x, gamma, beta, centered, zero_centered, epsilon)


def norm_backward(
    dy: Array, x: Array, mean: Array | None, rstdev: Array, gamma: Array, zero_centered: bool
) -> tuple[Array, Array, Array]:
    """dx in x's dtype, dgamma and dbeta float32 [width]."""
    run = TABLE.bind(NormRequest("backward", x.shape[-1], x.dtype))
    return run(dy, x, mean, rstdev, gamma, zero_centered)
