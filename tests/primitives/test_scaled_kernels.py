"""Block-scaled product kernels without a GPU: in Triton's interpreter, and through its compiler."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from tests.support import forked, programs
from tests.support.programs import interpreting
from transformer_engine.common import optional

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    command = ["-W", "ignore", str(HERE / "scaled_interpreter.py")]
    return json.loads(forked.output(command, HERE, interpreting(), patience=300).splitlines()[-1])


def test_swizzling_kernels_equal_the_formula_in_both_directions(interpreted):
    results = {name: wrong for name, wrong in interpreted.items() if name.startswith("order")}
    assert len(results) == 10 and set(results.values()) == {0.0}


@pytest.mark.parametrize(
    ("kind", "cases"), [("mxfp8", 5), ("nvfp4", 5), ("block", 5), ("exponents", 5), ("decoded", 3)]
)
def test_interpreted_products_agree_with_float64(kind, cases, interpreted):
    results = {name: error for name, error in interpreted.items() if name.startswith(kind)}
    assert len(results) == (3 if kind == "decoded" else 4) * cases
    assert {
        name: error
        for name, error in results.items()
        if name.endswith(("behind", "kept")) and error
    } == {}
    assert {name: error for name, error in results.items() if error > 2e-6} == {}


def test_interpreted_tma_products_are_bitwise_equal_to_pointer_products(interpreted):
    results = {
        name: different for name, different in interpreted.items() if name.startswith("copied")
    }
    assert len(results) == 7 * 4 * 2
    assert {name: different for name, different in results.items() if different} == {}


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4", "nvfp4 rows"])
def test_interpreted_grouped_products_agree_with_float64(kind, interpreted):
    results = {
        name: interpreted[f"grouped {kind} {name}"] for name in ("y", "dx", "dw", "dw added")
    }
    assert {name: error for name, error in results.items() if error > 2e-6} == {}
    assert interpreted[f"grouped {kind} empty"] == interpreted[f"grouped {kind} by TMA"] == 0


@pytest.fixture(scope="module", params=["cover", pytest.param("--all", marks=pytest.mark.slow)])
def compiled(request) -> dict[str, dict]:
    command = ["-W", "ignore", str(HERE / "scaled_compile.py"), request.param]
    return json.loads(programs.output(command, HERE, os.environ, patience=600).splitlines()[-1])


def test_every_product_compiles_to_its_hardwares_native_instruction(compiled):
    assert len(compiled) >= 30
    assert {name: f["instructions"] for name, f in compiled.items() if not f["native"]} == {}


@pytest.mark.parametrize(
    ("kernels", "least", "fact"),
    [("copied", 5, "copied"), ("tma grouped", 4, "loads by TMA")],
    ids=["operands and scales", "grouped codes"],
)
def test_the_copy_engine_moves_operands_to_tensor_memory(compiled, kernels, least, fact):
    names = [name for name in compiled if kernels in name]
    assert len(names) >= least and all(name.startswith(("10.", "11.")) for name in names)
    assert [name for name in names if not compiled[name][fact]] == []


def stack_limit(name: str, release: tuple[int, ...]) -> int:
    """Stack bytes per thread that a product may use."""
    if name == "9.0 block grouped columns":
        # 4 warps of Hopper's tiles 128 x 128, added to float32; 8 warps were not measured.
        return 512
    if re.match(r"1\d\.\d block (large|tail|64) added", name) and release < (3, 7):
        return 424  # Triton 3.9 needs none; the cause was not found
    return 0


def test_no_product_spills_registers_or_exceeds_its_hardwares_memory(compiled):
    release = optional.release("triton")
    spilled = {
        name: f["stack"] for name, f in compiled.items() if f["stack"] > stack_limit(name, release)
    }
    assert spilled == {}
    assert [name for name, f in compiled.items() if not f["fits"] or not f["tensor memory"]] == []
