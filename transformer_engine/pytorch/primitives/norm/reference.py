"""y = (x - E[x]) * rsqrt(Var[x] + eps) * gamma + beta and y = x * rsqrt(E[x²] + eps) * gamma, in float32.

Layer Normalization: Ba, Kiros, Hinton, arXiv:1607.06450. Root Mean Square Layer Normalization: Zhang, Sennrich,
arXiv:1910.07467. Every function takes matrices [rows, width]; gamma is weight, or 1 + weight if zero centered. The
variance is computed from the centered values (two passes), so that a large mean does not cancel it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend, depends_on_gpu, requirements
from ...runtime.row_functions import mean_rows
from ...runtime.tracing import cast_result
from ..quantize import Cast, CastRequest, Quantized, QuantizeSpec, quantize_as
from ..quantize.fused_codes import cast_request

StridesAndDtype = tuple["tuple[int, ...]", torch.dtype]  # strides and dtype


class NormRequest(NamedTuple):
    """One call on x [rows, width].

    Attributes:
        operation: Name of the called public function.
        eps: Forward only.
        dy: Strides and dtype of the output gradient, which a backward pass reads.
        add: Strides and dtype of a gradient that is added to dx.
        rounds_first: dx is rounded to its dtype before `add` is added.
    """

    operation: str
    shape: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    zero_centered: bool
    eps: float = 0.0
    cast: CastRequest | None = None
    dy: StridesAndDtype | None = None
    add: StridesAndDtype | None = None
    rounds_first: bool = False

    @property
    def centered(self) -> bool:
        """Whether the mean is subtracted."""
        return self.operation.startswith("layernorm")


def make_request(
    operation: str,
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
    zero_centered: bool,
    eps: float = 0.0,
    dy: StridesAndDtype | None = None,
    add: StridesAndDtype | None = None,
    spec: QuantizeSpec | None = None,
    has_multiplier: bool = False,
    records: bool = False,
    rounds_first: bool = False,
) -> NormRequest:
    """Return the request for a key; spec, has_multiplier and records describe the cast."""
    cast = cast_request(shape, dtype, device, spec, has_multiplier, records)
    facts = (operation, shape, strides, dtype, weight_dtype, device, zero_centered, eps)
    return NormRequest(*facts, cast, dy, add, rounds_first)


def bind(request: NormRequest) -> Callable[..., Any]:
    """Return the requested operation; with a cast, (.., multiplier, record) -> codes in y's place.

    The operations are layernorm_forward(x, weight, bias), layernorm_backward(dy, x, mean, rstdev, weight, add),
    rmsnorm_forward(x, weight) and rmsnorm_backward(dy, x, rstdev, weight, add).
    """
    zero_centered, eps = request.zero_centered, request.eps
    if request.operation == "layernorm_forward":
        return with_cast(
            request, lambda x, weight, bias: layernorm_forward(x, weight, bias, eps, zero_centered)
        )
    if request.operation == "rmsnorm_forward":
        return with_cast(request, lambda x, weight: rmsnorm_forward(x, weight, eps, zero_centered))
    if request.operation == "layernorm_backward":
        return lambda dy, x, mean, rstdev, weight, add: layernorm_backward(
            dy, x, mean, rstdev, weight, zero_centered, add
        )
    return lambda dy, x, rstdev, weight, add: rmsnorm_backward(
        dy, x, rstdev, weight, zero_centered, add, request.rounds_first
    )


def with_cast(request: NormRequest, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward function, followed by the cast if the request has one."""
    if request.cast is None:
        return forward
    spec = request.cast.spec

    def run(*inputs: Tensor | None) -> tuple[Quantized | Tensor, ...]:
        *tensors, multiplier, record = inputs
        y, *statistics = forward(*tensors)
        return quantize_as(y, Cast(spec, multiplier, record)), *statistics

    return run


def layernorm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [M, H] = (x - mean) * rstdev * gamma + bias; mean, rstdev float32 [M]."""
    average = mean_rows if requirements.batch_invariant else Tensor.mean
    x_wide = x.to(torch.float32)
    mean = average(x_wide, -1)
    centered = x_wide - mean[:, None]
    rstdev = torch.rsqrt(average(centered.square(), -1) + eps)
    y = centered * rstdev[:, None] * _gamma(weight, zero_centered)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return cast_result(y, x.dtype), mean, rstdev


def layernorm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstdev: Tensor,
    weight: Tensor,
    zero_centered: bool,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [M, H] = rstdev * (g - E[g] - xhat * E[g * xhat]) + add, g = dy * gamma; dweight = Σ dy * xhat.

    dx is rounded to x's dtype before `add` is added.
    """
    average = mean_rows if requirements.batch_invariant else Tensor.mean
    dy_wide = dy.to(torch.float32)
    normalized = (x.to(torch.float32) - mean[:, None]) * rstdev[:, None]
    g = dy_wide * _gamma(weight, zero_centered)
    projection = average(g * normalized, -1)[:, None]
    dx = rstdev[:, None] * (g - average(g, -1)[:, None] - normalized * projection)
    dweight = (dy_wide * normalized).sum(dim=0)
    dbias = dy_wide.sum(dim=0)
    dx = dx.to(x.dtype)
    if add is not None:
        dx = (dx.to(torch.float32) + add.to(torch.float32)).to(x.dtype)
    return dx, dweight.to(weight.dtype), dbias.to(weight.dtype)


def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """y [M, H] = x * rstdev * gamma; rstdev float32 [M] = rsqrt(E[x²] + eps)."""
    average = mean_rows if requirements.batch_invariant else Tensor.mean
    x_wide = x.to(torch.float32)
    rstdev = torch.rsqrt(average(x_wide.square(), -1) + eps)
    y = x_wide * rstdev[:, None] * _gamma(weight, zero_centered)
    return cast_result(y, x.dtype), rstdev


def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    rstdev: Tensor,
    weight: Tensor,
    zero_centered: bool,
    add: Tensor | None = None,
    rounds_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """dx [M, H] = rstdev * (g - xhat * E[g * xhat]) + add, g = dy * gamma; dweight = Σ dy * xhat.

    With `rounds_first`, dx is rounded to x's dtype before `add` is added.
    """
    average = mean_rows if requirements.batch_invariant else Tensor.mean
    dy_wide = dy.to(torch.float32)
    normalized = x.to(torch.float32) * rstdev[:, None]
    g = dy_wide * _gamma(weight, zero_centered)
    projection = average(g * normalized, -1)[:, None]
    dx = rstdev[:, None] * (g - normalized * projection)
    if add is not None:
        if rounds_first:
            dx = dx.to(x.dtype).to(torch.float32)
        dx = dx + add.to(torch.float32)
    dweight = (dy_wide * normalized).sum(dim=0)
    return dx.to(x.dtype), dweight.to(weight.dtype)


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    gamma = weight.to(torch.float32)
    return gamma + 1.0 if zero_centered else gamma


BACKEND: Backend[NormRequest] = Backend("reference", bind=bind, batch_dependent=depends_on_gpu)
