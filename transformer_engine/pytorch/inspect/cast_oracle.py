"""Codes and block scales from their definition, by intervals: the standard for `cast_verification`.

Positive float32 numbers are ordered like their bit patterns, and rounding is monotonic. The inputs that round to a
code are therefore a bit-pattern interval, and a code is the number of intervals that begin at or below its input.
None of this shares an operation with the kernels or with the reference, which add, shift and multiply.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from ...common.formats import Element

INFINITY = 0x7F800000  # bits of a float32; the bits of every NaN are greater
MAGNITUDE = 0x7FFFFFFF
NAN_CODE = 0x7F
SCALE_BIAS = 127  # of E8M0: the code of 2^k is k + 127


def magnitudes(element: Element) -> list[float]:
    """Non-negative finite values of an element in ascending order; a value's position is its code."""
    values = []
    for code in range(1 << (element.bits - 1)):
        exponent, mantissa = divmod(code, 1 << element.mantissa_bits)
        fraction = mantissa / (1 << element.mantissa_bits)
        scale = 2.0 ** (max(exponent, 1) - element.bias)
        values.append(scale * (fraction + (exponent > 0)))
        if values[-1] == element.maximum:
            break
    return values


@functools.cache
def _first_bits(element: Element) -> tuple[int, ...]:
    """Bits of the smallest float32 that rounds to code 1, 2, ... of an element: to nearest, ties to even codes."""
    values = magnitudes(element)
    thresholds = []
    for code, (lower, upper) in enumerate(itertools.pairwise(values), start=1):
        middle = torch.tensor((lower + upper) / 2, device="cpu")
        assert middle.item() == (lower + upper) / 2, "a float32 holds the midpoint of two codes"
        # The midpoint rounds to the even code among `code - 1` and `code`.
        thresholds.append(int(middle.view(torch.int32)) + code % 2)
    return tuple(thresholds)


def element_codes(x: Tensor, element: Element) -> Tensor:
    """Encode float32 values as uint8 codes, saturated beyond the maximum.

    Every NaN becomes 0x7F; E2M1 has no NaN, and +6 takes its place.

    Args:
        x: Values, float32, any shape.
        element: E4M3, E5M2 or E2M1.
    """
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    thresholds = torch.tensor(_first_bits(element), dtype=torch.int32, device=x.device)
    codes = torch.bucketize(magnitude, thresholds, out_int32=True, right=True)
    codes |= (bits >> (32 - element.bits)) & (1 << (element.bits - 1))
    nan = NAN_CODE if element.bits == 8 else len(thresholds)
    return torch.where(magnitude > INFINITY, nan, codes).to(torch.uint8)


def code_values(element: Element, device: torch.device) -> Tensor:
    """Decode the FP8 codes 0, 1, ..., 255 to float32; codes beyond the maximum are infinite or NaN."""
    positive = magnitudes(element)
    beyond = [torch.nan] * (128 - len(positive))
    if element.name == "e5m2":
        beyond[0] = torch.inf
    values = torch.tensor(positive + beyond, dtype=torch.float32, device=device)
    return torch.cat((values, -values))


def power_scales(amax: Tensor, element: Element) -> Tensor:
    """Return the E8M0 codes, as uint8, for the smallest powers of two 2^k >= amax * (1 / maximum).

    Source: OCP Microscaling Formats 1.0 with the exponent rounded up. The reciprocal and the
    product are rounded to float32.

    Args:
        amax: Block maxima, float32, non-negative and finite.
        element: Element format of the codes.
    """
    reciprocal = torch.tensor(1.0 / element.maximum, dtype=torch.float32, device="cpu").item()
    powers = [2.0 ** (code - SCALE_BIAS) for code in range(255)]
    limits = torch.tensor(powers, dtype=torch.float64, device=amax.device)
    return torch.bucketize(products(amax, reciprocal).double(), limits).to(torch.uint8)


def products(x: Tensor, factor: float) -> Tensor:
    """Return x * factor, rounded once to float32: a float64 holds the product of two float32 numbers exactly."""
    return (x.double() * factor).float()


def quotients(numerator: float, x: Tensor) -> Tensor:
    """Return numerator / x, rounded to float32; a float64 has more than twice its digits, so that both roundings agree.

    Args:
        numerator: Number that a float32 holds exactly.
        x: Denominators, float32.
    """
    return torch.div(torch.full_like(x, numerator, dtype=torch.float64), x.double()).float()
