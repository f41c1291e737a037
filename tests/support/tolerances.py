"""Tolerances for a result against an exact one: a property of the result's format, in one place.

A number is rounded to its format once, which costs half a unit in the last place; a kernel computes in float32 and may
round to the other side of a tie, which makes it one unit: 2^-(mantissa bits). float32 has no wider format to compute
in: its error comes from the summation order and from approximating exp and tanh, a few dozen units.
"""

from __future__ import annotations

import pytest
import torch

# One unit in the last place, relative to the number: 2^-10, 2^-7, 2^-3, 2^-2, 2^-1.
UNIT = {
    torch.float32: 2**-23,
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
    torch.float8_e4m3fn: 2**-3,
    torch.float8_e5m2: 2**-2,
}
# Relative error between a kernel and literal code. float32: 84 units, after sums and exponentials.
ROUNDED = {**UNIT, torch.float32: 1e-5}
# The same where a float32 result is an exponential times a product (42 units), a sum of products in another order (34),
# or one product (17).
CURVED = {**UNIT, torch.float32: 5e-6}
SUMMED = {**UNIT, torch.float32: 4e-6}
MULTIPLIED = {**UNIT, torch.float32: 2e-6}
# Attention in float32: two products with a softmax between them (168 units).
ATTENDED = {"rtol": 2e-5, "atol": 2e-5}
# A layer over several devices against one device, by recipe and the largest element of each result. In
# bfloat16 sums in another order move a value by a few units, and a code next to a tie by one unit; gradients
# are in E5M2 under recipes with one scale per tensor. Under block-scaling recipes layers are in float32. The
# remaining error is the one code that a sum may move: one among an element's many terms, an eighth of a unit
# in its format.
_IN_BFLOAT16 = {"output": 4 * UNIT[torch.bfloat16], "gradients": UNIT[torch.float8_e5m2]}
LAYERS_OVER_DEVICES = {
    "values": {"output": 2 * UNIT[torch.bfloat16], "gradients": 4 * UNIT[torch.bfloat16]},
    "delayed": _IN_BFLOAT16 | {"state": UNIT[torch.float8_e4m3fn]},
    "current": _IN_BFLOAT16,
    "mxfp8": dict.fromkeys(("output", "gradients"), UNIT[torch.float8_e4m3fn] / 8),
    "nvfp4": dict.fromkeys(("output", "gradients"), 2**-1 / 8),  # E2M1
}
# If no operand is the result of another product, codes equal the single-device codes; only the summation
# order differs.
EQUAL_CODES_OVER_DEVICES = ROUNDED[torch.float32]

PLAIN = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = pytest.mark.parametrize("dtype", PLAIN, ids=["fp32", "fp16", "bf16"])


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """|actual - exact| / |exact| in the Euclidean norm, in float64."""
    exact = exact.double()
    return float((actual.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def assert_as_good_as(actual: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that the fused error is at most twice the error of the same steps in low-precision PyTorch."""
    ours, reference = relative_error(actual, exact), relative_error(plain, exact)
    assert ours <= 2 * reference, f"error {ours:.2e} > 2 x {reference:.2e} of the plain computation"
