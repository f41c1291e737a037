"""Quantized module parameters: optimizers, checkpoints, conversions, distributed bookkeeping."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.tensor.quantizer_cases import (
    DETERMINISTIC,
    NAMES,
    create_quantizer,
    payload,
    same_payload,
    values,
)
from transformer_engine.pytorch.tensor import QuantizedTensor


class Layer(nn.Module):
    def __init__(self, name, device, shape=(32, 64)):
        super().__init__()
        self.weight = nn.Parameter(create_quantizer(name, device)(values(device, *shape)))
        self.bias = nn.Parameter(torch.zeros(shape[0], dtype=torch.bfloat16, device=device))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_is_a_quantized_tensor_with_a_gradient(name, device):
    layer = Layer(name, device)
    assert isinstance(layer.weight, nn.Parameter) and isinstance(layer.weight, QuantizedTensor)
    assert isinstance(layer.weight.data, QuantizedTensor)
    assert layer.weight.data._base is None
    layer(values(device, 8, 64)).float().sum().backward()
    assert type(layer.weight.grad) is torch.Tensor and layer.weight.grad.shape == (32, 64)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_sgd_quantizes_the_updated_values(name, device):
    layer = Layer(name, device)
    before = layer.weight.dequantize().detach().clone()
    layer(values(device, 8, 64)).float().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    expected = create_quantizer(name, device)(before.add(layer.weight.grad, alpha=-0.5))
    assert same_payload(layer.weight, expected)


@pytest.mark.parametrize("name", NAMES)
def test_adam_keeps_plain_state(name, device):
    layer = Layer(name, device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    before = layer.weight.dequantize().detach().clone()
    layer(values(device, 8, 64)).float().sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    assert type(state["exp_avg"]) is torch.Tensor and state["exp_avg"].shape == (32, 64)
    assert not torch.equal(layer.weight.dequantize(), before)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_round_trips(name, device):
    layer, other = Layer(name, device), Layer(name, device)
    with torch.no_grad():
        other.weight.zero_()
    state = layer.state_dict()
    assert isinstance(state["weight"], QuantizedTensor)
    other.load_state_dict(state)
    assert same_payload(other.weight, layer.weight)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_high_precision_and_quantized_checkpoints_load_into_each_other(name, device):
    layer = Layer(name, device)
    plain = nn.Linear(64, 32, device=device, dtype=torch.bfloat16)
    expected = create_quantizer(name, device)(plain.weight.detach().clone())
    layer.load_state_dict(plain.state_dict())
    assert same_payload(layer.weight, expected)
    layer = Layer(name, device)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(plain.weight, layer.weight.dequantize())


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_loaded_without_arbitrary_code(name, device):
    q = create_quantizer(name, device)(values(device, 32, 64))
    file = io.BytesIO()
    torch.save({"weight": nn.Parameter(q), "tensor": q}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for twin in loaded.values():
        assert type(twin) is type(q) and same_payload(twin, q)
        assert (twin.shape, twin.dtype) == (q.shape, q.dtype)
    copied = pickle.loads(pickle.dumps(q))
    assert same_payload(copied, q)
    copied.mul_(1)
    assert payload(copied).keys() == payload(q).keys()


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("way", ["pickle", "torch", "weights only"])
def test_a_parameter_comes_back_from_its_pickle_as_the_parameter_it_was(name, trained, way, device):
    layer = Layer(name, device)
    layer.weight.requires_grad_(trained)
    layer.weight.partition_dim = 1
    file = io.BytesIO()
    if way == "pickle":
        weight = pickle.loads(pickle.dumps(layer)).weight
    else:
        torch.save(layer if way == "torch" else {"weight": layer.weight}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=way == "weights only")
        weight = loaded.weight if way == "torch" else loaded["weight"]
    assert isinstance(weight, nn.Parameter) and isinstance(weight, QuantizedTensor)
    assert weight.requires_grad is trained and weight.is_leaf and weight.partition_dim == 1
    assert same_payload(weight, layer.weight)
    if trained:
        weight.dequantize().sum().backward()
        assert torch.equal(weight.grad, torch.ones_like(weight.grad))


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_comes_back_from_its_pickle_without_a_gradient(name, device):
    copied = pickle.loads(pickle.dumps(create_quantizer(name, device)(values(device, 32, 64))))
    assert not copied.requires_grad and not isinstance(copied, nn.Parameter)


def test_a_quantizer_leaves_its_process_group_behind(device):
    quantizer = create_quantizer("current", device)
    quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, lambda: "not picklable"
    assert not pickle.loads(pickle.dumps(quantizer)).with_amax_reduction
    quantizer = create_quantizer("nvfp4", device)
    quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, lambda: "not picklable"
    assert not pickle.loads(pickle.dumps(quantizer)).with_amax_reduction


@pytest.mark.parametrize("name", NAMES)
def test_a_deep_copied_module_trains_alone(name, device):
    layer = Layer(name, device)
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, nn.Parameter) and twin.weight.requires_grad
    before = {field: part.clone() for field, part in payload(layer.weight).items()}
    with torch.no_grad():
        twin.weight.zero_()
    assert all(torch.equal(part, before[field]) for field, part in payload(layer.weight).items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("convert", ["float", "half", "bfloat16"])
def test_converting_a_module_changes_the_nominal_dtype_alone(name, convert, device):
    model = nn.Sequential(Layer(name, device), nn.Linear(32, 8, device=device))
    codes = {field: part.clone() for field, part in payload(model[0].weight).items()}
    model[0].weight.partition_dim = 0
    getattr(model, convert)()
    dtype = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}[convert]
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, QuantizedTensor)
    assert (
        weight.dtype
        == weight.dequantize().dtype
        == model[0].bias.dtype
        == model[1].weight.dtype
        == dtype
    )
    assert weight.partition_dim == 0 and weight.requires_grad
    if name != "identity":
        assert all(torch.equal(part, codes[field]) for field, part in payload(weight).items())


def test_converting_a_plain_module_is_untouched():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    assert model.half() is model
    assert model[0].weight.dtype == torch.float16 and model.count.dtype == torch.int64


@pytest.mark.parametrize("name", NAMES)
def test_moving_a_module_keeps_its_parameters_quantized(name, device):
    layer = Layer(name, torch.device("cpu"))
    layer.weight.partition_dim = 0
    layer.to(device)
    assert layer.weight.partition_dim == 0 and not isinstance(layer.weight.detach(), nn.Parameter)
    assert isinstance(layer.weight, QuantizedTensor) and layer.weight.device.type == device.type
    layer.to(dtype=torch.float32)
    assert layer.weight.dtype == torch.float32 and isinstance(layer.weight, QuantizedTensor)


@pytest.mark.parametrize("name", NAMES)
def test_meta_parameters_allocate_no_memory(name):
    q = create_quantizer(name, torch.device("cpu")).make_empty(
        (32, 64), device="meta", requires_grad=True
    )
    assert q.device.type == "meta" and q.requires_grad
    assert "data=..." in repr(q)
