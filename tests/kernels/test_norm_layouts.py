"""A norm that writes FP8 codes, or a maximum, sums its rows in the order of a norm that writes numbers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_rows_have_the_same_thread_layout_in_every_variant():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "norm_layouts.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result) == 24
    assert all(variants[0] for variants in result.values())
    differing = [
        case for case, (plain, *rest) in result.items() if any(other != plain for other in rest)
    ]
    assert differing == []


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "width"), [(4, 512), (16, 100), (64, 4096), (8192, 4096)])
def test_a_norms_codes_are_transposed_in_pairs(dtype, rows, width):
    """The norm kernel would transpose codes one at a time, which ptxas 12.8 miscompiles: see `kernels.tile`."""
    from transformer_engine.common.formats import E4M3
    from transformer_engine.common.kernels import norm_codes
    from transformer_engine.common.kernels.cast import OneScale
    from transformer_engine.common.kernels.norm import NormRows

    x = NormRows(
        rows, width, width, dtype, 1e-5, zero_centered=False, centered=False, processors=132
    )
    program = norm_codes.one_scale(
        x,
        OneScale(E4M3, columnwise=True, given=True, records=False, power_of_two=False, epsilon=0.0),
    )
    makers = [one.launch.kernel.fn.__name__ for one in program.steps if "codes_t" in one.outputs]
    assert makers == ["transpose_kernel"]
