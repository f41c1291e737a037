"""Activations and their gradients under the names of the extension: y = f(x), quantized if a quantizer is given.

Gated ones (their names have "glu") take [.., 2 F] and return [.., F]: the first half is activated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from transformer_engine.pytorch.primitives.activation import (
    ACTIVATIONS,
    ActivationParams,
    activation_backward,
    activation_forward,
)
from transformer_engine.pytorch.runtime.checks import floating

from .cast import bgrad_quantize, given_or_quantized
from .checks import quantizer_or_none

Forward = Callable[[Tensor, Any], Any]
Backward = Callable[[Tensor, Tensor, Any], Any]


def _forward(name: str) -> Forward:
    def forward(input: Tensor, quantizer: Any) -> Any:
        _check(name, input, None, quantizer)
        return given_or_quantized(activation_forward(name, input), quantizer)

    return _named(forward, name, f"{name}(input), as quantizer makes it.")


def _backward(name: str) -> Backward:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
        floating("grad", grad)
        _check(name, fwd_input, grad, quantizer)
        return given_or_quantized(activation_backward(name, grad, fwd_input), quantizer)

    return _named(backward, f"d{name}", f"The gradient of {name}'s input, as quantizer makes it.")


def _backward_with_bias(name: str) -> Backward:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
        floating("grad", grad)
        _check(name, fwd_input, grad, quantizer)
        return bgrad_quantize(activation_backward(name, grad, fwd_input), quantizer)

    return _named(backward, f"dbias_d{name}", f"[sum over rows, the gradient of {name}'s input].")


def _check(name: str, x: Any, grad: Any, quantizer: Any) -> None:
    """TypeError or ValueError unless x [.., F or 2 F], the gradient [.., F] and the quantizer are what they must be."""
    quantizer_or_none(quantizer)
    argument = "input" if grad is None else "fwd_input"
    floating(argument, x)
    gated = ACTIVATIONS[name].gated
    if gated and (x.dim() == 0 or x.shape[-1] % 2):
        raise ValueError(f"{argument} is {list(x.shape)}; {name} halves the last axis, give it an even size")
    if grad is None:
        return
    expected = (*x.shape[:-1], x.shape[-1] // 2) if gated else tuple(x.shape)
    if tuple(grad.shape) != expected:
        raise ValueError(
            f"grad is {list(grad.shape)}, fwd_input {list(x.shape)}; give a gradient {list(expected)}"
        )


def _params(limit: float, alpha: float, offset: float) -> ActivationParams:
    return ActivationParams.from_mapping({"limit": limit, "alpha": alpha, "glu_linear_offset": offset})


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
    _check("clamped_swiglu", input, None, quantizer)
    params = _params(limit, alpha, glu_linear_offset)
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
    floating("grad", grad)
    _check("clamped_swiglu", fwd_input, grad, quantizer)
    params = _params(limit, alpha, glu_linear_offset)
    return given_or_quantized(activation_backward("clamped_swiglu", grad, fwd_input, params), quantizer)
