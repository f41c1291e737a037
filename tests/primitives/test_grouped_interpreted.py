"""The grouped kernels without a GPU: in Triton's interpreter, and through its compiler."""

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


@pytest.fixture(scope="module")
def interpreted() -> dict[str, bool]:
    command = ["-W", "ignore", str(HERE / "grouped_interpreter.py")]
    return json.loads(forked.output(command, HERE, interpreting(), patience=300).splitlines()[-1])


@pytest.mark.parametrize(
    "what, cases", [("rows", 9), ("tiles", 6), ("matrices", 15), ("layout", 3), ("product", 3)]
)
def test_interpreted_kernels_agree_with_the_reference(what, cases, interpreted):
    results = {name: equal for name, equal in interpreted.items() if name.startswith(what)}
    assert len(results) == cases
    assert [name for name, equal in results.items() if not equal] == []


@pytest.fixture(scope="module", params=["cover", pytest.param("--all", marks=pytest.mark.slow)])
def compiled(request) -> dict[str, dict[str, int]]:
    command = ["-W", "ignore", str(HERE / "grouped_compile.py"), request.param]
    return json.loads(programs.output(command, HERE, os.environ, patience=300).splitlines()[-1])


def test_every_kernel_fits_the_shared_memory_of_its_architecture(compiled):
    assert len(compiled) in (2 + 5 + 11 + 6, 2 + 6 + 2 * 11)
    assert [name for name, facts in compiled.items() if not facts["fits"]] == []


def test_products_run_on_the_tensor_cores_of_whole_warp_groups_on_hopper(compiled):
    products = {
        name: f for name, f in compiled.items() if name.startswith("sm90") and "cast" not in name
    }
    assert len(products) == 6
    assert [name for name, facts in products.items() if facts["mma"] or not facts["wgmma"]] == []


def test_no_kernel_reads_or_writes_a_byte_at_a_time_or_computes_in_double_precision(compiled):
    assert [name for name, facts in compiled.items() if facts["narrow"] or facts["double"]] == []
