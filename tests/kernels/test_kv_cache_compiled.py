"""The kernel that appends to a key-value cache compiles for every architecture, without a GPU."""

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


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_the_kernel_compiles_for_every_architecture():
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/kernels/kv_cache_compile.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    sizes = json.loads(finished.stdout.splitlines()[-1])
    assert len(sizes) == 4 and min(sizes.values()) > 1000
