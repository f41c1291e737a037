"""The kernels' arithmetic and indexing without a GPU: in Triton's interpreter, and through its compiler for Hopper."""

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


def run_in_interpreter(script: str, *arguments: str) -> dict:
    """Run a script from this folder in Triton's interpreter and parse the JSON object that it prints."""
    command = ["-W", "ignore", str(HERE / script), *arguments]
    return json.loads(forked.output(command, HERE, interpreting(), patience=900).splitlines()[-1])


CASES = ["cover", pytest.param("--all", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=CASES)
def interpreted(request) -> dict[str, bool]:
    return run_in_interpreter("quantize_cases.py", request.param)


@pytest.fixture(scope="module", params=CASES)
def compiled(request) -> dict[str, dict[str, int]]:
    command = ["-W", "ignore", str(HERE / "compile_cases.py"), request.param]
    return json.loads(programs.output(command, HERE, os.environ, patience=900).splitlines()[-1])


# Kernels that LLVM optimizes for seconds; the cover compiles the kernel for tiles for both architectures, the
# others for one.
COMPARING = {"sm90-nvfp4_4over6_rows", "sm100-nvfp4_4over6_squares"}
COMPARING |= {"sm90-nvfp4_4over6_tiles", "sm100-nvfp4_4over6_tiles"}
COMPARING_ON_BOTH = COMPARING | {"sm100-nvfp4_4over6_rows", "sm90-nvfp4_4over6_squares"}


FORMATS = ("float8", "block1d", "block2d", "mxfp8", "nvfp4")


@pytest.mark.parametrize("form", FORMATS)
def test_interpreted_kernels_give_the_reference_bits(form, interpreted):
    cases = {name: equal for name, equal in interpreted.items() if name.startswith(form)}
    assert len(cases) >= 8
    assert [name for name, equal in cases.items() if not equal] == []


@pytest.mark.parametrize("architecture", ["sm90", "sm100"])
def test_every_kernel_compiles_and_fits_the_shared_memory(architecture, compiled):
    cases = {name: facts for name, facts in compiled.items() if name.startswith(architecture)}
    assert len(cases) == 12 - len(COMPARING_ON_BOTH - set(compiled)) // 2
    assert [name for name, facts in cases.items() if facts["shared"] > 227 * 1024] == []


def test_casts_to_fp8_saturate_and_round_once_on_hopper(compiled):
    casting = {
        name: facts
        for name, facts in compiled.items()
        if name.startswith("sm90") and facts["casts"]
    }
    # all but the passes for maxima and the kernels that compare errors
    assert len(casting) == 7
    assert [name for name, facts in casting.items() if facts["casts"] != facts["saturating"]] == []


def test_kernels_that_compare_errors_round_products_before_sums(compiled):
    separate = {
        name: facts["fused"] for name, facts in compiled.items() if facts["fused"] is not None
    }
    assert set(separate) in (COMPARING, COMPARING_ON_BOTH)
    assert set(separate.values()) == {0}


def test_kernels_that_compare_errors_convert_scales_by_integers(compiled):
    """ptxas 12.8 mixes up the two codes of a conversion instruction in these kernels."""
    found = {
        name: facts["saturating"] for name, facts in compiled.items() if name in COMPARING_ON_BOTH
    }
    assert set(found) >= COMPARING and set(found.values()) == {0}


def test_no_kernel_computes_in_double_precision(compiled):
    assert [name for name, facts in compiled.items() if facts["double"]] == []


def test_divisions_are_correctly_rounded(compiled):
    assert [name for name, facts in compiled.items() if facts["approximate"]] == []
