"""Payloads through save_for_backward: taken apart, put together, nothing lost and nothing kept alive."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.tensor.quantizer_cases import NAMES, create_quantizer, same_payload, values
from transformer_engine.pytorch import quantized_tensor as alias
from transformer_engine.pytorch.tensor import (
    QuantizedTensor,
    get_storage,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)


@pytest.mark.parametrize("name", NAMES)
def test_flatten_and_rebuild_round_trip(name, device):
    storage = create_quantizer(name, device).encode(values(device, 2, 32, 64), True, True)
    tensors, rebuild = storage.flatten()
    twin = rebuild(tensors)
    assert twin is not storage and type(twin) is type(storage)
    assert (
        same_payload(twin, storage) and twin.dtype == storage.dtype and twin.shape == storage.shape
    )
    assert hash(rebuild.storage_class) == hash(type(storage))


@pytest.mark.parametrize("name", NAMES)
def test_storages_are_emptied_and_filled_again(name, device):
    x = values(device, 32, 64)
    storage = create_quantizer(name, device).encode(x, True, True)
    expected = storage.dequantize().clone()
    plain = torch.ones(3, device=device)
    flat, objects = prepare_for_saving(plain, storage, None)
    assert all(tensor is None or type(tensor) is torch.Tensor for tensor in flat)
    with pytest.raises(RuntimeError, match="restore_from_saved"):
        _ = storage.device
    restored, rest = restore_from_saved(objects, [*flat, plain], return_saved_tensors=True)
    assert (
        restored[0] is plain and restored[1] is storage and restored[2] is None and rest == [plain]
    )
    assert torch.equal(storage.dequantize(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_parameter_keeps_its_payload(name, device):
    q = torch.nn.Parameter(create_quantizer(name, device)(values(device, 32, 64)))
    flat, objects = prepare_for_saving(q)
    assert torch.equal(q.dequantize(), q.dequantize())
    (restored,) = restore_from_saved(objects, flat)
    assert not isinstance(restored, torch.Tensor)
    assert same_payload(restored, q)


def test_a_context_gives_its_objects_back_once(device):
    storage = create_quantizer("mxfp8", device).encode(values(device, 32, 64), True, True)
    flat, objects = prepare_for_saving(storage)
    ctx = SimpleNamespace(saved_tensors=flat, tensor_objects=objects)
    assert restore_from_func_ctx(ctx) == [storage]
    with pytest.raises(AttributeError, match="tensor_objects"):
        restore_from_func_ctx(ctx)


def test_a_tensor_and_its_storage_share_a_payload(device):
    q = create_quantizer("mxfp8", device)(values(device, 32, 64))
    storage = get_storage(q)
    assert q.as_storage()._rowwise_data is storage._rowwise_data is q._rowwise_data
    assert storage.as_storage() is storage


def test_the_alias_module_has_the_same_objects():
    assert alias.QuantizedTensor is QuantizedTensor
    assert alias.prepare_for_saving is prepare_for_saving
