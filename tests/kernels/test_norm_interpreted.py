"""Tests for kernels that move memory and compute little, run again on the CPU by Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support import forked
from tests.support.programs import ROOT, interpreting

FAMILIES = {
    "rows": (
        "norm_triton",
        "activation_triton",
        "softmax",
        "cross_entropy",
        "multi_tensor",
        "fused_codes",
        "fused_blocks",
    ),
    "tokens": ("rope_triton", "dropout", "permutation", "router", "kv_cache"),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("cases", ["1", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_pass_their_tests_in_the_interpreter(family, cases):
    options = ("-q", "-x", "-p", "tests.kernels.norm_interpreter", "-p", "no:cacheprovider")
    files = [f"tests/primitives/test_{name}.py" for name in FAMILIES[family]]
    environment = interpreting(INTERPRET=cases)
    assert " passed" in forked.output(["-m", "pytest", *options, *files], ROOT, environment)
