"""A line starts what its pass starts, on the same: shown without a GPU, by what kernels would read and write."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from source import ROOT


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_steps_by_lines_leave_what_steps_by_passes_leave():
    kept = {
        name: text for name, text in os.environ.items() if not name.startswith(("TE_", "NVTE_", "TRITON_"))
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/module/started_by_lines.py"],
        cwd=ROOT,
        env=kept | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 43
    assert {case: what for case, what in found.items() if what is not None} == {}
