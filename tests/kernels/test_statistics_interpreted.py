"""The kernels that measure quantization, without a GPU: their tests in the interpreter, and that they compile."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_the_kernels_pass_their_tests_in_the_interpreter():
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "kernels")))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "norm_interpreter", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [*command, "tests/primitives/test_statistics.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_the_kernels_compile_for_hopper_and_blackwell():
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/kernels/statistics_compile.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    sizes = json.loads(finished.stdout.splitlines()[-1])
    assert len(sizes) == 11 and min(sizes.values()) > 1000
