"""Norms with their statistics and optional quantization, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax import Array

from ..layernorm import canonicalize_norm_type, check_norm
from ..primitives.norm import norm_backward, norm_forward
from ..quantize.quantizers import Quantizer
from ..quantize.scaling_modes import ScalingMode
from ..runtime.checks import check_shaped
from .amax import AmaxScope
from .base import BasePrimitive
from .quantization import by_reference, quantize_result


class NormFwdPrimitive(BasePrimitive):
    """Switch for norm kernels."""


class NormBwdPrimitive(BasePrimitive):
    """Switch for norm-gradient kernels."""


def layernorm_fwd(
    x: Array,
    gamma: Array,
    beta: Array,
    zero_centered_gamma: bool,
    epsilon: float,
    quantizer: Quantizer | None = None,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> tuple[Any, Array, Array]:
    """Compute layernorm(x [..., width]), quantized as in `quantize`, and mean and rstdev [...] in float32."""
    y, mean, rstdev = normalization_fwd(
        x,
        gamma,
        beta,
        zero_centered_gamma,
        epsilon,
        "layernorm",
        quantizer,
        amax_scope,
        transpose_batch_sequence,
        output_amax_when_no_scaling,
    )
    assert mean is not None
    return y, mean, rstdev


def rmsnorm_fwd(
    x: Array,
    gamma: Array,
    zero_centered_gamma: bool,
    epsilon: float,
    quantizer: Quantizer | None = None,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> tuple[Any, Array]:
    """Compute rmsnorm(x [..., width]), quantized as in `quantize`, and rstdev [...] in float32."""
    y, _, rstdev = normalization_fwd(
        x,
        gamma,
        None,
        zero_centered_gamma,
        epsilon,
        "rmsnorm",
        quantizer,
        amax_scope,
        transpose_batch_sequence,
        output_amax_when_no_scaling,
    )
    return y, rstdev


def normalization_fwd(
    x: Array,
    gamma: Array,
    beta: Array | None,
    zero_centered_gamma: bool,
    epsilon: float,
    norm_type: str,
    quantizer: Quantizer | None = None,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> tuple[Any, Array | None, Array]:
    """Normalize x over its last axis.

    Args:
        x: Input [..., width], float32, bfloat16 or float16.
        gamma: Scale [width].
        beta: Bias [width] for layernorm; None for rmsnorm.
        zero_centered_gamma: Whether layernorm multiplies by 1 + gamma; False for rmsnorm.
        epsilon: Added to the variance.
        norm_type: "layernorm" or "rmsnorm".
        quantizer: Output quantizer, or None.
        amax_scope: Devices that share the maximum inside shard_map.
        transpose_batch_sequence: Whether the sequence axis precedes the batch axis; does not change the result.
        output_amax_when_no_scaling: Whether a NoScaleTensor contains the absolute maximum of the output.

    Returns:
        A tuple: the output, a quantized tensor or a NoScaleTensor; the mean [...], None for rmsnorm; and the reciprocal
        standard deviation [...]. Both statistics are float32.
    """
    layernorm = check_norm(x, gamma, beta, norm_type, zero_centered_gamma, epsilon) == "layernorm"
    y, mean, rstdev = norm_forward(x, gamma, beta, layernorm, zero_centered_gamma, float(epsilon))
    output = quantize_result(
        y, quantizer, amax_scope, transpose_batch_sequence, output_amax_when_no_scaling
    )
    return output, None if mean is None else mean[..., 0], rstdev[..., 0]


def _with_former_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a gradient, so that it accepts calls without beta; then the sixth argument is a bool."""

    @functools.wraps(function)
    def gradient(*arguments: Any, **options: Any) -> Any:
        if len(arguments) > 5 and isinstance(arguments[5], bool):
            arguments = (*arguments[:5], options.pop("beta", None), *arguments[5:])
        elif len(arguments) < 6:
            options.setdefault("beta", None)
        return function(*arguments, **options)

    return gradient


@_with_former_arguments
def normalization_bwd(
    dz: Array,
    x: Array,
    mu: Array | None,
    rsigma: Array,
    gamma: Array,
    beta: Array | None,
    zero_centered_gamma: bool,
    epsilon: float,
    norm_type: str,
) -> tuple[Array, Array, Array | None]:
    """Compute the gradients for `normalization_fwd`.

    Args:
        dz: Output gradient, with x's shape.
        x: Input [..., width].
        mu: Mean [...] from the forward pass; None for rmsnorm.
        rsigma: Reciprocal standard deviation [...] from the forward pass.
        gamma: Scale [width].
        beta: Bias [width] for layernorm, or None; only its dtype is read. Calls may leave it out.
        zero_centered_gamma: As in the forward pass.
        epsilon: As in the forward pass, which added it; rsigma contains it.
        norm_type: "layernorm" or "rmsnorm".

    Returns:
        A tuple: dx in x's dtype, dgamma [width] in gamma's dtype, and dbeta [width] in the dtype of beta, or of gamma
        without beta; None for rmsnorm.
    """
    layernorm = canonicalize_norm_type(norm_type) == "layernorm"
    check_norm(x, gamma, gamma if layernorm else None, norm_type, zero_centered_gamma, epsilon)
    check_shaped("dz", dz, x.shape)
    for name, statistic in (("mu", mu), ("rsigma", rsigma)) if layernorm else (("rsigma", rsigma),):
        check_shaped(name, statistic, x.shape[:-1])
    mean = None if mu is None or not layernorm else mu[..., None]
    if beta is not None:
        check_shaped("beta", beta, gamma.shape)
    shift = (gamma if beta is None else beta) if layernorm else None
    return norm_backward(dz, x, gamma, shift, mean, rsigma[..., None], zero_centered_gamma)


@_with_former_arguments
def layernorm_bwd(
    dz: Array,
    x: Array,
    mu: Array,
    rsigma: Array,
    gamma: Array,
    beta: Array | None,
    zero_centered_gamma: bool,
    epsilon: float,
) -> tuple[Array, Array, Array]:
    """Compute the gradients dx, dgamma and dbeta for `layernorm_fwd`; `normalization_bwd` documents the arguments."""
    dx, dgamma, dbeta = normalization_bwd(
        dz, x, mu, rsigma, gamma, beta, zero_centered_gamma, epsilon, "layernorm"
    )
    assert dbeta is not None
    return dx, dgamma, dbeta


def rmsnorm_bwd(
    dz: Array, x: Array, rsigma: Array, gamma: Array, zero_centered_gamma: bool, epsilon: float
) -> tuple[Array, Array]:
    """Compute the gradients dx and dgamma for `rmsnorm_fwd`; `normalization_bwd` documents the arguments."""
    dx, dgamma, _ = normalization_bwd(
        dz, x, None, rsigma, gamma, None, zero_centered_gamma, epsilon, "rmsnorm"
    )
    return dx, dgamma


def is_norm_zero_centered_gamma_in_weight_dtype(scaling_mode: ScalingMode) -> bool:
    """Whether 1 + gamma is computed in gamma's dtype: False, since every mode computes it in float32."""
    return False


_jax_layernorm = by_reference(layernorm_fwd)
_jax_rmsnorm = by_reference(rmsnorm_fwd)
