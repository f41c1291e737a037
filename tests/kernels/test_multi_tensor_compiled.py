"""Code that Triton compiles for Hopper from the tensor-list kernels, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import re

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="triton is not installed, or interprets",
)


@pytest.mark.parametrize("aligned", [True, False])
def test_a_thread_moves_16_bytes_at_once_where_every_tensor_is_aligned(aligned):
    from tests.kernels.compile_cases import compile_ptx
    from transformer_engine.common.kernels import multi_tensor
    from transformer_engine.common.operation_settings import Adam

    launch = multi_tensor.adam(3, ("float32",) * 4, Adam(), aligned)
    ptx, shared = compile_ptx(launch, {"table": "*i64", "rates": "*fp32", "flag": None}, 90)
    # Eight elements per thread in each of four lists; three lists are written.
    assert len(re.findall(r"ld\.global\S*v4", ptx)) == (8 if aligned else 0)
    assert len(re.findall(r"st\.global\S*v4", ptx)) == (6 if aligned else 0)
    assert shared == 0
