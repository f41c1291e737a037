"""Kernels for 4over6 and per-row scales equal the reference bitwise, in the interpreter and on a GPU."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from tests.kernels.test_interpreter import run_in_interpreter
from tests.support.nvfp4_random import CONTENTS, cases, differing, specs

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton)",
)


def test_a_hundred_cases_cover_every_variant_and_content():
    named = list(cases(150))
    assert {spec for _, spec, _ in named} == set(specs())
    assert len({(name.split(",")[1], spec.format.name) for name, spec, _ in named}) == 4 * len(
        CONTENTS
    )


@needs_triton
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_interpreted_variant_kernels_equal_the_reference_bitwise(count):
    result = run_in_interpreter("nvfp4_cases.py", str(count))
    assert result["compared"] == count
    assert result["differing"] == {}


# Most cases compile a kernel for 1 to 20 seconds, so that processes share the cases.
PARTS = 15


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_variant_kernels_equal_the_reference_bitwise_on_a_gpu(monkeypatch, count, part):
    monkeypatch.setenv("TE_EMULATE", "1")
    selected = itertools.islice(cases(count, "cuda"), part, None, PARTS)
    results = {name: differing(spec, x) for name, spec, x in selected}
    assert len(results) in (count // PARTS, count // PARTS + 1)
    assert {name: fields for name, fields in results.items() if fields} == {}
