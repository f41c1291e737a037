"""Every backend transposes codes to the same bytes."""

from __future__ import annotations

import pytest
import torch

from transformer_engine.pytorch.primitives import transpose
from transformer_engine.pytorch.primitives.transpose import transposed_codes, write_transposed

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize(
    "shape", [(1, 1), (16, 48), (63, 65), (130, 257), (0, 8), (2048, 4096)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transposing_moves_codes_without_changing_them(shape, dtype, device):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(dtype)
    transposed = transposed_codes(codes)
    assert transposed.dtype == dtype and transposed.is_contiguous()
    assert torch.equal(transposed.view(torch.uint8), codes.view(torch.uint8).t())


@pytest.mark.any_device
@pytest.mark.parametrize("shape", [(16, 48), (63, 65), (2048, 4096)], ids=str)
def test_codes_are_transposed_into_an_existing_tensor(shape, device):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    out = torch.zeros(shape[1], shape[0], dtype=torch.uint8, device=device)
    address = out.data_ptr()
    write_transposed(codes, out)
    assert torch.equal(out, codes.t()) and out.data_ptr() == address


def test_a_view_is_transposed_like_its_copy(device):
    codes = torch.randint(0, 256, (64, 96), dtype=torch.uint8, device=device)[:, 16:80]
    assert torch.equal(transposed_codes(codes), codes.t())


def test_a_compiled_transpose_has_the_same_bytes(device):
    codes = torch.randint(0, 256, (64, 96), dtype=torch.uint8, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(transposed_codes, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(codes), codes.t())
    fake = transpose._operator.results(codes)
    assert (fake.shape, fake.dtype) == (codes.t().shape, codes.dtype)


@pytest.mark.gpu
def test_the_kernel_is_used_on_a_gpu():
    codes = torch.zeros(32, 32, dtype=torch.uint8, device="cuda")
    facts = (codes.shape, codes.dtype, codes.device, True, True)
    assert transpose.TABLE.name_of(facts) == "triton"


def test_the_kernel_rejects_unsupported_requests_with_the_reason():
    facts = transpose.TransposeRequest(
        (8, 8), torch.float8_e4m3fn, torch.device("cuda"), contiguous=True, native=True
    )
    for change, reason in (
        ({"dtype": torch.bfloat16}, "one byte"),
        ({"contiguous": False}, "not contiguous"),
        ({"native": False}, "not a plain tensor"),
        ({"shape": (0, 8)}, "codes are empty"),
        ({"shape": (8, 1 << 23)}, "reaches"),
        ({"device": torch.device("cpu")}, "on cpu"),
    ):
        assert reason in (transpose.unsupported_reason(facts._replace(**change)) or "")
