"""A compiled pass launches its steps' kernels on the same tensors; symbols show it without a GPU."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.support.fast_path import needs_fast_path
from tests.support.programs import output_without_gpu


@needs_fast_path
@pytest.mark.parametrize(
    ("cases", "count"),
    [
        ("some", 55),
        ("deferred", 11),
        pytest.param("all", 94, marks=pytest.mark.slow),
        ("10.0", 24),  # block-scaled passes of a compute capability
        ("12.0", 24),
    ],
)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_compiled_passes_launch_the_kernels_of_their_steps(cases: str, count: int):
    done = output_without_gpu("tests/module/generated_launches.py", cases)
    result = json.loads(done.splitlines()[-1])
    assert len(result) == count
    assert {case: what for case, what in result.items() if what is not None} == {}


@needs_fast_path
@pytest.mark.parametrize("count", [8, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_generated_passes_launch_the_kernels_of_plain_passes_for_random_layers(count: int):
    done = output_without_gpu(
        "tests/module/generated_random_launches.py", str(count), patience=1800
    )
    result = json.loads(done.splitlines()[-1])
    assert result["different"] == {}
    # A layer whose tensors need no gradients has one pass, others two.
    assert result["generated"] > result["drawn"] > 0
