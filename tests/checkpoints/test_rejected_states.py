"""A state dict with an extra state that is rejected changes nothing in a layer, a stack of operations or a decoder."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import ExtraStateError
from transformer_engine.pytorch.tensor.storage.quantized_tensor_storage import (
    QuantizedTensorStorage,
)

pytestmark = pytest.mark.usefixtures("emulated")
RECIPE = DelayedScaling(amax_history_len=2)


def _operations(device: torch.device) -> torch.nn.Module:
    return te.ops.Sequential(
        te.ops.Linear(32, 32, device=device), te.ops.Linear(32, 32, device=device)
    )


def _layer(device: torch.device) -> torch.nn.Module:
    return te.TransformerLayer(32, 64, 2, fuse_qkv_params=True, device=device)


MODULES: dict[str, Callable[[torch.device], torch.nn.Module]] = {
    "Linear": lambda device: te.Linear(32, 32, device=device),
    "GroupedLinear": lambda device: te.GroupedLinear(2, 32, 32, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(32, 64, device=device),
    "MultiheadAttention": lambda device: te.MultiheadAttention(
        32, 2, fuse_qkv_params=True, device=device
    ),
    "TransformerLayer": _layer,
    "operations": _operations,
    "fused operations": lambda device: te.ops.Linear(32, 32, bias=True, device=device),
}


class _Foreign:
    def __reduce__(self):
        return os.getcwd, ()


def _state(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


DAMAGED = {
    "garbage": torch.frombuffer(bytearray(b"garbage"), dtype=torch.uint8),
    "a foreign name": _state({"recipe": _Foreign()}),
    "another number of scales": _state(
        {
            "recipe": RECIPE,
            "scale_fwd": torch.ones(91),
            "forward": {"recipe": RECIPE, "scale_fwd": torch.ones(91)},
        }
    ),
    "parts of a wrong type": _state({"recipe": RECIPE, "scale_fwd": 3, "forward": 3}),
}


def _plain(value: Any) -> Any:
    """Values that can be compared; the bytes of pickled tensors contain addresses."""
    if isinstance(value, QuantizedTensorStorage):
        value = value.dequantize()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _values(module: torch.nn.Module) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        if name.endswith("_extra_state") and value is not None and value.numel():
            value = pickle.loads(bytes(value.numpy()))
        values[name] = _plain(value)
    return values


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
def test_a_rejected_extra_state_changes_nothing(
    kind: str, damage: str, quantized: bool, device: torch.device
):
    with te.quantized_model_init(enabled=quantized, recipe=RECIPE):
        module, other = MODULES[kind](device), MODULES[kind](device)
    x = torch.randn(16, 32, device=device)
    if kind in ("MultiheadAttention", "TransformerLayer"):
        x = x[:, None]
    with te.autocast(recipe=RECIPE):
        module(x, [8, 8]) if kind == "GroupedLinear" else module(x)
    state = other.state_dict()
    last = [name for name in module.state_dict() if name.endswith("_extra_state")][-1]
    state[last] = DAMAGED[damage]
    before = _values(module)
    with pytest.raises(ExtraStateError):
        module.load_state_dict(state)
    assert _values(module) == before


def test_a_number_of_products_without_scales_allocates_nothing(device: torch.device):
    class HandWritten(te.module.base.TransformerEngineBaseModule):
        pass

    module = HandWritten()
    module.set_extra_state(_state({"recipe": RECIPE, "extra_fp8_variables": {"num_gemms": 10**9}}))
    assert module.num_products == 1
