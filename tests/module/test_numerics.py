"""module.numerics owns a module's quantizers and states; the original's names are writable views."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import HIDDEN, LAYERS, RECIPES, same, sample, step
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer


@pytest.fixture(params=LAYERS)
def layer(request, device):
    torch.manual_seed(0)
    return LAYERS[request.param](device=device)


def run_layer(layer, x, recipe):
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return layer(x).detach()


def test_the_next_call_uses_a_quantizer_written_into_its_slot(layer, device):
    x, recipe = sample(device), RECIPES["current"]
    quantized = run_layer(layer, x, recipe)
    plain = run_layer(layer, x, None)
    for slots in layer.quantizers.values():
        for slot in range(len(slots)):
            slots[slot] = IdentityQuantizer()
    assert not torch.equal(quantized, plain)
    assert torch.equal(run_layer(layer, x, recipe), plain)


def test_the_next_call_uses_a_replaced_quantizer_list(layer, device):
    x, recipe = sample(device), RECIPES["current"]
    run_layer(layer, x, recipe)
    layer.quantizers = {
        key: [IdentityQuantizer() for _ in slots] for key, slots in layer.quantizers.items()
    }
    assert torch.equal(run_layer(layer, x, recipe), run_layer(layer, x, None))
    layer.fp8_meta_tensors_initialized = False
    run_layer(layer, x, recipe)
    assert all(
        isinstance(q, Float8CurrentScalingQuantizer) for q in layer.quantizers["scaling_fwd"]
    )


def test_another_recipe_replaces_a_written_quantizer(layer, device):
    x = sample(device)
    run_layer(layer, x, RECIPES["current"])
    layer.quantizers["scaling_fwd"][0] = IdentityQuantizer()
    run_layer(layer, x, RECIPES["delayed"])
    assert all(isinstance(q, Float8Quantizer) for q in layer.quantizers["scaling_fwd"])


def test_the_next_call_scales_by_a_state_written_into_fp8_meta(device):
    torch.manual_seed(0)
    layer, other = (LAYERS["linear"](device=device) for _ in range(2))
    x, recipe = sample(device), RECIPES["delayed"]
    for module in (layer, other):
        run_layer(module, x, recipe)
    state = other.fp8_meta["scaling_fwd"]
    state.scale.fill_(0.25)
    state.amax_history.zero_()
    layer.fp8_meta["scaling_fwd"] = state
    run_layer(layer, x, recipe)
    assert all(
        q.scale.data_ptr() in (s.data_ptr() for s in state.scale)
        for q in layer.quantizers["scaling_fwd"]
    )


def test_foreign_keys_of_fp8_meta_rebuild_no_state(layer, device):
    x, recipe = sample(device), RECIPES["delayed"]
    run_layer(layer, x, recipe)
    quantizers = list(layer.quantizers["scaling_fwd"])
    layer.fp8_meta["their_own"] = 1
    layer.fp8_meta.update(more=2)
    run_layer(layer, x, recipe)
    assert all(a is b for a, b in zip(quantizers, layer.quantizers["scaling_fwd"], strict=True))
    assert layer.fp8_meta["their_own"] == 1


def test_flags_describe_the_last_call(layer, device):
    x = sample(device)
    assert not (layer.fp8 or layer.fp8_calibration or layer.fp8_initialized)
    run_layer(layer, x, RECIPES["current"])
    assert layer.fp8 and layer.fp8_initialized and not layer.fp8_calibration
    run_layer(layer, x, None)
    assert not layer.fp8
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
        layer(x)
    assert layer.fp8_calibration and not layer.fp8
    layer.fp8 = True
    assert layer.fp8


def test_a_cached_weight_written_by_a_caller_is_used(device):
    torch.manual_seed(0)
    layer, other = (LAYERS["linear"](device=device) for _ in range(2))
    x, recipe = sample(device), RECIPES["current"]
    with te.autocast(recipe=recipe):
        layer(x, is_first_microbatch=True)
        other(x, is_first_microbatch=True)
        layer._fp8_workspaces = dict(other._fp8_workspaces)
        mixed = layer(x, is_first_microbatch=False)
    with torch.no_grad():
        layer.weight.copy_(other.weight)
    assert torch.equal(mixed, run_layer(layer, x, recipe))


def test_replacing_the_weight_by_another_shape_takes_effect(device):
    """A product whose extents the recipe's format does not support runs in high precision."""
    torch.manual_seed(0)
    layer = te.Linear(HIDDEN, 32, bias=False, device=device)
    x = sample(device)
    run_layer(layer, x, RECIPES["current"])
    layer.weight = torch.nn.Parameter(torch.randn(48, HIDDEN, device=device))
    assert run_layer(layer, x, None).shape[-1] == 48


@pytest.mark.parametrize("repeated", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_copy_continues_independently_of_the_original(name, repeated, layer, device):
    x, recipe = sample(device), RECIPES[name]
    for _ in range(2):
        step(layer, x, recipe)
    twin = repeated(layer)
    twin.quantizers["scaling_fwd"][0] = IdentityQuantizer()
    other = repeated(layer)
    assert same(step(layer, x, recipe), step(other, x, recipe))
    assert not isinstance(layer.quantizers["scaling_fwd"][0], IdentityQuantizer)
