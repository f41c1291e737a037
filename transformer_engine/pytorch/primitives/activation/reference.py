"""y = f(x), or y [..., F] = f(x[..., :F]) * x[..., F:] for gated units, and the gradients, in float32.

Sources: GELU with tanh, arXiv:1606.08415; gated units, arXiv:2002.05202; squared ReLU, arXiv:2109.08668;
clamped SwiGLU, the open-weight GPT-OSS model, arXiv:2508.10925. qgelu is x * sigmoid(1.702 x) from the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend, requirements
from ...runtime.tracing import cast_result
from ..quantize import Cast, Quantized, dequantize, quantize, quantize_as
from ..quantize.maximum import maximum
from .request import ACTIVATIONS, ActivationRequest, Constants, MeasuredGradient


def bind(request: ActivationRequest) -> Callable[..., Any]:
    """Return x -> f(x) or (dy, x) -> dx; with a cast, (.., multiplier, record) -> the codes, and column sums of dx."""
    name, constants = request.name, request.constants

    def sums(dx: Tensor, dtype: torch.dtype) -> Tensor:
        return dx.sum(0, dtype=torch.float32).to(dtype)

    if request.output is not None:
        alone = bind(request._replace(output=None, encoded=False))
        return with_output(request, alone, lambda x: value(name, x, constants))
    if request.backward:
        return with_cast(request, lambda dy, x: gradient(name, dy, x, constants), sums)
    return with_cast(request, lambda x: value(name, x, constants), sums)


def with_cast(
    request: ActivationRequest,
    step: Callable[..., Tensor],
    sums: Callable[[Tensor, torch.dtype], Tensor],
) -> Callable[..., Any]:
    """Return the step followed by a cast of its result, and by column sums, if requested."""
    if request.cast is None:
        return step
    spec, dbias = request.cast.spec, request.dbias

    def forward(x: Tensor, multiplier: Tensor | None, record: Tensor | None) -> Quantized:
        return quantize_as(step(x), Cast(spec, multiplier, record))

    def backward(
        dy: Tensor, x: Tensor, multiplier: Tensor | None, record: Tensor | None
    ) -> tuple[Quantized, Tensor | None]:
        dx = step(dy, x)
        summed = None if dbias is None else sums(dx, dbias)
        return quantize_as(dx, Cast(spec, multiplier, record)), summed

    return backward if request.backward else forward


def with_output(
    request: ActivationRequest, backward: Callable[..., Any], forward: Callable[[Tensor], Tensor]
) -> Callable[..., Any]:
    """Return the function that computes a backward pass and the codes of f(x); see `OutputCast`."""
    spec = request.output
    assert spec is not None

    def both(
        dy: Tensor,
        x: Any,
        multiplier: Tensor | None,
        record: Tensor | None,
        output_multiplier: Tensor | None,
        output_amax: Tensor | None,
    ) -> tuple[MeasuredGradient | Quantized, Quantized]:
        x = dequantize(x) if request.encoded else x
        codes = quantize(forward(x), spec, multiplier=output_multiplier, amax=output_amax)
        if request.cast is None:
            dx = backward(dy, x)
            return MeasuredGradient(dx, maximum(dx)), codes
        return backward(dy, x, multiplier, record)[0], codes

    return both


def value(name: str, x: Tensor, constants: Constants) -> Tensor:
    """y = f(x) for x [...], or y [..., F] = f(a) * b for x = [a, b] [..., 2F]."""
    x_wide = x.to(torch.float32)
    if not ACTIVATIONS[name].gated:
        return cast_result(_CURVES[name].value(x_wide), x.dtype)
    gate, linear = x_wide.chunk(2, dim=-1)
    if name == "clamped_swiglu":
        limit, alpha, offset = constants
        gate, linear = _clamped(gate, linear, limit)
        y = gate * sigmoid(alpha * gate) * (linear + offset)
    else:
        y = _CURVES[name].value(gate) * linear
    return cast_result(y, x.dtype)


def gradient(name: str, dy: Tensor, x: Tensor, constants: Constants) -> Tensor:
    """dx = dy * f'(x), or dx [..., 2F] = [dy * f'(a) * b, dy * f(a)] for x = [a, b]."""
    x_wide = x.to(torch.float32)
    dy_wide = dy.to(torch.float32)
    if not ACTIVATIONS[name].gated:
        return (dy_wide * _CURVES[name].slope(x_wide)).to(x.dtype)
    gate, linear = x_wide.chunk(2, dim=-1)
    if name == "clamped_swiglu":
        limit, alpha, offset = constants
        gate_clamped, linear_clamped = _clamped(gate, linear, limit)
        probability = sigmoid(alpha * gate_clamped)
        slope = probability + alpha * gate_clamped * probability * (1.0 - probability)
        dgate = dy_wide * slope * (linear_clamped + offset)
        dlinear = dy_wide * gate_clamped * probability
        dgate = torch.where(gate > limit, 0.0, dgate)
        dlinear = torch.where(linear.abs() > limit, 0.0, dlinear)
    else:
        curve = _CURVES[name]
        dgate = dy_wide * curve.slope(gate) * linear
        dlinear = dy_wide * curve.value(gate)
    return torch.cat((dgate, dlinear), dim=-1).to(x.dtype)


def _clamped(gate: Tensor, linear: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """min(gate, limit) and linear within +-limit, with derivative 1 at the bounds; torch's clamp derivative varies."""
    bounded = torch.where(linear > limit, limit, torch.where(linear < -limit, -limit, linear))
    return torch.where(gate > limit, limit, gate), bounded


# Literal constants: torch.compile turns a global float into a symbol while shapes are dynamic, and cannot use it in two
# layers of one graph. 0.797.. is sqrt(2 / pi).
def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _gelu_slope(x: Tensor) -> Tensor:
    tanh = torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    inner_slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
    return 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner_slope


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x)); batch-invariant results have one formula for all elements.

    On a CPU, torch.sigmoid computes a tensor's last elements by another formula. Below -88 the exponential would
    overflow, and the derivative would be NaN.
    """
    if not requirements.batch_invariant:
        return torch.sigmoid(x)
    return torch.reciprocal(1.0 + torch.exp(-x.clamp(min=-88.0)))


def _qgelu_slope(x: Tensor) -> Tensor:
    probability = sigmoid(1.702 * x)
    return probability + 1.702 * x * probability * (1.0 - probability)


def _silu_slope(x: Tensor) -> Tensor:
    probability = sigmoid(x)
    return probability + x * probability * (1.0 - probability)


def _sigmoid_slope(x: Tensor) -> Tensor:
    probability = sigmoid(x)
    return probability * (1.0 - probability)


class Curve(NamedTuple):
    """A scalar function and its derivative."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


_GELU = Curve(_gelu, _gelu_slope)
_QGELU = Curve(lambda x: x * sigmoid(1.702 * x), _qgelu_slope)
_RELU = Curve(torch.relu, lambda x: torch.where(x <= 0.0, 0.0, 1.0))  # 0 at 0, as in torch
_SRELU = Curve(lambda x: torch.relu(x).square(), lambda x: 2.0 * torch.relu(x))
_SILU = Curve(lambda x: x * sigmoid(x), _silu_slope)

_CURVES: dict[str, Curve] = {
    "gelu": _GELU,
    "geglu": _GELU,
    "glu": Curve(sigmoid, _sigmoid_slope),
    "qgelu": _QGELU,
    "qgeglu": _QGELU,
    "relu": _RELU,
    "reglu": _RELU,
    "srelu": _SRELU,
    "sreglu": _SRELU,
    "silu": _SILU,
    "swiglu": _SILU,
}


BACKEND: Backend[ActivationRequest] = Backend("reference", bind=bind)
