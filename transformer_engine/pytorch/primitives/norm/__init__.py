"""y [M, H] = normalize(x) * gamma (+ beta), its gradients, and their backend table.

One table for the four operations, so that `use_backend(norm="...")` forces all four together.
"""

from __future__ import annotations

from typing import Any, overload

from torch import Tensor

from ....common.dispatch import Operator, Table
from ...runtime.launching import TorchOperator, operator
from ..quantize import Cast, Quantized
from . import reference, triton
from .reference import NormRequest, make_request


@overload
def layernorm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    cast: None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def layernorm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, cast: Cast
) -> tuple[Quantized, Tensor, Tensor]: ...


def layernorm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    cast: Cast | None = None,
) -> tuple[Tensor | Quantized, Tensor, Tensor]:
    """y [M, H] = (x - mean) * rstdev * gamma + bias; mean, rstdev float32 [M]; y in x's dtype, or the cast's codes.

    With a cast, the codes of y are returned instead. On a GPU the norm's kernel writes codes with
    one scale per tensor and codes in row-wise 1 x 128 blocks. Then y is not stored, unless one
    scale is computed from its maximum.
    """
    facts = (
        "layernorm_forward",
        x.shape,
        x.stride(),
        x.dtype,
        weight.dtype,
        x.device,
        zero_centered,
        eps,
    )
    if cast is None:
        return TABLE.bound(facts)(x, weight, bias)
    spec, multiplier, record = cast
    key = (*facts, None, None, spec, multiplier is not None, record is not None)
    return TABLE.bound(key)(x, weight, bias, multiplier, record)


def layernorm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstdev: Tensor,
    weight: Tensor,
    zero_centered: bool,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx [M, H] + add in x's dtype, dweight [H], dbias [H] in weight's dtype; sums are float32.

    dx is rounded to x's dtype before `add` is added.
    """
    layout, gradient = (
        (x.shape, x.stride(), x.dtype, weight.dtype, x.device),
        (dy.stride(), dy.dtype),
    )
    key = ("layernorm_backward", *layout, zero_centered, 0.0, gradient)
    if add is not None:
        key = (*key, (add.stride(), add.dtype), None, False, False, True)
    return TABLE.bound(key)(dy, x, mean, rstdev, weight, add)


@overload
def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, cast: None = None
) -> tuple[Tensor, Tensor]: ...


@overload
def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, cast: Cast
) -> tuple[Quantized, Tensor]: ...


def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, cast: Cast | None = None
) -> tuple[Tensor | Quantized, Tensor]:
    """y [M, H] = x * rstdev * gamma; rstdev float32 [M] = rsqrt(E[x²] + eps); y in x's dtype, or the cast's codes."""
    facts = (
        "rmsnorm_forward",
        x.shape,
        x.stride(),
        x.dtype,
        weight.dtype,
        x.device,
        zero_centered,
        eps,
    )
    if cast is None:
        return TABLE.bound(facts)(x, weight)
    spec, multiplier, record = cast
    key = (*facts, None, None, spec, multiplier is not None, record is not None)
    return TABLE.bound(key)(x, weight, multiplier, record)


def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    rstdev: Tensor,
    weight: Tensor,
    zero_centered: bool,
    add: Tensor | None = None,
    rounds_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dx [M, H] + add in x's dtype, dweight [H] in weight's dtype; sums are float32.

    With `rounds_first`, dx is rounded to x's dtype before `add` is added, as a separate sum would.
    """
    layout, gradient = (
        (x.shape, x.stride(), x.dtype, weight.dtype, x.device),
        (dy.stride(), dy.dtype),
    )
    added = None if add is None else (add.stride(), add.dtype)
    key = ("rmsnorm_backward", *layout, zero_centered, 0.0, gradient, added)
    if rounds_first:
        key = (*key, None, False, False, True)
    return TABLE.bound(key)(dy, x, rstdev, weight, add)


_OPERATORS: dict[str, TorchOperator] = {
    "layernorm_forward": operator(
        "layernorm_forward(Tensor x, Tensor weight, Tensor? bias, float eps, bool zero_centered)"
        " -> (Tensor, Tensor, Tensor)",
        layernorm_forward,
        triton.empty_layernorm,
    ),
    "layernorm_backward": operator(
        "layernorm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstdev, Tensor weight, Tensor? add,"
        " bool zero_centered) -> (Tensor, Tensor, Tensor)",
        lambda dy, x, mean, rstdev, weight, add, zero_centered: layernorm_backward(
            dy, x, mean, rstdev, weight, zero_centered, add
        ),
        lambda dy, x, mean, rstdev, weight, *_, **__: (
            x.new_empty(x.shape),
            *(weight.new_empty(weight.shape) for _ in ("gamma", "beta")),
        ),
    ),
    "rmsnorm_forward": operator(
        "rmsnorm_forward(Tensor x, Tensor weight, float eps, bool zero_centered) -> (Tensor, Tensor)",
        rmsnorm_forward,
        triton.empty_rmsnorm,
    ),
    "rmsnorm_backward": operator(
        "rmsnorm_backward(Tensor dy, Tensor x, Tensor rstdev, Tensor weight, Tensor? add, bool zero_centered,"
        " bool rounds_first) -> (Tensor, Tensor)",
        lambda dy, x, rstdev, weight, add, zero_centered, rounds_first: rmsnorm_backward(
            dy, x, rstdev, weight, zero_centered, add, rounds_first
        ),
        lambda dy, x, rstdev, weight, *_, **__: (
            x.new_empty(x.shape),
            weight.new_empty(weight.shape),
        ),
    ),
}


def _make_operator(request: NormRequest) -> Operator:
    """Return the operator of the norm; a cast is a separate operator."""
    constants: dict[str, Any] = {"zero_centered": request.zero_centered}
    if request.operation.endswith("forward"):
        constants["eps"] = request.eps
    elif request.operation == "rmsnorm_backward":
        constants["rounds_first"] = request.rounds_first
    alone = _OPERATORS[request.operation].given(**constants)
    if request.cast is None:
        return alone
    return Operator(*(reference.with_cast(request, step) for step in alone))


TABLE: Table[NormRequest] = Table(
    "norm", (triton.BACKEND, reference.BACKEND), describe=make_request, operator=_make_operator
)
