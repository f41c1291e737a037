"""A module reuses cached specs from earlier calls only while all their inputs are unchanged."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES
from transformer_engine.common.memory import Memory
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.distributed import checkpoint
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.specs import build_from_key

LAYERS = {
    "linear": lambda **o: Linear(32, 64, **o),
    "layernorm_linear": lambda **o: LayerNormLinear(32, 64, **o),
    "layernorm_mlp": lambda **o: LayerNormMLP(32, 64, **o),
}


@pytest.fixture(params=LAYERS)
def layer(request, device):
    torch.manual_seed(0)
    return LAYERS[request.param](device=device)


built = []


def build_and_record(build, key):
    built.append(build_from_key(build, key))
    return built[-1]


@pytest.fixture
def builds(layer):
    """The specs that the layer had to build."""
    built.clear()
    layer._specs = Memory(build_and_record, layer._specs.most, type(layer).build)
    return built


def tokens(device, rows=16, **options):
    return torch.randn(rows, 32, device=device, **options)


def test_equal_calls_share_a_spec(layer, builds, device):
    for _ in range(3):
        layer(tokens(device))
    assert len(builds) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, x: layer(torch.cat((x, x))),
        lambda layer, x: layer(x.requires_grad_()),
        lambda layer, x: layer(x, is_first_microbatch=False),
        lambda layer, x: layer.bfloat16()(x.bfloat16()),
    ],
    ids=["rows", "gradient", "microbatch", "dtype"],
)
def test_a_different_call_signature_gets_another_spec(layer, builds, device, change):
    layer(tokens(device))
    change(layer, tokens(device))
    assert len(builds) == 2


def test_recipe_gradient_mode_and_torch_autocast_select_the_spec(layer, builds, device):
    x = tokens(device)
    layer(x)
    with torch.no_grad():
        layer(x)
    with torch.autocast(x.device.type, torch.bfloat16):
        layer(x)
    for name in ("current", "block"):
        with te.autocast(recipe=RECIPES[name]):
            layer(x)
    assert len(builds) == 5


def test_freezing_a_parameter_selects_another_spec(layer, builds, device):
    x = tokens(device)
    layer(x)
    next(iter(layer.parameters())).requires_grad_(False)
    layer(x)
    assert len(builds) == 2


def test_functional_call_parameters_are_not_cached(layer, device):
    """torch.func.functional_call passes new parameters in each call; caching them would accumulate memory."""
    records = []
    for _ in range(3):
        values = {name: p.detach().clone() for name, p in layer.named_parameters()}
        records += [weakref.ref(value) for value in values.values()]
        torch.func.functional_call(layer, values, tokens(device))
        del values
    gc.collect()
    assert not any(ref() is not None for ref in records)


def test_gradients_accumulate_into_their_calls_parameter(device):
    layer = Linear(32, 64, bias=False, fuse_wgrad_accumulation=True, device=device)
    buffers = []
    for _ in range(2):
        layer.weight = torch.nn.Parameter(torch.randn(64, 32, device=device))
        layer.weight.main_grad = torch.zeros(64, 32, device=device)
        layer(tokens(device)).sum().backward()
        buffers.append(layer.weight.main_grad)
    assert all(float(buffer.abs().sum()) > 0 for buffer in buffers)


def test_a_cached_call_still_checks_dtypes(layer, device):
    layer(tokens(device))
    with pytest.raises(TypeError, match=r"torch\.autocast"):
        layer(tokens(device, dtype=torch.bfloat16))


def test_every_step_updates_delayed_scaling_scales(layer, device):
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
    for step in range(1, 5):
        x = step * tokens(device).requires_grad_()
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.sum().backward()
        backward = layer.fp8_meta["scaling_bwd"]
        assert float(backward.amax_history[0].abs().sum()) == 0.0, (
            "the backward's update cleared the running row"
        )
        assert float(backward.amax_history[-1].abs().sum()) > 0.0


def test_copies_and_pickles_start_with_an_empty_cache(layer, device):
    layer(tokens(device))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not twin._specs
        x = tokens(device)
        assert torch.equal(twin(x), layer(x))


def test_recomputation_repeats_the_forward(layer, device):
    recipe = DelayedScaling()
    x = tokens(device).requires_grad_()
    grads = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(1)
        twin = x.detach().clone().requires_grad_()
        layer.fp8_meta.pop("scaling_fwd", None), layer.fp8_meta.pop("scaling_bwd", None)
        with te.autocast(recipe=recipe):
            y = run(twin)
        y.sum().backward()
        grads.append(twin.grad)
    assert torch.equal(*grads)


def test_the_spec_cache_is_bounded(layer, monkeypatch, device):
    monkeypatch.setattr(layer._specs, "most", 3)
    for rows in range(1, 9):
        layer(tokens(device, rows))
    assert len(layer._specs) <= 3
