"""The mixture-of-experts kernels compile for Hopper without a GPU."""

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
    """Run a Python process, which must succeed, and return its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_kernels_compile_for_hopper():
    output = run_python(
        "-W", "ignore", "tests/kernels/experts_compile.py", PYTHONPATH=search_path()
    )
    facts = json.loads(output.splitlines()[-1])
    assert min(case["ptx"] for case in facts.values()) > 1000
    assert max(case["shared"] for case in facts.values()) <= 227 * 1024
