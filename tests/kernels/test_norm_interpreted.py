"""The tests of the norm, activation and rope kernels, run again on the CPU by Triton's interpreter."""

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
@pytest.mark.parametrize("family", ["norm", "activation", "rope"])
def test_the_kernels_pass_their_tests_in_the_interpreter(family):
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "kernels")))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "norm_interpreter", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [*command, f"tests/primitives/test_{family}_triton.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
