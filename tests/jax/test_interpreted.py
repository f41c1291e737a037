"""The tests of kernels on a GPU, run again on the CPU by Triton's interpreter through JAX's bridge."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.programs import interpreting

ROOT = Path(__file__).parents[2]
FILES = tuple(
    f"tests/jax/test_{name}_on_gpu.py"
    for name in ("kernels", "codes", "products", "scaled_products", "attention")
)
# One kernel of each kind: a write in place, codes, a norm, an activation.
FEW = (
    "writes_in_place or swiglu-bfloat16 or rmsnorm-bfloat16 or "
    "(bytes_of_the_torch_reference and bfloat16 and (float8-e5m2 or block2d-power or mxfp8-e5m2))"
)


def run(*options: str) -> str:
    """Run the tests marked gpu in these files and return their output."""
    plugins = ("-p", "tests.jax.interpreted", "-p", "no:cacheprovider")
    command = ["-m", "pytest", "-q", "-x", *plugins, "-m", "gpu", *options]
    program = forked.Program(command, ROOT, interpreting(JAX_PLATFORMS="cpu"))
    assert program.finish() == 0, program.printed + program.errors
    return program.printed


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def test_one_kernel_per_family_passes_its_tests_in_the_interpreter():
    assert "6 passed" in run(FILES[0], "-k", FEW)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_the_kernels_pass_their_tests_in_the_interpreter(file):
    assert " passed" in run(file)
