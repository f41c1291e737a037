"""Plain Triton launches compile for AMD's gfx942 and gfx950, without a GPU."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.support.programs import output_without_gpu
from transformer_engine.common.hardware import hardware_named


def _has_the_compiler() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from triton.backends import backends

    return "amd" in backends


pytestmark = pytest.mark.skipif(
    not _has_the_compiler(), reason="triton with AMD's backend is not installed"
)


def test_plain_kernels_compile_for_amd_and_fit_its_memory():
    text = output_without_gpu("tests/kernels/rocm_compile.py")
    result = json.loads(text.splitlines()[-1])
    assert len(result["gfx942"]) == 26 and len(result["gfx950"]) == 2
    for architecture, memory in result.items():
        failed = {name: size for name, size in memory.items() if isinstance(size, str)}
        assert failed == {}, architecture
        assert max(memory.values()) <= hardware_named("amd", architecture).shared_memory
