"""Quantized parameters: trained by masters under every recipe, saved, loaded, and rejected steps."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import QUANTIZED, RECIPES
from transformer_engine.common.recipe import MXFP8BlockScaling
from transformer_engine.pytorch.optimizers import FusedAdam
from transformer_engine.pytorch.tensor.utils import replace_raw_data

pytestmark = pytest.mark.usefixtures("emulated")

WIDTH, ROWS, STEPS = 64, 32, 12


def create_model(recipe, device, quantized=True, preserve=False):
    torch.manual_seed(5)
    with te.quantized_model_init(
        enabled=quantized, recipe=recipe, preserve_high_precision_init_val=preserve
    ):
        return torch.nn.Sequential(
            te.Linear(WIDTH, 2 * WIDTH, params_dtype=torch.bfloat16, device=device),
            torch.nn.GELU(),
            te.Linear(2 * WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device),
        )


def train(model, optimizer, recipe, device, steps=STEPS):
    """Train towards a fixed target; return the losses."""
    generator = torch.Generator().manual_seed(3)
    x, target = (
        torch.randn(ROWS, WIDTH, generator=generator).to(device, torch.bfloat16) for _ in range(2)
    )
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = (model(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", QUANTIZED)
def test_losses_fall_as_with_parameters_of_bfloat16(name, device):
    recipe = RECIPES[name]
    results = {}
    for quantized in (True, False):
        model = create_model(recipe, device, quantized)
        weight = model[0].weight
        assert isinstance(weight, te.QuantizedTensor) == quantized
        optimizer = FusedAdam(model.parameters(), lr=3e-3, master_weights=True)
        results[quantized] = train(model, optimizer, recipe, device)
    first, last = results[True][0], results[True][-1]
    assert last < 0.85 * first
    # A quantized weight and a weight that is cast at every use have equal values, except for the older scales.
    assert last == pytest.approx(results[False][-1], rel=0.1 if name == "nvfp4" else 0.03)


def test_masters_begin_with_the_values_before_quantization_where_they_were_kept(device):
    model = create_model(RECIPES["current"], device, preserve=True)
    weight = model[0].weight
    initial = weight.get_high_precision_init_val()
    optimizer = FusedAdam(model.parameters(), master_weights=True)
    optimizer.initialize_state(weight)
    assert torch.equal(
        optimizer.state[weight]["master_param"], weight.dequantize(dtype=torch.float32)
    )
    optimizer.set_scaled_state(weight, "master_param", initial.float().to(device))
    weight.clear_high_precision_init_val()
    assert torch.equal(optimizer.master_values(weight).cpu(), initial.float())
    assert weight.get_high_precision_init_val() is None


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_step_writes_the_codes_of_the_masters(name, device):
    recipe = RECIPES[name]
    model = create_model(recipe, device)
    optimizer = FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    train(model, optimizer, recipe, device, steps=2)
    for layer in (model[0], model[2]):
        master = optimizer.master_values(layer.weight)
        repeated = layer.weight.detach().clone()
        repeated.quantize_(master)
        assert torch.equal(layer.weight.dequantize(), repeated.dequantize())


@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8"])
def test_a_loaded_model_and_its_optimizer_resume(name, device, tmp_path):
    recipe = RECIPES[name]
    model = create_model(recipe, device)
    optimizer = FusedAdam(model.parameters(), lr=3e-3, master_weights=True)
    train(model, optimizer, recipe, device, steps=3)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt"
    )
    saved = torch.load(tmp_path / "all.pt", weights_only=False)
    other = create_model(recipe, device)
    resumed = FusedAdam(other.parameters(), lr=1.0, master_weights=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert torch.equal(other[0].weight.dequantize(), model[0].weight.dequantize())
    assert train(other, resumed, recipe, device, steps=3) == pytest.approx(
        train(model, optimizer, recipe, device, steps=3), rel=1e-3
    )


@pytest.mark.parametrize("name", QUANTIZED)
def test_values_of_bfloat16_load_into_codes_and_codes_into_bfloat16(name, device):
    recipe = RECIPES[name]
    plain, quantized = create_model(recipe, device, quantized=False), create_model(recipe, device)
    with torch.no_grad():
        plain[0].weight.mul_(0.5)
    values = {key: value for key, value in plain.state_dict().items() if "extra" not in key}
    quantized.load_state_dict(values, strict=False)
    expected = quantized[0].weight.detach().clone()
    expected.quantize_(plain[0].weight.detach())
    assert torch.equal(quantized[0].weight.dequantize(), expected.dequantize())
    codes = {key: value for key, value in quantized.state_dict().items() if "extra" not in key}
    plain.load_state_dict(codes, strict=False)
    assert torch.equal(plain[0].weight.detach(), quantized[0].weight.dequantize())


def test_codes_moved_to_another_buffer_are_trained(device):
    recipe = RECIPES["current"]
    model = create_model(recipe, device)
    weight = model[0].weight
    buffer = torch.empty_like(weight._data)
    replace_raw_data(weight, buffer)
    before = buffer.clone()
    train(
        model, FusedAdam(model.parameters(), lr=1e-2, master_weights=True), recipe, device, steps=1
    )
    assert weight._data is buffer and not torch.equal(buffer, before)


def test_without_masters_codes_of_delayed_scaling_step_and_others_are_rejected(device):
    recipe = RECIPES["delayed"]
    model = create_model(recipe, device)
    losses = train(model, FusedAdam(model.parameters(), lr=1e-2), recipe, device)
    assert losses[-1] < losses[0]
    recipe = MXFP8BlockScaling()
    model = create_model(recipe, device)
    before = model[0].bias.detach().clone()
    with pytest.raises(RuntimeError, match=r"use FusedAdam\(master_weights=True\)"):
        train(model, FusedAdam(model.parameters()), recipe, device, steps=1)
    assert torch.equal(model[0].bias.detach(), before)
    optimizer = FusedAdam(create_model(RECIPES["delayed"], device).parameters(), capturable=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="with master_weights=True only; set it"):
        optimizer.step()


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_capturable_steps_train_quantized_parameters_and_skip_overflows(name, device):
    recipe = RECIPES[name]
    losses = []
    for capturable in (True, False):
        model = create_model(recipe, device)
        optimizer = FusedAdam(
            model.parameters(), lr=3e-3, master_weights=True, capturable=capturable
        )
        losses.append(train(model, optimizer, recipe, device, steps=4))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    model = create_model(recipe, device)
    optimizer = FusedAdam(model.parameters(), lr=3e-3, master_weights=True, capturable=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    train(model, optimizer, recipe, device, steps=1)
    before = [parts(weight) for weight in model.parameters()]
    for overflows in (True, False):
        for parameter in model.parameters():
            value = float("inf") if overflows else 4.0
            parameter.grad = torch.full(parameter.shape, value, device=device, dtype=torch.bfloat16)
        scaler.scale(torch.ones((), device=device))
        optimizer.step(grad_scaler=scaler)
        scaler.update()
        after = [parts(weight) for weight in model.parameters()]
        for (name, _), old, new in zip(model.named_parameters(), before, after, strict=True):
            same = [torch.equal(a, b) for a, b in zip(old, new, strict=True)]
            assert all(same) if overflows else not all(same), name


def parts(parameter):
    """A parameter's codes and scales as bytes."""
    if not isinstance(parameter, te.QuantizedTensor):
        return [parameter.detach().clone().view(torch.uint8)]
    return [
        p.clone().view(torch.uint8) for p in parameter.as_storage().flatten()[0] if p is not None
    ]
