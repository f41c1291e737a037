"""The attention kernels without a GPU: their tests in Triton's interpreter, and their compiled code."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.support import forked
from tests.support.programs import ROOT, interpreting

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    """Compiled code per kernel, by capability and name."""
    script = ROOT / "tests" / "kernels" / "attention_compile_cases.py"
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("cases", ["1", pytest.param("all", marks=pytest.mark.slow)])
def test_the_kernels_pass_their_tests_in_the_interpreter(cases):
    options = (
        "-q",
        "-x",
        "-p",
        "tests.kernels.attention_interpreter",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu",
    )
    files = ("tests/attention/test_triton_attention.py", "tests/attention/test_packed_tiles.py")
    environment = interpreting(INTERPRET=cases)
    printed = forked.output(["-m", "pytest", *options, *files], ROOT, environment)
    assert " passed" in printed and "skipped" not in printed


@pytest.mark.parametrize("architecture", ["sm80", "sm90", "sm100"])
def test_the_kernels_fit_the_shared_memory_and_use_tensor_cores(architecture, compiled):
    cases = {name: facts for name, facts in compiled.items() if name.startswith(architecture)}
    assert len(cases) >= 3
    assert [name for name, facts in cases.items() if not facts["fits"]] == []
    products = {name: facts for name, facts in cases.items() if not name.endswith("delta")}
    assert [name for name, facts in products.items() if not facts["tensor_cores"]] == []


def test_no_attention_kernel_computes_in_double_precision(compiled):
    assert [name for name, facts in compiled.items() if facts["double"]] == []
