"""Products that are symmetric matrices: every backend against float64, and the choice of the kernel."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests.support import forked
from tests.support.programs import interpreting
from transformer_engine.pytorch.primitives.symmetric_product import (
    TABLE,
    SymmetricRequest,
    symmetric_product,
)

HERE = Path(__file__).parent
SIZES = [(1, 128, 64), (2, 136, 72), (3, 8, 200), (1, 257, 1), (2, 384, 128)]


def operands(sizes, dtype, device="cpu"):
    matrices, rows, depth = sizes
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(matrices, rows, depth, generator=generator).to(device, dtype)
    c = torch.randn(matrices, rows, rows, generator=generator).to(device, dtype)
    return a, (c + c.mT).contiguous()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_interpreted_kernel_equals_float64_within_one_rounding():
    command = ["-W", "ignore", str(HERE / "symmetric_interpreter.py")]
    found = json.loads(forked.output(command, HERE, interpreting(), patience=300).splitlines()[-1])
    assert len(found["errors"]) == 10
    for error, difference in found["errors"].values():
        assert error <= 1.01 and difference == 0.0
    assert found["asymmetry"] == 0.0


def test_results_are_symmetric_to_the_bit(device):
    """Also those of two matrices that commute within rounding only: iterations amplify the difference."""
    a, c = operands((2, 200, 200), torch.float16, device)
    gram = symmetric_product(a, a, alpha=1 / 200)
    square = symmetric_product(gram, gram)
    for result in (gram, square, symmetric_product(gram, square, c)):
        assert torch.equal(result, result.mT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_the_chosen_backend_equals_float64(dtype, adds, device):
    a, c = operands((2, 136, 72), dtype, device)
    out = symmetric_product(a, a, c if adds else None, alpha=0.5, beta=2.0)
    exact = 0.5 * a.double() @ a.double().mT + (2.0 * c.double() if adds else 0.0)
    unit = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=unit, atol=32 * unit)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_is_used_on_a_gpu(sizes):
    a, _ = operands(sizes, torch.float16, "cuda")
    assert TABLE.name_of((a.shape, a.dtype, a.device, True)) == "triton"
    exact = a.double() @ a.double().mT
    torch.testing.assert_close(symmetric_product(a, a).double(), exact, rtol=2.0**-10, atol=2.0**-8)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"plain": False}, "not contiguous"),
        ({"shape": (0, 8, 8)}, "nothing to multiply"),
        ({"device": torch.device("cpu")}, "needs a CUDA device"),
    ],
)
def test_unsupported_requests_have_a_reason(change, reason, monkeypatch):
    from transformer_engine.pytorch.primitives import symmetric_product as module

    if "device" not in change:
        monkeypatch.setattr(module, "unsupported_elementwise", lambda device: None)
    request = SymmetricRequest((1, 8, 8), torch.float16, torch.device("cuda"), True)
    assert reason in (module._unsupported_reason(request._replace(**change)) or "")
