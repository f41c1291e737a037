"""reset_parameters() fills every parameter again in every call and on any copy."""

from __future__ import annotations

import copy

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.distributed.tensor_parallel import (
    set_tensor_model_parallel_attributes,
)
from transformer_engine.pytorch.quantization import autocast, quantized_model_init
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor

KINDS = {
    "linear": lambda **o: te.Linear(64, 128, **o),
    "row": lambda **o: te.Linear(64, 128, parallel_mode="row", tp_size=2, **o),
    "column": lambda **o: te.Linear(
        64, 128, parallel_mode="column", tp_size=2, sequence_parallel=True, **o
    ),
    "layernorm_linear": lambda **o: te.LayerNormLinear(
        64, 128, parallel_mode="column", tp_size=2, **o
    ),
    "layernorm_mlp": lambda **o: te.LayerNormMLP(64, 128, set_parallel_mode=True, tp_size=2, **o),
    "grouped_linear": lambda **o: te.GroupedLinear(
        2, 64, 128, parallel_mode="column", tp_size=2, **o
    ),
    "layernorm": lambda **o: te.LayerNorm(64, **o),
    "rmsnorm": lambda **o: te.RMSNorm(64, zero_centered_gamma=True, sequence_parallel=True, **o),
}
PLACES = ("partition_dim", "partition_stride", "sequence_parallel", "tensor_model_parallel")


def marks(layer):
    return {
        name: {k: vars(p)[k] for k in PLACES if k in vars(p)}
        for name, p in layer.named_parameters()
    }


def values(layer):
    return {name: p.detach().float().clone() for name, p in layer.named_parameters()}


def reset(layer):
    torch.manual_seed(7)
    layer.reset_parameters()
    return values(layer)


def spoil(layer):
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.full(p.shape, 3.0, device=p.device))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_resetting_works_again_and_on_a_copy(kind, recipe, device):
    torch.manual_seed(7)
    with quantized_model_init(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        layer = KINDS[kind](device=device)
    first, marked = values(layer), marks(layer)
    contents = list(layer.parameters())
    for repeated in (layer, copy.deepcopy(layer)):
        repeated.requires_grad_(False).requires_grad_(True)
        spoil(repeated)
        assert equal(reset(repeated), first)
        assert marks(repeated) == marked
        assert all(p.requires_grad for p in repeated.parameters())
    assert all(a is b for a, b in zip(contents, layer.parameters(), strict=True)), (
        "optimizers hold them"
    )


@pytest.mark.parametrize("recipe", ["none", "current", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_resetting_works_from_the_meta_device_and_again(kind, recipe, device):
    with quantized_model_init(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        layer, plain = KINDS[kind](device="meta"), KINDS[kind](device=device)
    first = reset(layer)
    assert not any(p.is_meta for p in layer.parameters())
    assert marks(layer) == marks(plain)
    spoil(layer)
    assert equal(reset(layer), first)
    kinds = {n: isinstance(p, QuantizedTensor) for n, p in layer.named_parameters()}
    assert kinds == {n: isinstance(p, QuantizedTensor) for n, p in plain.named_parameters()}


def test_a_reset_layer_trains_on_with_its_optimizers_parameters(device):
    with quantized_model_init(recipe=RECIPES["current"]):
        layer = te.Linear(64, 128, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer.reset_parameters()
    before = values(layer)
    with autocast(recipe=RECIPES["current"]):
        layer(torch.randn(32, 64, device=device)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(values(layer)["weight"], before["weight"])


def test_preserved_initial_values_come_from_the_last_reset(device):
    with quantized_model_init(recipe=RECIPES["current"], preserve_high_precision_init_val=True):
        layer = te.Linear(64, 128, device=device)
    old = layer.weight.get_high_precision_init_val()
    layer.reset_parameters()
    new = layer.weight.get_high_precision_init_val()
    assert not torch.equal(old, new)
    assert float((layer.weight.detach().dequantize().cpu() - new).norm()) < 0.05 * float(new.norm())


def test_resetting_zeroes_a_learnable_sink(device):
    layer = DotProductAttention(2, 32, softmax_type="learnable").to(device)
    torch.nn.init.ones_(layer.softmax_offset)
    layer.reset_parameters()
    copy.deepcopy(layer).reset_parameters()
    assert torch.equal(layer.softmax_offset, torch.zeros_like(layer.softmax_offset))


def test_contradicting_tensor_parallel_attributes_raise_and_change_nothing():
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
    set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
    with pytest.raises(
        ValueError, match="partition_dim=0 already, which partition_dim=1 contradicts"
    ):
        set_tensor_model_parallel_attributes(weight, True, 1, 1)
    assert (weight.tensor_model_parallel, weight.partition_dim) == (True, 0)
