"""LayerNorm and RMSNorm under the names of the extension; statistics are float32 [M], M rows of H features."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from transformer_engine.common.checks import epsilon, switch
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.primitives import norm
from transformer_engine.pytorch.runtime.checks import floating, same_shape

from .cast import given_or_quantized, torch_dtype
from .checks import matrix, output_or_none, quantizer_or_none, vector


def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor | None, eps: float, ln_out: Any, quantizer: Any,
    otype: DType | int, sm_margin: int, zero_centered_gamma: bool,
) -> list[Any]:  # fmt: skip
    """[out, mean, rstdev] of input [M, H]; out in otype, quantized if quantizer is given, into ln_out if given."""
    _check_forward(input, weight, bias, eps, ln_out, quantizer, otype, zero_centered_gamma)
    y, mean, rstdev = norm.layernorm_forward(input, weight, bias, eps, zero_centered_gamma)
    return [given_or_quantized(y.to(torch_dtype(otype)), quantizer, ln_out), mean, rstdev]


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:  # fmt: skip
    """[dx, dgamma, dbeta]."""
    floating("mu", mu)
    _check_backward(dz, x, mu, rsigma, gamma, None, zero_centered_gamma)
    return list(norm.layernorm_backward(dz, x, mu, rsigma, gamma, zero_centered_gamma))


def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, ln_out: Any, quantizer: Any, otype: DType | int,
    sm_margin: int, zero_centered_gamma: bool,
) -> list[Any]:  # fmt: skip
    """[out, None, rstdev] of input [M, H]; see layernorm_fwd."""
    _check_forward(input, weight, None, eps, ln_out, quantizer, otype, zero_centered_gamma)
    y, rstdev = norm.rmsnorm_forward(input, weight, eps, zero_centered_gamma)
    return [given_or_quantized(y.to(torch_dtype(otype)), quantizer, ln_out), None, rstdev]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """[dx, dgamma]."""
    _check_backward(dz, x, None, rsigma, gamma, None, zero_centered_gamma)
    return list(norm.rmsnorm_backward(dz, x, rsigma, gamma, zero_centered_gamma))


def rmsnorm_bwd_add(
    dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:  # fmt: skip
    """[dx + add, dgamma]."""
    matrix("add", add)
    _check_backward(dz, x, None, rsigma, gamma, add, zero_centered_gamma)
    return list(norm.rmsnorm_backward(dz, x, rsigma, gamma, zero_centered_gamma, add))


def _check_forward(
    input: Any, weight: Any, bias: Any, eps: Any, ln_out: Any, quantizer: Any, otype: Any,
    zero_centered_gamma: Any,
) -> None:  # fmt: skip
    matrix("input", input)
    vector("weight", weight, input.shape[-1])
    if bias is not None:
        vector("bias", bias, input.shape[-1])
    epsilon("eps", eps)
    switch("zero_centered_gamma", zero_centered_gamma)
    quantizer_or_none(quantizer)
    torch_dtype(otype)
    output_or_none("ln_out", ln_out, input)


def _check_backward(
    dz: Any, x: Any, mu: Any, rsigma: Any, gamma: Any, add: Any, zero_centered_gamma: Any
) -> None:
    matrix("x", x)
    matrix("dz", dz)
    same_shape("dz", dz, "x", x)
    if add is not None:
        same_shape("add", add, "x", x)
    vector("gamma", gamma, x.shape[-1])
    vector("rsigma", rsigma, x.shape[0])
    if mu is not None:
        vector("mu", mu, x.shape[0])
    switch("zero_centered_gamma", zero_centered_gamma)
