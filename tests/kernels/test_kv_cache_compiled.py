"""The kernel that appends to a key-value cache compiles for every architecture, without a GPU."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.support.programs import output_without_gpu

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def test_the_kernel_compiles_for_every_architecture():
    text = output_without_gpu("tests/kernels/kv_cache_compile.py")
    sizes = json.loads(text.splitlines()[-1])
    assert len(sizes) == 4 and min(sizes.values()) > 1000
