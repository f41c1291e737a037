"""y = layernorm(x) or rmsnorm(x), and their gradients, on arrays [..., width]."""

from __future__ import annotations

from jax import Array

from ....common.dispatch import Table
from ..kernels import sums_dtype
from ..platforms import compute
from . import reference, triton
from .request import NormRequest

__all__ = ["TABLE", "NormRequest", "norm_backward", "norm_forward"]

TABLE: Table[NormRequest] = Table("jax_norm", (triton.BACKEND, reference.BACKEND))


def norm_forward(
    x: Array, gamma: Array, beta: Array | None, centered: bool, zero_centered: bool, epsilon: float
) -> tuple[Array, Array | None, Array]:
    """y in x's dtype; mean (None unless centered) and rstdev, float32 [..., 1].

    centered   layernorm, with mean and beta; else rmsnorm
    """
    return compute(
        TABLE, lambda platform: NormRequest.of("forward", x, platform), x, gamma, beta, centered=centered,
        zero_centered=zero_centered, epsilon=epsilon,
    )  # fmt: skip


def norm_backward(
    dy: Array,
    x: Array,
    gamma: Array,
    beta: Array | None,
    mean: Array | None,
    rstdev: Array,
    zero_centered: bool,
    add: Array | None = None,
) -> tuple[Array, Array, Array | None]:
    """dx (+ add, like x) in x's dtype, dgamma and dbeta [width] in gamma's and beta's, sums of float32.

    dbeta is None without beta; add joins in float32, before dx is rounded.
    """
    dtype = sums_dtype(*(parameter.dtype for parameter in (gamma, beta) if parameter is not None))
    dx, dgamma, dbeta = compute(
        TABLE, lambda platform: NormRequest.of("backward", x, platform), dy, x, mean, rstdev, gamma, add,
        zero_centered=zero_centered, dtype=dtype,
    )  # fmt: skip
    return dx, dgamma.astype(gamma.dtype), None if beta is None else dbeta.astype(beta.dtype)
