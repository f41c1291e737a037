"""The kernels of a mixture of experts without a GPU: tests in the interpreter, and that they compile for Hopper."""

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


@pytest.mark.parametrize("name", ["permutation", "router"])
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


def test_the_kernels_compile_for_hopper():
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/kernels/experts_compile.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    facts = json.loads(finished.stdout.splitlines()[-1])
    assert min(case["ptx"] for case in facts.values()) > 1000
    assert max(case["shared"] for case in facts.values()) <= 227 * 1024
