"""GPUs of other vendors: AMD's by their architecture, never by a number; mps and xpu by what torch allocates there."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import transformer_engine.pytorch as te
from tests.primitives.hardware_choices import PRODUCTS, choices
from transformer_engine.common import formats
from transformer_engine.common.dispatch import tables
from transformer_engine.common.hardware import ROWS, hardware_named
from transformer_engine.common.kernels import launch
from transformer_engine.pytorch.primitives.attention.call import AttentionCall
from transformer_engine.pytorch.primitives.attention.mask import resolve
from transformer_engine.pytorch.primitives.gemm import Epilogue, cublaslt_library
from transformer_engine.pytorch.primitives.gemm.composed import GELU, FusedRequest
from transformer_engine.pytorch.primitives.gemm.request import GemmRequest
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import QuantizeRequest, QuantizeSpec, backends
from transformer_engine.pytorch.quantization import families, support
from transformer_engine.pytorch.runtime import device, launching

AMD = [row for row in ROWS if row.vendor == "amd"]


@pytest.fixture
def rocm(monkeypatch):
    """torch for ROCm on gfx942, which reports compute capability 9.4."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 4))
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    for module in (device, support):
        monkeypatch.setattr(module, "has_cuda", lambda: True)
    device._capability.cache_clear()
    device._architecture.cache_clear()
    monkeypatch.delenv("TE_EMULATE", raising=False)
    yield hardware_named("amd", "gfx942")
    device._capability.cache_clear()
    device._architecture.cache_clear()


def test_a_rocm_device_is_found_by_its_architecture(rocm):
    assert device.get_device_compute_capability() == (9, 4)
    assert device.current_hardware() is rocm and rocm.vendor == "amd"


def test_rocm_has_bfloat16_and_no_fp8_for_a_reason(rocm):
    assert te.is_bf16_available()
    available, reason = te.is_fp8_available(return_reason=True)
    assert (
        not available and "AMD gfx942" in reason and "fnuz" in reason and "TE_EMULATE=1" in reason
    )
    for check in (te.is_mxfp8_available, te.is_nvfp4_available, te.is_fp8_block_scaling_available):
        assert check(return_reason=True)[0] is False
    with te.emulate():
        assert te.is_fp8_available()


@pytest.mark.parametrize("row", AMD, ids=lambda row: row.architecture)
@pytest.mark.parametrize("libraries", [True, False], ids=["nvmath", "torch and triton"])
def test_no_product_of_codes_is_native_on_amd(row, libraries):
    result = choices(row, libraries)
    for recipe in PRODUCTS.keys() - {"none"}:
        assert set(result[recipe].values()) <= {"reference", "widen"}, recipe
    assert result["none"]["output"] == "matmul"


@pytest.mark.parametrize("row", AMD, ids=lambda row: row.architecture)
def test_cublaslt_states_why_it_is_not_for_amd(row, monkeypatch):
    monkeypatch.setattr(cublaslt_library, "unavailable_reason", lambda: None)
    matrix = Operand(torch.empty(64, 64, dtype=torch.bfloat16), scale=None, format=None)
    request = GemmRequest.of(matrix, matrix, Epilogue(torch.bfloat16))
    request = dataclasses.replace(request, device="cuda", hardware=row, index=0)
    for operation, requested in (
        ("gemm", dataclasses.replace(request, bias=torch.bfloat16)),
        (
            "gemm_epilogue",
            FusedRequest(GELU, request, second=False, x=None, dtype=None, forced=None),
        ),
    ):
        verdicts = [
            v for v in tables[operation].explain(requested) if v.backend.startswith("cublaslt")
        ]
        assert verdicts
        for verdict in verdicts:
            assert f"AMD {row.architecture} has no cublaslt" in str(verdict.reason), (
                operation,
                verdict.backend,
            )


@pytest.mark.parametrize("row", AMD, ids=lambda row: row.architecture)
def test_no_attention_library_of_nvidia_is_chosen_on_amd(row, monkeypatch):
    monkeypatch.setattr(launch, "unavailable_reason", lambda hardware: None)
    call = AttentionCall(
        batch=2,
        heads=16,
        groups=16,
        seqlen_q=512,
        seqlen_kv=512,
        head_dim_qk=128,
        head_dim_v=128,
        dtype=torch.bfloat16,
        q_format="bshd",
        kv_format="bshd",
        page_size=0,
        mask=resolve("causal", window_size=None, bottom_right_diagonal=None),
        scale=0.1,
        device_type="cuda",
        hardware=row,
    )
    reasons = {verdict.backend: verdict.reason for verdict in tables["attention"].explain(call)}
    for backend in ("cudnn", "torch_cudnn", "torch_flash", "flash3", "flash4"):
        assert reasons[backend] is not None, backend
    assert f"AMD {row.architecture}" in str(reasons["torch_cudnn"])
    assert f"AMD {row.architecture}" in str(reasons["torch_flash"])


def test_amd_casts_by_the_reference_and_says_why(rocm, monkeypatch):
    monkeypatch.setattr(launching, "unavailable_reason", lambda hardware: None)
    for module in (launching, families):
        monkeypatch.setattr(module, "current_hardware", lambda: rocm)
    spec = QuantizeSpec(formats.FLOAT8, formats.E4M3)
    request = QuantizeRequest(spec, (128, 128), torch.bfloat16, torch.device("cuda", 0))
    verdicts = {verdict.backend: verdict for verdict in tables["quantize"].explain(request)}
    assert verdicts["reference"].chosen and "AMD gfx942" in str(verdicts["triton"].reason)
    assert launching.unsupported_elementwise(torch.device("cuda", 0), torch.bfloat16) is None


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_devices_without_fp8_tensors_say_so(kind, monkeypatch):
    monkeypatch.setattr(backends, "_allocates", lambda device, dtype: dtype != torch.float8_e4m3fn)
    current = torch.device(kind)

    def reason(form, element):
        request = QuantizeRequest(QuantizeSpec(form, element), (128, 128), torch.bfloat16, current)
        return tables["quantize"].named("reference").rejection_reason(request)

    assert reason(formats.FLOAT8, formats.E4M3) == (
        f"torch has no torch.float8_e4m3fn tensors on {kind}; move the module to the CPU, or use no recipe there"
    )
    assert reason(formats.FLOAT8, formats.E5M2) is None
