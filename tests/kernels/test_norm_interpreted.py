"""The tests of the kernels that move memory and compute little, run again on the CPU by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import search_path

ROOT = Path(__file__).parents[2]


# One process per family, because each process imports torch for seconds.
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
    paths = search_path()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "tests.kernels.norm_interpreter",
        "-p",
        "no:cacheprovider",
    ]
    finished = subprocess.run(
        [*command, *(f"tests/primitives/test_{name}.py" for name in FAMILIES[family])],
        cwd=ROOT,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "INTERPRET": cases,
            "PYTHONPATH": paths,
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert " passed" in finished.stdout
