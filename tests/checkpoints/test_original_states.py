"""Checkpoints of the original's releases, and of libraries without FP8, load strictly and with their scales."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from tests.checkpoints.original_states import (
    RELEASES,
    SLOTS,
    histories,
    save_high_precision_states,
    save_states,
    scales,
    stateless,
)
from transformer_engine.common import recipe as recipes

STATELESS = (
    recipes.Float8CurrentScaling,
    recipes.Float8BlockScaling,
    recipes.MXFP8BlockScaling,
    recipes.NVFP4BlockScaling,
)
EVERY = pytest.mark.parametrize("release", RELEASES)


def layer(device: torch.device) -> te.TransformerLayer:
    return te.TransformerLayer(64, 128, 2, hidden_dropout=0.0, attention_dropout=0.0, device=device)


@EVERY
def test_scales_and_histories_of_a_release_are_those_of_the_next_step(
    release: str, device: torch.device
):
    source, target = layer(device), layer(device)
    target.load_state_dict(save_states(RELEASES[release], source))
    for name, (forward, backward) in SLOTS.items():
        meta = target.get_submodule(name).fp8_meta
        for key, count, seed in (("scaling_fwd", forward, 1), ("scaling_bwd", backward, 2)):
            assert torch.equal(meta[key].scale.cpu(), scales(count, seed))
            assert torch.equal(
                meta[key].amax_history.cpu()[: len(histories(count, seed))], histories(count, seed)
            )
    x = torch.randn(32, 2, 64, device=device)
    with te.autocast(recipe=recipes.DelayedScaling(amax_history_len=16)):
        target(x).sum().backward()


@EVERY
def test_a_release_without_fp8_loads_to_the_same_output(release: str, device: torch.device):
    source, target = layer(device), layer(device)
    target.load_state_dict(save_high_precision_states(RELEASES[release], source))
    x = torch.randn(32, 2, 64, device=device)
    assert torch.equal(target(x), source(x))


@pytest.mark.parametrize("kind", STATELESS)
def test_a_recipe_without_state_leaves_a_module_ready_for_it(kind, device: torch.device):
    linear = te.Linear(64, 64, device=device)
    linear.load_state_dict({**linear.state_dict(), "_extra_state": stateless(kind())})
    assert isinstance(linear.fp8_meta["recipe"], kind)


def test_weights_of_another_library_load_strictly(device: torch.device):
    reference, ours = torch.nn.Linear(32, 16, device=device), te.Linear(32, 16, device=device)
    ours.load_state_dict(reference.state_dict())
    assert torch.equal(ours.weight, reference.weight) and torch.equal(ours.bias, reference.bias)


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "codes"])
@pytest.mark.parametrize(
    "extra", [{}, {"_extra_state": torch.empty(0, dtype=torch.uint8)}], ids=["none", "empty"]
)
def test_weights_without_an_extra_state_find_a_warm_layer_as_a_new_one(
    quantized, extra, device: torch.device
):
    recipe = recipes.DelayedScaling(amax_history_len=4)

    def create() -> te.Linear:
        with te.quantized_model_init(enabled=quantized, recipe=recipe):
            return te.Linear(64, 64, device=device, params_dtype=torch.bfloat16)

    def steps(linear: te.Linear, count: int) -> list[torch.Tensor]:
        results = []
        for step in range(count):
            x = torch.linspace(-3 - step, 2, 64 * 64, device=device, dtype=torch.bfloat16).view(
                64, 64
            )
            x.requires_grad_()
            with te.autocast(recipe=recipe):
                y = linear(x)
            y.sum().backward()
            results += [y.detach(), x.grad]
        return results

    warm, new = create(), create()
    steps(warm, 3)
    weights = {
        name: torch.randn(param.shape, generator=torch.Generator().manual_seed(1)).mul(30).to(param)
        for name, param in te.Linear(
            64, 64, device="cpu", params_dtype=torch.bfloat16
        ).named_parameters()
    }
    for linear in (warm, new):
        linear.load_state_dict({**weights, **extra})
    assert all(torch.equal(a, b) for a, b in zip(steps(warm, 3), steps(new, 3), strict=True))


def test_a_part_without_weights_leaves_scales_unchanged(device: torch.device):
    linear = te.Linear(64, 64, device=device)
    with te.autocast(recipe=recipes.DelayedScaling()):
        for _ in range(2):
            linear(torch.randn(32, 64, device=device)).sum().backward()
    before = [s.scale.clone() for s in linear.numerics.delayed_states("scaling_fwd")]
    assert not torch.equal(before[0], torch.ones_like(before[0]))
    torch.nn.Sequential(linear).load_state_dict({}, strict=False)
    after = [s.scale for s in linear.numerics.delayed_states("scaling_fwd")]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_missing_extra_state_is_an_error_on_request(device: torch.device, monkeypatch):
    monkeypatch.setenv("NVTE_STRICT_EXTRA_STATE", "1")
    with pytest.raises(RuntimeError, match="_extra_state"):
        te.Linear(32, 16, device=device).load_state_dict(torch.nn.Linear(32, 16).state_dict())


def test_a_missing_weight_stays_an_error(device: torch.device):
    with pytest.raises(RuntimeError, match="weight"):
        te.Linear(32, 16, device=device).load_state_dict({"bias": torch.zeros(16)})


@pytest.mark.parametrize("kind", [te.LayerNorm, te.RMSNorm])
def test_the_empty_state_of_a_norm_is_accepted(kind, device: torch.device):
    norm = kind(32, device=device)
    norm.load_state_dict({**norm.state_dict(), "_extra_state": torch.empty(0, dtype=torch.uint8)})
