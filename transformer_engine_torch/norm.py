"""LayerNorm and RMSNorm under the names of the extension; statistics are float32 [M], M rows of H features."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.primitives import norm

from .cast import given_or_quantized, torch_dtype


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: DType | int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """[out, mean, rstdev] of input [M, H]; out in otype, quantized if quantizer is given, into ln_out if given."""
    y, mean, rstdev = norm.layernorm_forward(input, weight, bias, eps, zero_centered_gamma)
    return [given_or_quantized(y.to(torch_dtype(otype)), quantizer, ln_out), mean, rstdev]


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """[dx, dgamma, dbeta]."""
    return list(norm.layernorm_backward(dz, x, mu, rsigma, gamma, zero_centered_gamma))


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: DType | int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """[out, None, rstdev] of input [M, H]; see layernorm_fwd."""
    y, rstdev = norm.rmsnorm_forward(input, weight, eps, zero_centered_gamma)
    return [given_or_quantized(y.to(torch_dtype(otype)), quantizer, ln_out), None, rstdev]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """[dx, dgamma]."""
    return list(norm.rmsnorm_backward(dz, x, rsigma, gamma, zero_centered_gamma))


def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """[dx + add, dgamma]."""
    return list(norm.rmsnorm_backward(dz, x, rsigma, gamma, zero_centered_gamma, add))
