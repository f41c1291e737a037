"""A warm pass enters no more functions than it did: host time without a GPU, and without a clock."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from source import ROOT

# Functions of the package in one call of `benchmarks/host_calls.py`. Whoever makes a pass shorter lowers its line.
MOST = {
    "linear/none/fb": 43,
    "linear/delayed/fb": 104,
    "linear/current/fb": 67,
    "linear/block/fb": 62,
    "linear_bias/current/f": 50,
    "layernorm_linear/delayed/fb": 106,
    "layernorm_mlp/current/fb": 80,
    "layernorm_mlp/block/fb": 72,
    "linear/block/fb_later": 78,
    "grouped_linear/delayed/fb": 246,
    "autocast/delayed/empty": 34,
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_warm_pass_enters_few_functions(tmp_path):
    figures = tmp_path / "figures.json"
    command = [
        sys.executable,
        "benchmarks/host_calls.py",
        "--json",
        str(figures),
        "--calls",
        "1",
        "--only",
        ",".join(MOST),
    ]
    # A variable that is set is read at every call.
    unset = {
        name: text for name, text in os.environ.items() if not name.startswith(("TE_", "NVTE_", "TRITON_"))
    }
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=unset | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    entered = {row["case"]: row["ours"] for row in json.loads(figures.read_text())["cases"]}
    assert {name: entered[name] for name, most in MOST.items() if entered[name] > most} == {}
