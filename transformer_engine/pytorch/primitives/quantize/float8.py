"""codes [R, K] = saturate(x * multiplier), with one float32 multiplier for the whole matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.formats import Element, float32_max
from .spec import torch_dtype

_SIGN_AND_EXPONENT = -(1 << 23)  # int32 of 0xFF800000: every bit of a float32 but its mantissa


def divide(numerator: float, denominator: Tensor) -> Tensor:
    """numerator / denominator, correctly rounded on every device.

    `number / tensor` is tensor.reciprocal() * number in torch, which rounds twice.
    """
    return torch.div(torch.full_like(denominator, numerator), denominator)


def absolute_maximum(x: Tensor) -> Tensor:
    """max|x| as float32 [1]; 0 of an empty tensor, NaN if any element is NaN."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    # One pass without a temporary; abs().amax() takes 2.5 times as long on a CPU.
    least, greatest = torch.aminmax(x)
    return torch.maximum(least.abs(), greatest.abs()).to(torch.float32).reshape(1)


def row_maxima(x: Tensor) -> Tensor:
    """max|x| of every row of x [M, K] as float32 [M]; 0 of empty rows, NaN where a row has a NaN."""
    if x.shape[1] == 0:
        return torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
    least, greatest = torch.aminmax(x, dim=1)
    return torch.maximum(least.abs(), greatest.abs()).to(torch.float32)


def scale_from_amax(
    amax: Tensor,
    maximum: float,
    *,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    value_for_inf: float | None = None,
) -> Tensor:
    """scale = maximum / max(amax, epsilon) in float32; 1 where that amax is 0, infinite or NaN.

    An infinite quotient becomes value_for_inf, by default the greatest float32; power_of_two rounds down by
    clearing the mantissa.
    """
    amax = amax.to(torch.float32)
    if epsilon > 0.0:
        amax = amax.clamp(min=epsilon)
    scale = divide(maximum, amax)
    scale = torch.where(scale == torch.inf, float32_max() if value_for_inf is None else value_for_inf, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
    usable = (amax > 0.0) & (amax < torch.inf)
    return torch.where(usable, scale, 1.0)


def cast(x: Tensor, element: Element) -> Tensor:
    """The nearest codes of float32 x, ties to even; infinity as the maximum, NaN as 0x7F whatever its sign.

    0x7F is NVIDIA's canonical NaN of both formats, which the conversion instruction of the kernels produces.
    """
    # torch keeps the sign of a NaN, so every NaN is made positive. Values beyond the maximum are clamped first, since
    # the GPU's cast turns them into NaN or infinity.
    x = x.nan_to_num(nan=torch.nan, posinf=element.maximum, neginf=-element.maximum)
    return x.clamp(-element.maximum, element.maximum).to(torch_dtype(element))


def encode(x: Tensor, element: Element, multiplier: Tensor) -> Tensor:
    """codes [R, K] = cast(float32(x) * multiplier)."""
    return cast(x.to(torch.float32) * multiplier, element)


def widen(codes: Tensor) -> Tensor:
    """float8 codes as float32, exactly."""
    if codes.dtype == torch.float8_e4m3fn and codes.device.type == "cpu":
        # torch's own cast takes 10.7 ms for 2048 x 2048 on one core, a table of the 256 values 2.5 ms.
        table = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(torch.float32)
        indices = codes.view(torch.uint8).flatten().to(torch.int32)
        return table.index_select(0, indices).view(codes.shape)
    return codes.to(torch.float32)
