"""The softmax, dropout, packed-RoPE and fused-cast kernels through Triton's compiler, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMITS = {"sm80": 163 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(scope="module", params=["cover", pytest.param("--all", marks=pytest.mark.slow)])
def compiled(request) -> dict[str, dict[str, int]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "fused_compile_cases.py"), request.param],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kernel_compiles_and_fits_the_shared_memory(compiled):
    assert len(compiled) in (51, 13 + 33 + 24)
    assert [
        name for name, facts in compiled.items() if facts["shared"] > LIMITS[name.split("-")[0]]
    ] == []


def test_only_large_angle_kernels_compute_in_double_precision(compiled):
    doubled = [name for name, facts in compiled.items() if facts["double"]]
    assert [name for name in doubled if "rope" not in name] == []


def test_every_cast_saturates_and_rounds_once_on_hopper(compiled):
    casting = {
        name: facts
        for name, facts in compiled.items()
        if name.startswith("sm90") and facts["casts"]
    }
    assert len(casting) == 20
    assert [name for name, facts in casting.items() if facts["casts"] != facts["saturating"]] == []
