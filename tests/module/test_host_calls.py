"""A warm pass calls a bounded number of functions: host time, measured without a GPU or a clock."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.support.fast_path import needs_fast_path
from tests.support.programs import output_without_gpu

# Upper bounds for package functions entered in one `benchmarks/host_calls.py` call. Lower a bound when a pass
# enters fewer.
MOST = {
    "linear/none/fb": 38,
    "linear/delayed/fb": 104,
    "linear/current/fb": 60,
    "linear/block/fb": 55,
    "linear_bias/current/f": 43,
    "layernorm_linear/delayed/fb": 106,
    "layernorm_mlp/current/fb": 73,
    "layernorm_mlp/block/fb": 64,
    "linear/block/fb_later": 83,
    "grouped_linear_8/delayed/fb": 232,
    "autocast/delayed/empty": 36,
}


@needs_fast_path
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_warm_pass_enters_few_functions(tmp_path):
    figures = tmp_path / "figures.json"
    output_without_gpu(
        "benchmarks/host_calls.py", "--json", str(figures), "--calls", "1", "--only", ",".join(MOST)
    )
    entered = {row["case"]: row["ours"] for row in json.loads(figures.read_text())["cases"]}
    assert {name: entered[name] for name, most in MOST.items() if entered[name] > most} == {}
