"""y = layernorm(x) or rmsnorm(x), and their gradients, on arrays [..., width]."""

from __future__ import annotations

from jax import Array

from ....common.dispatch import Table
from ..platforms import computed
from . import reference, triton
from .request import NormRequest

__all__ = ["TABLE", "NormRequest", "norm_backward", "norm_forward"]

TABLE: Table[NormRequest] = Table("jax_norm", (triton.BACKEND, reference.BACKEND))
_STORED = {"float32", "bfloat16", "float16"}


def norm_forward(
    x: Array, gamma: Array, beta: Array | None, centered: bool, zero_centered: bool, epsilon: float
) -> tuple[Array, Array | None, Array]:
    """y in x's dtype; mean (None unless centered) and rstdev, float32 [..., 1].

    centered   layernorm, with mean and beta; else rmsnorm
    """
    return computed(
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
) -> tuple[Array, Array, Array | None]:
    """dx in x's dtype, dgamma and dbeta [width] in gamma's and beta's, sums of float32; None without beta."""
    dtypes = {gamma.dtype.name, (gamma if beta is None else beta).dtype.name}
    # The kernel writes both in one dtype; rounded behind it, each would take a kernel of XLA's.
    dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= _STORED else "float32"
    dx, dgamma, dbeta = computed(
        TABLE, lambda platform: NormRequest.of("backward", x, platform), dy, x, mean, rstdev, gamma,
        zero_centered=zero_centered, dtype=dtype,
    )  # fmt: skip
    return dx, dgamma.astype(gamma.dtype), None if beta is None else dbeta.astype(beta.dtype)
