"""A numbered GPU must exist; device="cuda" without a number means the CPU on a machine without GPUs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.integrations.megatron import PagedContext
from transformer_engine.pytorch.runtime import device
from transformer_engine.pytorch.runtime.device import canonical_device
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor


def float8_quantizer() -> te.Float8Quantizer:
    one = torch.ones(1)
    return te.Float8Quantizer(one, torch.zeros_like(one), te.DType.kFloat8E4M3)


def float8_tensor(device: Any) -> torch.Tensor:
    codes = torch.zeros(16, 16, dtype=torch.uint8)
    return te.Float8Tensor(
        shape=codes.shape,
        dtype=torch.float32,
        device=device,
        data=codes,
        fp8_scale_inv=torch.ones(1),
        fp8_dtype=te.DType.kFloat8E4M3,
    )


QUANTIZERS = {
    "Float8Quantizer": float8_quantizer,
    "Float8CurrentScalingQuantizer": lambda: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3),
    "Float8BlockQuantizer": lambda: te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3, rowwise=True, columnwise=True
    ),
    "MXFP8Quantizer": lambda: te.MXFP8Quantizer(te.DType.kFloat8E4M3),
    "NVFP4Quantizer": te.NVFP4Quantizer,
}

# Functions that allocate on a device that the caller names.
MAKERS: dict[str, Callable[[Any], Any]] = {
    "Linear": lambda device: te.Linear(16, 16, device=device),
    "LayerNormLinear": lambda device: te.LayerNormLinear(16, 16, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(16, 32, device=device),
    "GroupedLinear": lambda device: te.GroupedLinear(2, 16, 16, device=device),
    "LayerNorm": lambda device: te.LayerNorm(16, device=device),
    "RMSNorm": lambda device: te.RMSNorm(16, device=device),
    "MultiheadAttention": lambda device: te.MultiheadAttention(32, 2, device=device),
    "TransformerLayer": lambda device: te.TransformerLayer(32, 64, 2, device=device),
    "PagedContext": lambda device: PagedContext(1, 1, 1, 16, 1, 16, device=device),
    "RecipeState": lambda device: te.quantization.RecipeState.create(
        DelayedScaling(), mode="forward", num_quantizers=1, device=device
    ),
    "GroupedTensor": lambda device: GroupedTensor.make_grouped_tensor_with_shapes(
        1, [(16, 16)], device=device
    ),
    "Float8Tensor": float8_tensor,
    "Float8CurrentScalingQuantizer(device)": functools.partial(
        te.Float8CurrentScalingQuantizer, te.DType.kFloat8E4M3
    ),
    "create_empty_quantized_tensor": lambda device: tex.create_empty_quantized_tensor(
        float8_quantizer(), (16, 16), torch.float32, device
    ),
    **{
        f"{name}.make_empty": lambda device, make=make: make().make_empty((128, 128), device=device)
        for name, make in QUANTIZERS.items()
    },
}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_engine.pytorch.runtime.device.has_cuda", lambda: False)


@pytest.mark.parametrize("device", ["cuda:0", 0, torch.device("cuda", 1)], ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_numbered_gpu_without_cuda_is_rejected(maker: str, device: Any, no_gpu: None):
    number = device if isinstance(device, int) else torch.device(device).index
    with pytest.raises(
        ValueError, match=f"device='cuda:{number}': torch finds no CUDA device; give 'cpu'"
    ):
        MAKERS[maker](device)


@pytest.mark.parametrize("maker", MAKERS)
def test_cuda_without_a_number_is_the_modules_default_device(maker: str, device: torch.device):
    instance = MAKERS[maker]("cuda")
    if isinstance(instance, torch.nn.Module):
        instance = next(instance.parameters())
    if isinstance(instance, torch.Tensor) and maker != "Float8Tensor":
        assert instance.device.type == device.type


@pytest.mark.parametrize("name", QUANTIZERS)
def test_an_empty_tensor_without_a_device_is_on_the_modules_default_device(
    name: str, device: torch.device
):
    assert QUANTIZERS[name]().make_empty((128, 128)).device.type == device.type


def test_an_absent_gpu_number_raises_with_the_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transformer_engine.pytorch.runtime.device.has_cuda", lambda: True)
    monkeypatch.setattr("transformer_engine.pytorch.runtime.device._device_count", lambda: 2)
    assert canonical_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"device='cuda:2': torch finds 2 CUDA device\(s\)"):
        canonical_device("cuda:2")


@pytest.mark.parametrize("name", ["mps", "xla", "xpu", "privateuseone"])
@pytest.mark.parametrize("make", [te.Linear, te.ops.Linear], ids=["module", "operation"])
def test_a_device_that_torch_lacks_is_named(make, name):
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ImportError):
        with pytest.raises(
            ValueError, match=f"device='{name}': this installation of torch has no such device"
        ):
            make(32, 32, device=name)


def test_the_compiler_does_not_trace_the_device_count_query(monkeypatch):
    """It cannot trace torch's query on a machine with CUDA devices; here a file access stands for it."""
    device._device_count.cache_clear()
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(os.listdir(os.sep)))

    def allocated(x: torch.Tensor) -> torch.Tensor:
        canonical_device(torch.device("cuda", 0))
        return x + 1

    try:
        y = torch.compile(allocated, fullgraph=True, backend="eager")(torch.ones(2))
    finally:
        device._device_count.cache_clear()
    assert torch.equal(y, torch.full((2,), 2.0))
