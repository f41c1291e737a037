"""Activations y = f(x) and their gradients under the extension's names; a quantizer quantizes the result.

Gated activations (with "glu" in their names) take [..., 2 F] and return [..., F]; the first half is activated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
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
        _check(name, "input", input, quantizer)
        return given_or_quantized(activation_forward(name, input), quantizer)

    return _named(forward, name, f"{name}(input), as quantizer makes it.")


def _backward(name: str) -> Backward:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
        grad = _gradient(name, grad, fwd_input, quantizer)
        return given_or_quantized(activation_backward(name, grad, fwd_input), quantizer)

    return _named(backward, f"d{name}", f"The gradient of {name}'s input, as quantizer makes it.")


def _backward_with_bias(name: str) -> Backward:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
        grad = _gradient(name, grad, fwd_input, quantizer)
        return bgrad_quantize(activation_backward(name, grad, fwd_input), quantizer)

    return _named(backward, f"dbias_d{name}", f"[sum over rows, the gradient of {name}'s input].")


def _check(name: str, argument: str, x: Any, quantizer: Any) -> None:
    """Raise TypeError or ValueError unless the activation takes x [..., F or 2 F] and the quantizer."""
    quantizer_or_none(quantizer)
    floating(argument, x)
    if ACTIVATIONS[name].gated and (x.dim() == 0 or x.shape[-1] % 2):
        raise ValueError(f"{argument} is {list(x.shape)}; {name} halves the last axis, give it an even size")


def _gradient(name: str, grad: Any, x: Any, quantizer: Any) -> Tensor:
    """Return the gradient in the shape of the activation's result; its leading axes may be flattened otherwise."""
    floating("grad", grad)
    _check(name, "fwd_input", x, quantizer)
    expected = (*x.shape[:-1], x.shape[-1] // 2) if ACTIVATIONS[name].gated else tuple(x.shape)
    if grad.numel() != math.prod(expected) or grad.shape[-1:] != torch.Size(expected[-1:]):
        raise ValueError(
            f"grad is {list(grad.shape)}, fwd_input {list(x.shape)}; give a gradient {list(expected)}"
        )
    return grad.reshape(expected)


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
    """Compute clamped_swiglu(input [..., 2 F]): both halves are clamped, `glu_linear_offset` is added to the second."""
    _check("clamped_swiglu", "input", input, quantizer)
    params = ActivationParams.from_mapping(
        {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
    )
    return given_or_quantized(activation_forward("clamped_swiglu", input, params), quantizer)


def clamped_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Compute the gradient of the input of clamped_swiglu."""
    grad = _gradient("clamped_swiglu", grad, fwd_input, quantizer)
    params = ActivationParams.from_mapping(
        {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
    )
    return given_or_quantized(activation_backward("clamped_swiglu", grad, fwd_input, params), quantizer)
