"""Activations and their gradients under the names of the extension: y = f(x), quantized if a quantizer is given.

Gated ones (their names have "glu") take [.., 2 F] and return [.., F]: the first half is activated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from transformer_engine.pytorch.primitives.activation import (
    ActivationParams,
    activation_backward,
    activation_forward,
)

from .cast import bgrad_quantize, given_or_quantized

Forward = Callable[[Tensor, Any], Any]
Backward = Callable[[Tensor, Tensor, Any], Any]


def _forward(name: str) -> Forward:
    def forward(input: Tensor, quantizer: Any) -> Any:
        return given_or_quantized(activation_forward(name, input), quantizer)

    return _named(forward, name, f"{name}(input), as quantizer makes it.")


def _backward(name: str) -> Backward:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
        return given_or_quantized(activation_backward(name, grad, fwd_input), quantizer)

    return _named(backward, f"d{name}", f"The gradient of {name}'s input, as quantizer makes it.")


def _backward_with_bias(name: str) -> Backward:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
        return bgrad_quantize(activation_backward(name, grad, fwd_input), quantizer)

    return _named(backward, f"dbias_d{name}", f"[sum over rows, the gradient of {name}'s input].")


def _named(function: Callable[..., Any], name: str, docstring: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = docstring
    return function


gelu, dgelu = _forward("gelu"), _backward("gelu")
geglu, dgeglu = _forward("geglu"), _backward("geglu")
glu, dglu = _forward("glu"), _backward("glu")
qgelu, dqgelu = _forward("qgelu"), _backward("qgelu")
qgeglu, dqgeglu = _forward("qgeglu"), _backward("qgeglu")
relu, drelu = _forward("relu"), _backward("relu")
reglu, dreglu = _forward("reglu"), _backward("reglu")
srelu, dsrelu = _forward("srelu"), _backward("srelu")
sreglu, dsreglu = _forward("sreglu"), _backward("sreglu")
silu, dsilu = _forward("silu"), _backward("silu")
swiglu, dswiglu = _forward("swiglu"), _backward("swiglu")
dbias_dgelu = _backward_with_bias("gelu")
dbias_dqgelu = _backward_with_bias("qgelu")
dbias_drelu = _backward_with_bias("relu")
dbias_dsrelu = _backward_with_bias("srelu")
dbias_dsilu = _backward_with_bias("silu")


def clamped_swiglu(
    input: Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
) -> Any:
    """clamped_swiglu(input [.., 2 F]): both halves limited, the gate shifted by glu_linear_offset."""
    params = ActivationParams(limit, alpha, glu_linear_offset)
    return given_or_quantized(activation_forward("clamped_swiglu", input, params), quantizer)


def clamped_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """The gradient of clamped_swiglu's input."""
    params = ActivationParams(limit, alpha, glu_linear_offset)
    return given_or_quantized(activation_backward("clamped_swiglu", grad, fwd_input, params), quantizer)
