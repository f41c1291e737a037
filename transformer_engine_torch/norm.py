"""LayerNorm and RMSNorm under the extension's names.

Inputs are [..., H]; the leading axes are flattened to M rows. The statistics are float32 [M].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from transformer_engine.common.checks import epsilon
from transformer_engine.common.numbers import to_bool, to_float
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.primitives import norm
from transformer_engine.pytorch.runtime.checks import floating, same_shape

from .cast import quantize_or_copy, torch_dtype
from .checks import output_or_none, quantizer_or_none, vector, with_axes

__all__ = [
    "layernorm_bwd",
    "layernorm_fwd",
    "rmsnorm_bwd",
    "rmsnorm_bwd_add",
    "rmsnorm_fwd",
]


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
    """Return [out, mean, rstdev]; `out` has the type `otype`, is quantized by `quantizer`, and written to `ln_out`."""
    _check_forward(input, weight, bias, ln_out, quantizer, otype)
    rows, eps, centered = (
        _rows(input),
        _epsilon(eps),
        to_bool("zero_centered_gamma", zero_centered_gamma),
    )
    y, mean, rstdev = norm.layernorm_forward(rows, weight, bias, eps, centered)
    y = y.to(torch_dtype(otype)).view(input.shape)
    return [quantize_or_copy(y, quantizer, ln_out), mean, rstdev]


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """Return [dx, dgamma, dbeta]."""
    floating("mu", mu)
    _check_backward(dz, x, mu, rsigma, gamma, None)
    centered = to_bool("zero_centered_gamma", zero_centered_gamma)
    dx, dgamma, dbeta = norm.layernorm_backward(_rows(dz), _rows(x), mu, rsigma, gamma, centered)
    return [dx.view(x.shape), dgamma, dbeta]


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
    """Return [out, None, rstdev]; see `layernorm_fwd`."""
    _check_forward(input, weight, None, ln_out, quantizer, otype)
    rows, eps, centered = (
        _rows(input),
        _epsilon(eps),
        to_bool("zero_centered_gamma", zero_centered_gamma),
    )
    y, rstdev = norm.rmsnorm_forward(rows, weight, eps, centered)
    y = y.to(torch_dtype(otype)).view(input.shape)
    return [quantize_or_copy(y, quantizer, ln_out), None, rstdev]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return [dx, dgamma]."""
    return _rmsnorm_backward(dz, x, None, rsigma, gamma, zero_centered_gamma)


def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """Return [dx + add, dgamma]."""
    floating("add", add)
    return _rmsnorm_backward(dz, x, add, rsigma, gamma, zero_centered_gamma)


def _rmsnorm_backward(
    dz: Tensor,
    x: Tensor,
    add: Tensor | None,
    rsigma: Tensor,
    gamma: Tensor,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    _check_backward(dz, x, None, rsigma, gamma, add)
    centered = to_bool("zero_centered_gamma", zero_centered_gamma)
    added = None if add is None else _rows(add)
    dx, dgamma = norm.rmsnorm_backward(_rows(dz), _rows(x), rsigma, gamma, centered, added)
    return [dx.view(x.shape), dgamma]


def _rows(x: Tensor) -> Tensor:
    """Return x [..., H] as a matrix [M, H]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _epsilon(value: float) -> float:
    eps = to_float("eps", value)
    epsilon("eps", eps)
    return eps


def _check_forward(
    input: Any, weight: Any, bias: Any, ln_out: Any, quantizer: Any, otype: Any
) -> None:
    floating("input", input)
    with_axes("input", input, 1)
    vector("weight", weight, input.shape[-1])
    if bias is not None:
        vector("bias", bias, input.shape[-1])
    quantizer_or_none(quantizer)
    torch_dtype(otype)
    output_or_none("ln_out", ln_out, input)


def _check_backward(dz: Any, x: Any, mu: Any, rsigma: Any, gamma: Any, add: Any) -> None:
    floating("x", x)
    with_axes("x", x, 1)
    floating("dz", dz)
    same_shape("dz", dz, "x", x)
    if add is not None:
        same_shape("add", add, "x", x)
    vector("gamma", gamma, x.shape[-1])
    rows = _rows(x).shape[0]
    vector("rsigma", rsigma, rows)
    if mu is not None:
        vector("mu", mu, rows)
