"""y = layernorm(x) or rmsnorm(x) over the last axis, in FP8 if a quantizer is given."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import Array

from ..common.checks import accepts_former_keywords, described, switch
from ..common.checks import epsilon as check_epsilon
from .functions.products import quantized_identity
from .primitives.norm import norm_backward, norm_forward
from .quantize.quantizers import Quantizer
from .quantize.sharing import align_mesh_axes
from .runtime.checks import check_optional, check_shaped, check_values
from .runtime.explicit_axes import explicit_entries, unique_axes, with_automatic_axes
from .runtime.residual import is_bypassed, store_returned_input

__all__ = ["canonicalize_norm_type", "layernorm"]

_TYPES = ("layernorm", "rmsnorm")


@accepts_former_keywords(norm_type="x")
def canonicalize_norm_type(x: str) -> str:
    """Convert a name in any case, with - or _, to "layernorm" or "rmsnorm".

    Args:
        x: The name, for example "LayerNorm" or "rms-norm".
    """
    if not isinstance(x, str):
        raise TypeError(f"the norm {described(x)} is not a str; give 'layernorm' or 'rmsnorm'")
    name = x.lower().replace("-", "").replace("_", "")
    if name not in _TYPES:
        raise ValueError(f"the norm {x!r} is unknown; choose 'layernorm' or 'rmsnorm'")
    return name


def layernorm(
    x: Array,
    gamma: Array,
    beta: Array | None,
    norm_type: str,
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    quantizer: Quantizer | None = None,
) -> Array:
    """Normalize the last axis of x: y [.., width] in x's dtype.

    Args:
        x: Input [.., width].
        gamma: Factor [width].
        beta: Offset [width], or None.
        norm_type: "layernorm", or "rmsnorm", which takes neither beta nor zero_centered_gamma.
        zero_centered_gamma: Multiply by 1 + gamma.
        epsilon: Added to the variance or the mean square.
        quantizer: Quantizer for y. Its cotangent is its state of the next step.
    """
    name = check_norm(x, gamma, beta, norm_type, zero_centered_gamma, epsilon)
    check_optional("quantizer", quantizer, Quantizer)
    passes = is_bypassed(x)
    (x, gamma, beta), quantizer = align_mesh_axes((x, gamma, beta), quantizer)
    options = (name == "layernorm", zero_centered_gamma, float(epsilon), passes)
    y, passed = with_automatic_axes(
        lambda *arrays: _norm(*arrays, *options),
        x,
        gamma,
        beta,
        out=lambda: ((spec := unique_axes(explicit_entries(x))), (spec,) * passes),
    )
    store_returned_input(passed)
    return y if quantizer is None else quantized_identity(y, quantizer)


def check_norm(
    x: Array,
    gamma: Array,
    beta: Array | None,
    norm_type: str,
    zero_centered_gamma: bool,
    epsilon: float,
) -> str:
    """Get the norm's canonical name; raise an error if the arguments do not fit together."""
    name = canonicalize_norm_type(norm_type)
    check_values("x", x)
    check_epsilon("epsilon", epsilon)
    switch("zero_centered_gamma", zero_centered_gamma)
    check_shaped("gamma", gamma, x.shape[-1:])
    if beta is not None:
        check_shaped("beta", beta, x.shape[-1:])
    if name == "rmsnorm" and beta is not None:
        raise ValueError("the norm 'rmsnorm' has no beta; give beta=None")
    if name == "rmsnorm" and zero_centered_gamma:
        raise ValueError(
            "zero_centered_gamma=True belongs to 'layernorm', and the norm is 'rmsnorm'; set it to False"
        )
    if name == "layernorm" and beta is None:
        raise ValueError(
            "the norm 'layernorm' needs beta, which is None; give one number per column"
        )
    return name


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _norm(
    x: Array,
    gamma: Array,
    beta: Array | None,
    centered: bool,
    zero_centered: bool,
    epsilon: float,
    passes: bool,
) -> tuple[Array, tuple[Array, ...]]:
    """Compute y, and x for a norm whose result passes through codes."""
    return _norm_fwd(x, gamma, beta, centered, zero_centered, epsilon, passes)[0]


def _norm_fwd(
    x: Array,
    gamma: Array,
    beta: Array | None,
    centered: bool,
    zero_centered: bool,
    epsilon: float,
    passes: bool,
) -> tuple[Any, Any]:
    y, mean, rstdev = norm_forward(x, gamma, beta, centered, zero_centered, epsilon)
    return (y, (x,) if passes else ()), (x, gamma, beta, mean, rstdev)


def _norm_bwd(
    centered: bool, zero_centered: bool, epsilon: float, passes: bool, saved: Any, cotangents: Any
) -> tuple[Any, ...]:
    x, gamma, beta, mean, rstdev = saved
    dy, passed = cotangents
    return norm_backward(dy, x, gamma, beta, mean, rstdev, zero_centered, *passed)


_norm.defvjp(_norm_fwd, _norm_bwd)
