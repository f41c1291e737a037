"""The kernels that measure quantization, without a GPU: their tests in the interpreter, and that they compile."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import search_path

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run_python(*arguments: str, **variables: str) -> str:
    """Run a separate Python process and return its output; if it fails, raise with the output."""
    environment = {**os.environ, "PYTHONPATH": search_path(), **variables}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_kernels_pass_their_tests_in_the_interpreter():
    options = (
        "-q",
        "-x",
        "-p",
        "tests.kernels.norm_interpreter",
        "-p",
        "no:cacheprovider",
        "-k",
        "triton",
    )
    interpreted = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert " passed" in run_python(
        "-m", "pytest", *options, "tests/primitives/test_statistics.py", **interpreted
    )


@pytest.mark.parametrize(
    ("cases", "count"), [("cover", 8), pytest.param("--all", 11, marks=pytest.mark.slow)]
)
def test_the_kernels_compile_for_hopper_and_blackwell(cases, count):
    sizes = json.loads(
        run_python("-W", "ignore", "tests/kernels/statistics_compile.py", cases).splitlines()[-1]
    )
    assert len(sizes) == count and min(sizes.values()) > 1000
