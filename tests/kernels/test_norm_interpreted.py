"""The tests of the kernels that move memory and compute little, run again on the CPU by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "name",
    [
        "norm_triton",
        "activation_triton",
        "rope_triton",
        "softmax",
        "dropout",
        "fused_codes",
        "fused_blocks",
        "cross_entropy",
        "multi_tensor",
    ],
)
def test_the_kernels_pass_their_tests_in_the_interpreter(name):
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "kernels")))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "norm_interpreter", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [*command, f"tests/primitives/test_{name}.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
