"""FusedAdam.step_in_backward: parameters are stepped in the backward pass, and their gradients are freed."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from tests.optimizers.test_block_scaled_states import BLOCKS, STOCHASTIC
from transformer_engine.common import recipe
from transformer_engine.pytorch.optimizers import FusedAdam

OPTIONS = {
    "float32": {},
    "masters": {"master_weights": True},
    "remainders": {"master_weights": True, "store_param_remainders": True},
    "block-scaled": BLOCKS,
    "stochastic": STOCHASTIC,
    "FP8": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
}


def make_model(device, dtype, seed=0):
    torch.manual_seed(seed)
    with torch.device(device):
        return torch.nn.Sequential(
            torch.nn.Linear(96, 200), torch.nn.GELU(), torch.nn.Linear(200, 96, bias=False)
        ).to(dtype)


def loss_of(model, seed):
    parameter = next(model.parameters())
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(seed))
    return model(x.to(parameter.device, parameter.dtype)).square().mean()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("capturable", [False, True])
def test_parameters_have_the_bits_of_steps_after_the_backward_pass(options, capturable, device):
    if capturable and ("remainders" in str(options) or options == OPTIONS["FP8"]):
        options = {}
    models = [make_model(device, torch.bfloat16) for _ in range(2)]
    usual, fused = (
        FusedAdam(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 1e-3},
            ],
            lr=1e-2,
            capturable=capturable,
            **options,
        )
        for model in models
    )
    for step in range(4):
        loss_of(models[0], step).backward()
        usual.step()
        usual.zero_grad()
        with fused.step_in_backward():
            loss_of(models[1], step).backward()
        assert all(p.grad is None for p in models[1].parameters())
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    assert [int(group["step"]) for group in fused.param_groups] == [4, 4]


def test_gradients_never_exist_together(device):
    model = make_model(device, torch.float32)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    most = 0

    def count(_):
        nonlocal most
        most = max(most, sum(p.grad is not None for p in model.parameters()))

    with optimizer.step_in_backward():
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(count)
        loss_of(model, 0).backward()
    assert most == 0  # the optimizer's hook runs first


def test_gradients_of_earlier_backward_passes_are_added(device):
    models = [make_model(device, torch.float32) for _ in range(2)]
    usual, fused = (FusedAdam(model.parameters(), lr=1e-2) for model in models)
    for seed in (0, 1):
        loss_of(models[0], seed).backward()
    usual.step()
    loss_of(models[1], 0).backward()
    with fused.step_in_backward():
        loss_of(models[1], 1).backward()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_parameters_without_gradient_are_unchanged_and_both_kinds_of_steps_alternate(device):
    models = [make_model(device, torch.float32) for _ in range(2)]
    usual, fused = (FusedAdam(model.parameters(), lr=1e-2) for model in models)
    for step in range(4):
        for model in models:
            model[0].requires_grad_(step % 2 == 0)
        loss_of(models[0], step).backward()
        usual.step()
        usual.zero_grad()
        if step == 2:
            loss_of(models[1], step).backward()
            fused.step()
            fused.zero_grad()
            continue
        with fused.step_in_backward():
            loss_of(models[1], step).backward()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_gradient_after_the_backward_pass_is_stepped_at_the_end(device):
    p = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = FusedAdam([p], lr=0.1)
    with optimizer.step_in_backward():
        p.grad = torch.ones_like(p)
    torch.testing.assert_close(p.detach(), torch.full_like(p, 0.9))
    assert p.grad is None


def test_a_second_backward_pass_is_an_error(device):
    model = make_model(device, torch.float32)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    with (
        pytest.raises(RuntimeError, match="second gradient in one step_in_backward"),
        optimizer.step_in_backward(),
    ):
        loss_of(model, 0).backward()
        loss_of(model, 1).backward()
    loss_of(model, 0).backward()  # no hook is left
    assert all(p.grad is not None for p in model.parameters())


def test_decoupled_gradients_are_an_error(device):
    optimizer = FusedAdam(make_model(device, torch.float32).parameters(), use_decoupled_grad=True)
    with pytest.raises(RuntimeError, match="use_decoupled_grad=True"), optimizer.step_in_backward():
        pass


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_layers_train_as_with_steps_after_the_backward_pass(checkpointed, quantized, device):
    scaling = recipe.Float8CurrentScaling()

    def train(in_backward):
        torch.manual_seed(0)
        with te.quantized_model_init(enabled=quantized, recipe=scaling):
            layers = torch.nn.ModuleList(
                te.LayerNormMLP(64, 128, params_dtype=torch.bfloat16, device=device)
                for _ in range(2)
            )
        optimizer = FusedAdam(layers.parameters(), lr=1e-2, master_weights=quantized, **STOCHASTIC)
        losses = []
        for step in range(3):
            y = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(
                device, torch.bfloat16
            )
            with te.autocast(recipe=scaling):
                for layer in layers:
                    y = te.checkpoint(layer, y, use_reentrant=False) if checkpointed else layer(y)
            loss = (y.float() - 1.0).square().mean()
            losses.append(loss.item())
            if in_backward:
                with optimizer.step_in_backward():
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return losses

    losses = train(True)
    assert losses == train(False)
    assert losses[-1] < losses[0]
