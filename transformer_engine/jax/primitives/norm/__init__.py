"""y = layernorm(x) or rmsnorm(x), and their gradients, on arrays [..., width]."""

from __future__ import annotations

from jax import Array

from ....common.dispatch import Table
from ..kernels import sums_dtype
from ..platforms import compute
from . import reference, triton
from .reference import NormRequest

__all__ = ["TABLE", "NormRequest", "norm_backward", "norm_forward"]

TABLE: Table[NormRequest] = Table("jax_norm", (triton.BACKEND, reference.BACKEND))


def norm_forward(
    x: Array, gamma: Array, beta: Array | None, centered: bool, zero_centered: bool, epsilon: float
) -> tuple[Array, Array | None, Array]:
    """Compute y = layernorm(x) or rmsnorm(x).

    Args:
        x: Values [..., width].
        gamma: Scale [width].
        beta: Bias [width] for a layernorm, or None.
        centered: Whether the norm is a layernorm; otherwise an rmsnorm.
        zero_centered: Whether the scale is gamma + 1.
        epsilon: Added to the variance.

    Returns:
        y in x's dtype; mean (None unless centered) and rstdev, float32 [..., 1].
    """
    return compute(
        TABLE,
        lambda platform: NormRequest.of("forward", x, platform),
        x,
        gamma,
        beta,
        centered=centered,
        zero_centered=zero_centered,
        epsilon=epsilon,
    )


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
    """Compute dx + add in x's dtype, and dgamma and dbeta [width] in the dtypes of gamma and beta, from float32 sums.

    dbeta is None without beta. add has the shape of x and is added in float32, before dx is rounded.
    """
    dtype = sums_dtype(*(parameter.dtype for parameter in (gamma, beta) if parameter is not None))
    dx, dgamma, dbeta = compute(
        TABLE,
        lambda platform: NormRequest.of("backward", x, platform),
        dy,
        x,
        mean,
        rstdev,
        gamma,
        add,
        zero_centered=zero_centered,
        dtype=dtype,
    )
    return dx, dgamma.astype(gamma.dtype), None if beta is None else dbeta.astype(beta.dtype)
