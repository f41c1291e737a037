"""The kernels around FP8 attention without a GPU: in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.support import forked, programs
from tests.support.programs import interpreting

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton)",
)


def test_interpreted_kernels_equal_plain_torch():
    command = ["-W", "ignore", str(HERE / "fp8_attention_cases.py")]
    facts = json.loads(forked.output(command, HERE, interpreting(), patience=300).splitlines()[-1])
    assert len(facts) == 16
    assert [name for name, equal in facts.items() if not equal] == []


COMPILE = """
import json, sys
sys.path[:0] = [{root!r}, {here!r}]
from tests.kernels.compile_cases import VALUES, count, compile_ptx
from tests.kernels.conversion_compile import attention_casts
from transformer_engine.common.kernels import packed_sequences
launches = {{name: (launch, pointers) for name, launch, pointers in attention_casts()}} | dict(
    tail=(packed_sequences.zero_padding_launch(4096, 4096, 8), dict(x=VALUES, starts="*i32")),
)
facts = {{}}
for name, (launch, pointers) in launches.items():
    ptx, shared = compile_ptx(launch, pointers, 90)
    facts[name] = [
        shared,
        count(r"\\bcvt\\.\\S*e4m3x2\\.f", ptx) - count(r"\\bcvt\\.rn\\.satfinite\\.e4m3x2\\.f32", ptx),
        count(r"\\.f64", ptx),
    ]
print(json.dumps(facts))
"""


def test_kernels_compile_for_hopper_and_casts_saturate():
    code = COMPILE.format(root=str(HERE.parents[1]), here=str(HERE))
    facts = json.loads(
        programs.output(["-W", "ignore", "-c", code], HERE, os.environ, 300).splitlines()[-1]
    )
    assert sorted(facts) == ["tail", "three", "values"]
    for shared, unsaturated, double in facts.values():
        assert shared < 48 * 1024
        assert unsaturated == double == 0
