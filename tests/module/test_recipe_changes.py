"""A new recipe or new weights replace a module's states, continue them, or raise and leave them unchanged."""

from __future__ import annotations

import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.quantization import ExtraStateError, decode_extra_state

WIDTH = 32


def tokens(device, dtype=torch.float32):
    return torch.randn(16, WIDTH, device=device, dtype=dtype)


def train(layer: nn.Module, device, recipe) -> nn.Module:
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = layer(tokens(device))
        y.square().sum().backward()
    return layer


# A state that does not fit.


def extra(recipe=None, **changes) -> torch.Tensor:
    """Extra state of a Linear with some entries replaced."""
    state = {
        "recipe": recipe or DelayedScaling(amax_history_len=2, margin=3),
        "scale_fwd": torch.full((3,), 5.0),
        "amax_history_fwd": torch.full((2, 3), 6.0),
        "scale_bwd": torch.full((2,), 7.0),
        "amax_history_bwd": torch.full((2, 2), 8.0),
        "extra_fp8_variables": {"fp8_max_fwd": 1.0},
        **changes,
    }
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


MISFITS = {
    "another number of quantizers": ({"scale_fwd": torch.ones(6)}, "6"),
    "a scale with two dimensions": ({"scale_bwd": torch.ones(2, 2)}, "quantizers"),
    "a scale with none": ({"scale_fwd": torch.tensor(1.0)}, "quantizers"),
    "a history with one dimension": ({"amax_history_fwd": torch.ones(3)}, "history length"),
    "a history with three": ({"amax_history_fwd": torch.ones(2, 2, 3)}, "history length"),
    "a history of another width": ({"amax_history_bwd": torch.ones(2, 5)}, "5"),
    "a history without rows": ({"amax_history_bwd": torch.ones(0, 2)}, "row"),
    "a scale of integers": ({"scale_fwd": torch.ones(3, dtype=torch.int64)}, "int64"),
    "a history of truth values": ({"amax_history_fwd": torch.ones(2, 3, dtype=torch.bool)}, "bool"),
    "a scale that is a list": ({"scale_fwd": [1.0, 1.0, 1.0]}, "list"),
    "a recipe that is a dict": ({"recipe": {"margin": 0}}, "dict"),
    "variables that are a list": ({"extra_fp8_variables": [1]}, "dict"),
}


def contents(layer):
    """Decoded checkpoint contents, because the raw bytes differ from one pickling to the next."""
    return decode_extra_state(layer.get_extra_state()) or {}


def assert_equal(result, saved):
    assert result.keys() == saved.keys()
    for name, value in saved.items():
        same = (
            torch.equal(result[name], value)
            if isinstance(value, torch.Tensor)
            else result[name] == value
        )
        assert same, name


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize(
    "before", [None, DelayedScaling(amax_history_len=4), Float8CurrentScaling()]
)
def test_a_mismatched_state_raises_and_changes_nothing(misfit, before, device):
    layer = te.Linear(WIDTH, WIDTH, device=device)
    if before is not None:
        train(layer, device, before)
    changes, names = MISFITS[misfit]
    quantizers = dict(layer.quantizers)
    states = {key: layer.fp8_meta.get(key) for key in ("scaling_fwd", "scaling_bwd")}
    meta, saved = dict(layer.fp8_meta), contents(layer)
    with pytest.raises(ExtraStateError, match=names):
        layer.set_extra_state(extra(**changes))
    assert {key: layer.fp8_meta.get(key) for key in states} == states
    assert dict(layer.fp8_meta) == meta
    assert layer.quantizers == quantizers
    assert_equal(contents(layer), saved)


def test_a_state_that_does_not_match_quantized_parameters_is_dropped_with_a_warning(device):
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        layer = te.Linear(WIDTH, WIDTH, device=device)
    quantizers, meta = dict(layer.quantizers), dict(layer.fp8_meta)
    with pytest.warns(UserWarning, match="saved under DelayedScaling and is not loaded"):
        layer.set_extra_state(extra())
    assert layer.quantizers == quantizers
    assert dict(layer.fp8_meta) == meta


def test_a_matching_state_is_loaded(device):
    layer = te.Linear(WIDTH, WIDTH, device=device)
    layer.set_extra_state(extra())
    assert layer.fp8_meta["recipe"].margin == 3
    assert layer.fp8_meta["scaling_fwd"].scale.tolist() == [5.0] * 3
    assert layer.fp8_meta["scaling_bwd"].amax_history.tolist() == [[8.0] * 2] * 2


# Cached weights.


@pytest.mark.parametrize(
    "make",
    [
        lambda device: te.Linear(WIDTH, WIDTH, device=device),
        lambda device: te.LayerNormLinear(WIDTH, WIDTH, device=device),
        lambda device: te.LayerNormMLP(WIDTH, 64, device=device),
        lambda device: te.GroupedLinear(1, WIDTH, WIDTH, device=device),
    ],
    ids=["linear", "layernorm_linear", "layernorm_mlp", "grouped"],
)
@pytest.mark.parametrize("full", [True, False], ids=["in a model", "alone"])
def test_loaded_weights_are_used_by_the_next_microbatch(make, full, device):
    layer, source, x = make(device), make(device), tokens(device)
    more = ([16],) if isinstance(layer, te.GroupedLinear) else ()
    recipe = Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        layer(x, *more, is_first_microbatch=True)
        expected = source(x, *more)
    saved = io.BytesIO()
    torch.save(source.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=False)
    if full:
        model = nn.Sequential(layer)
        model.load_state_dict({f"0.{name}": value for name, value in state.items()})
    else:
        layer.load_state_dict(state)
    with te.autocast(recipe=recipe):
        assert torch.equal(layer(x, *more, is_first_microbatch=False), expected)


# Another recipe family.


def test_another_quantizer_type_warns_and_replaces_the_states(device):
    layer = train(
        te.Linear(WIDTH, WIDTH, device=device), device, DelayedScaling(amax_history_len=2)
    )
    with pytest.warns(UserWarning, match="from DelayedScaling to Float8CurrentScaling"):
        train(layer, device, Float8CurrentScaling())
    with pytest.warns(UserWarning, match="from Float8CurrentScaling to Float8BlockScaling"):
        train(layer, device, Float8BlockScaling())
    fresh = te.Linear(WIDTH, WIDTH, device=device)
    fresh.load_state_dict(layer.state_dict())
    x = tokens(device)
    with te.autocast(recipe=Float8BlockScaling()):
        assert torch.equal(layer(x), fresh(x))


def test_another_option_of_the_same_recipe_continues_without_a_warning(device):
    layer = train(
        te.Linear(WIDTH, WIDTH, device=device), device, DelayedScaling(amax_history_len=2)
    )
    scale = layer.fp8_meta["scaling_fwd"].scale.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
            layer(tokens(device))
            assert torch.equal(layer.fp8_meta["scaling_fwd"].scale, scale)


def _attend(module, device, recipe):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(5)
    qkv = [
        torch.randn(2, 64, 2, WIDTH, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    ]
    with te.autocast(recipe=recipe):
        y = module(*qkv)
    y.square().sum().backward()
    return y.float(), qkv[0].grad.float()


@pytest.mark.parametrize("quantized_model", [False, True])
@pytest.mark.parametrize("linear", [Float8CurrentScaling, DelayedScaling])
def test_attention_alternates_between_its_recipe_and_the_layers_recipe(
    linear, quantized_model, device, monkeypatch
):
    monkeypatch.setenv("TE_EMULATE", "1")
    with te.quantized_model_init(enabled=quantized_model, recipe=linear()):
        module = te.DotProductAttention(2, WIDTH, qkv_format="bshd", attn_mask_type="no_mask")
    exact, exact_grad = _attend(module, device, None if linear is None else linear())
    other = "DelayedScaling" if linear is Float8CurrentScaling else "Float8CurrentScaling"
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE_DPA", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(6):
            if turn % 2:
                monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", other)
            else:
                monkeypatch.delenv("NVTE_DPA_FP8_RECIPE", raising=False)
            for _ in range(2):  # so that delayed scales have settled
                y, grad = _attend(module, device, linear(fp8_dpa=True))
            assert 0 < float((y - exact).norm() / exact.norm()) < 0.1
            assert float((grad - exact_grad).norm() / exact_grad.norm()) < 0.25
