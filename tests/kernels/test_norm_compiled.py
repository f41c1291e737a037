"""The sum of a norm's gradient and a residual gradient has the bits of separate sums: compiled for Hopper."""

from __future__ import annotations

import importlib.util
import os

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="triton is not installed, or interprets",
)


def products(
    width: int, dtype: str, centered: bool, adds: bool, rounds_first: bool
) -> tuple[int, int]:
    """Count the rounded products, and the products fused with a sum, in a backward kernel."""
    from tests.kernels.compile_cases import compile_ptx, count
    from transformer_engine.common.kernels import norm

    strides = (width, width, width if adds else 0)
    program = norm.backward(
        rows=32,
        width=width,
        strides=strides,
        dtype=dtype,
        weight_dtype=dtype,
        zero_centered=False,
        centered=centered,
        column_bytes=12,
        processors=132,
        shared_memory=227 << 10,
        rounds_first=rounds_first,
    )
    values = {"float32": "*fp32", "bfloat16": "*bf16"}[dtype]
    names = ("dy", "x", "add", "gamma", "mean", "rstdev", "dx", "workspace")
    pointers: dict[str, str | None] = dict.fromkeys(names, values)
    pointers |= {"rstdev": "*fp32", "workspace": "*fp32", "mean": "*fp32" if centered else None}
    launch = program.steps[0].launch
    if len(launch.outputs) == 1:  # rows that are wider than a program's registers
        del pointers["workspace"]
    ptx, _ = compile_ptx(launch, pointers if adds else pointers | {"add": None}, 90)
    return count(r"mul\.f32", ptx), count(r"fma\.rn\.f32", ptx)


@pytest.mark.parametrize("width", [64, 32768])
@pytest.mark.parametrize("centered", [False, True])
def test_float32_gradients_are_rounded_before_a_sum(width, centered):
    alone, fused = products(width, "float32", centered, adds=False, rounds_first=False)
    rounded, sums = products(width, "float32", centered, adds=True, rounds_first=True)
    # Each product of the gradient stays rounded, and its product with 1 is fused with the sum.
    assert rounded == alone and sums > fused


def test_without_rounding_the_last_product_is_fused_with_the_sum():
    alone, _ = products(64, "float32", False, adds=False, rounds_first=False)
    fused, _ = products(64, "float32", False, adds=True, rounds_first=False)
    assert fused < alone
