"""Activations y = f(x) and their gradients under the extension's names; a quantizer quantizes the result.

Gated activations (with "glu" in their names) take [..., 2 F] and return [..., F]; the first half is activated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.functions.row_operations import (
    block_order,
    row_scale,
    row_scale_backward,
    situ_glu,
    situ_glu_backward,
)
from transformer_engine.pytorch.primitives.activation import (
    ACTIVATIONS,
    ActivationParams,
    activation_backward,
    activation_forward,
)
from transformer_engine.pytorch.runtime.checks import floating

from .cast import bgrad_quantize, quantize_or_copy
from .checks import quantizer_or_none

__all__ = [
    "clamped_dswiglu",
    "clamped_swiglu",
    "dbias_dgelu",
    "dbias_dqgelu",
    "dbias_drelu",
    "dbias_dsilu",
    "dbias_dsrelu",
    "dgeglu",
    "dgelu",
    "dglu",
    "dqgeglu",
    "dqgelu",
    "dreglu",
    "drelu",
    "dsilu",
    "dsituglu",
    "dsreglu",
    "dsrelu",
    "dswiglu",
    "geglu",
    "gelu",
    "glu",
    "qgeglu",
    "qgelu",
    "reglu",
    "relu",
    "scaled_clamped_dswiglu",
    "scaled_clamped_swiglu",
    "scaled_dsituglu",
    "scaled_dsrelu",
    "scaled_dswiglu",
    "scaled_situglu",
    "scaled_srelu",
    "scaled_swiglu",
    "silu",
    "situglu",
    "sreglu",
    "srelu",
    "swiglu",
]

Forward = Callable[..., Any]
Backward = Callable[..., Any]


def _forward(name: str) -> Forward:
    def forward(input: Tensor, quantizer: Any) -> Any:
        _check(name, "input", input, quantizer)
        return quantize_or_copy(activation_forward(name, input), quantizer)

    return _name_function(forward, name, f"Return {name}(input), quantized by `quantizer`.")


def _backward(name: str) -> Backward:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
        grad = _gradient(name, grad, fwd_input, quantizer)
        return quantize_or_copy(activation_backward(name, grad, fwd_input), quantizer)

    return _name_function(
        backward,
        f"d{name}",
        f"Return the gradient of the input of {name}, quantized by `quantizer`.",
    )


def _backward_with_bias(name: str) -> Backward:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
        grad = _gradient(name, grad, fwd_input, quantizer)
        return bgrad_quantize(activation_backward(name, grad, fwd_input), quantizer)

    return _name_function(
        backward,
        f"dbias_d{name}",
        f"Return [sum over rows, the gradient of the input of {name}], the latter quantized.",
    )


def _check(name: str, argument: str, x: Any, quantizer: Any) -> None:
    """Raise TypeError or ValueError unless the activation takes x [..., F or 2 F] and the quantizer."""
    quantizer_or_none(quantizer)
    floating(argument, x)
    if _is_gated(name) and (x.dim() == 0 or x.shape[-1] % 2):
        raise ValueError(
            f"{argument} is {list(x.shape)}; {name} halves the last axis, give it an even size"
        )


def _is_gated(name: str) -> bool:
    """Whether an activation halves the last axis; SiTU-GLU, which does, has its own functions instead of a row."""
    return name == "situglu" or ACTIVATIONS[name].gated


def _gradient(name: str, grad: Any, x: Any, quantizer: Any) -> Tensor:
    """Reshape a gradient to the activation's result shape; its leading axes may be flattened differently."""
    floating("grad", grad)
    _check(name, "fwd_input", x, quantizer)
    expected = (*x.shape[:-1], x.shape[-1] // 2) if _is_gated(name) else tuple(x.shape)
    if grad.numel() != math.prod(expected) or grad.shape[-1:] != torch.Size(expected[-1:]):
        raise ValueError(
            f"grad is {list(grad.shape)}, fwd_input {list(x.shape)}; give a gradient {list(expected)}"
        )
    return grad.reshape(expected)


def _name_function(function: Callable[..., Any], name: str, docstring: str) -> Callable[..., Any]:
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
    input: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Compute clamped_swiglu(input [..., 2 F]): both halves are clamped, `glu_linear_offset` is added to the second."""
    _check("clamped_swiglu", "input", input, quantizer)
    params = ActivationParams.from_mapping(
        {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
    )
    return quantize_or_copy(activation_forward("clamped_swiglu", input, params), quantizer)


def clamped_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Compute the input gradient for clamped_swiglu."""
    grad = _gradient("clamped_swiglu", grad, fwd_input, quantizer)
    params = ActivationParams.from_mapping(
        {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
    )
    return quantize_or_copy(
        activation_backward("clamped_swiglu", grad, fwd_input, params), quantizer
    )


def situglu(input: Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
    """Compute beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2) for input [a, b] [..., 2 F].

    Args:
        input: Halves a and b along the last axis.
        quantizer: Result quantizer; None keeps the input's dtype.
        beta1: Bound for a.
        beta2: Bound for b.
    """
    _check("situglu", "input", input, quantizer)
    return quantize_or_copy(situ_glu(input, (beta1, beta2)), quantizer)


def dsituglu(
    grad: Tensor, fwd_input: Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0
) -> Any:
    """Compute the input gradient for situglu.

    Args:
        grad: Gradient [..., F] of the result.
        fwd_input: Input [..., 2 F] of `situglu`.
        quantizer: Gradient quantizer; None keeps the input's dtype.
        beta1: Bound of a.
        beta2: Bound of b.
    """
    grad = _gradient("situglu", grad, fwd_input, quantizer)
    grad_input = situ_glu_backward(grad, fwd_input, (beta1, beta2))
    return quantize_or_copy(grad_input.view(fwd_input.shape), quantizer)


# Scaled activations: name, activation of the table (None: SiTU-GLU), and their constants with the defaults.
_SCALED: dict[str, tuple[str | None, dict[str, float]]] = {
    "swiglu": ("swiglu", {}),
    "situglu": (None, {"beta1": 4.0, "beta2": 25.0}),
    "clamped_swiglu": ("clamped_swiglu", {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}),
    "srelu": ("srelu", {}),
}

# Entries in the section Args that all scaled activations share.
_SCALED_ARGUMENTS = """\
    act_scales: Scale of each row [...].
    quantizer: Quantizer of the result; None leaves it in the dtype of the input.
    constants: Constants of the activation by position, in the order above.
    glu_interleave_size: Columns per block if blocks of both halves of the input alternate; 0 for two halves.
    named: Constants of the activation by name."""


def _split_halves(x: Tensor, block: int) -> Tensor:
    """De-interleave [.., 2 F], whose blocks alternate between both halves, into a matrix with contiguous halves."""
    rows = x.reshape(-1, x.shape[-1])
    return block_order(rows, (-1, 2, block)) if block else rows


def _scaled_forward(name: str) -> Forward:
    kind, defaults = _SCALED[name]

    def forward(
        input: Tensor,
        act_scales: Tensor,
        quantizer: Any,
        *constants: float,
        glu_interleave_size: int = 0,
        **named: float,
    ) -> Any:
        _check(kind or "situglu", "input", input, quantizer)
        rows = _split_halves(input, glu_interleave_size)
        value, _ = _functions(kind, _constants(name, defaults, constants, named))
        output = row_scale(value(rows), act_scales.reshape(-1, 1))
        return quantize_or_copy(output.view(*input.shape[:-1], output.shape[-1]), quantizer)

    keywords = ", ".join(("input", "act_scales", "quantizer", *defaults, "glu_interleave_size=0"))
    return _name_function(
        forward,
        f"scaled_{name}",
        f"({keywords}): return {name}(input) times a scale per row, quantized by `quantizer`.\n\nArgs:\n"
        f"    input: Values [..., F], of a gated activation [..., 2 F].\n{_SCALED_ARGUMENTS}",
    )


def _scaled_backward(name: str) -> Backward:
    kind, defaults = _SCALED[name]

    def backward(
        grad: Tensor,
        fwd_input: Tensor,
        act_scales: Tensor,
        quantizer: Any,
        *constants: float,
        glu_interleave_size: int = 0,
        compute_scale_grad: bool = True,
        **named: float,
    ) -> tuple[Any, Tensor | None]:
        grad = _gradient(kind or "situglu", grad, fwd_input, quantizer)
        rows = _split_halves(fwd_input, glu_interleave_size)
        value, gradient = _functions(kind, _constants(name, defaults, constants, named))
        dy = grad.reshape(-1, grad.shape[-1])
        scales = act_scales.reshape(-1, 1)
        scaled, dscales = row_scale_backward(dy, value(rows), scales)
        dx = gradient(scaled, rows)
        if glu_interleave_size:
            dx = block_order(dx, (2, -1, glu_interleave_size))
        grad_input = quantize_or_copy(dx.view(fwd_input.shape), quantizer)
        return grad_input, dscales.view(act_scales.shape) if compute_scale_grad else None

    keywords = ", ".join(
        ("grad", "fwd_input", "act_scales", "quantizer", *defaults, "glu_interleave_size=0")
    )
    return _name_function(
        backward,
        f"scaled_d{name}",
        f"({keywords}, compute_scale_grad=True): return the gradients of scaled_{name}'s input, quantized, and "
        "of its scales, or None.\n\nArgs:\n    grad: Gradient [..., F] of the result.\n"
        f"    fwd_input: Input of scaled_{name}.\n{_SCALED_ARGUMENTS}\n"
        "    compute_scale_grad: Whether the gradient of the scales is computed.",
    )


def _constants(
    name: str, defaults: dict[str, float], positional: tuple[float, ...], named: dict[str, float]
) -> dict[str, float]:
    """Validate a scaled activation's constants; raise TypeError for others."""
    unknown = [key for key in named if key not in defaults]
    if unknown or len(positional) > len(defaults):
        raise TypeError(
            f"scaled_{name} has the constants {', '.join(defaults) or 'none'}; got {unknown or list(positional)}"
        )
    return defaults | dict(zip(defaults, positional, strict=False)) | named


def _functions(
    kind: str | None, constants: dict[str, float]
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """An activation's functions x -> f(x) and (dy, x) -> dx on matrices."""
    if kind is None:
        betas = (constants["beta1"], constants["beta2"])
        return (
            lambda x: situ_glu(x, betas),
            lambda dy, x: situ_glu_backward(dy, x, betas),
        )
    params = ActivationParams.from_mapping(constants) if constants else ActivationParams()
    return (
        lambda x: activation_forward(kind, x, params),
        lambda dy, x: activation_backward(kind, dy, x, params),
    )


scaled_swiglu, scaled_dswiglu = _scaled_forward("swiglu"), _scaled_backward("swiglu")
scaled_situglu, scaled_dsituglu = _scaled_forward("situglu"), _scaled_backward("situglu")
scaled_clamped_swiglu = _scaled_forward("clamped_swiglu")
scaled_clamped_dswiglu = _scaled_backward("clamped_swiglu")
scaled_srelu, scaled_dsrelu = _scaled_forward("srelu"), _scaled_backward("srelu")
