"""FusedAdam.step_in_backward: parameters are stepped in the backward pass, and their gradients are freed."""

from __future__ import annotations

import warnings

import pytest
import torch

import transformer_engine.pytorch as te
from tests.optimizers.test_block_scaled_states import BLOCKS, STOCHASTIC
from transformer_engine.common import recipe
from transformer_engine.common.warning import forget_issued
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


def is_unchanged(model, before):
    return all(map(torch.equal, model.parameters(), before))


def copies(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("shared", [False, True])
def test_a_nested_context_is_an_error_before_any_change(shared, device):
    model = make_model(device, torch.float32)
    outer = FusedAdam(model.parameters(), lr=1e-2)
    inner = FusedAdam(model.parameters(), lr=1e-2) if shared else outer
    before = copies(model)
    with (
        pytest.raises(RuntimeError, match=r"stepped by another step_in_backward\(\) already"),
        outer.step_in_backward(),
        inner.step_in_backward(),
    ):
        loss_of(model, 0).backward()
    assert is_unchanged(model, before)
    assert "step" not in outer.param_groups[0] and "step" not in inner.param_groups[0]
    with outer.step_in_backward():
        loss_of(model, 0).backward()
    assert outer.param_groups[0]["step"] == 1 and not is_unchanged(model, before)


def test_main_grad_is_an_error_before_any_change(device):
    layers = torch.nn.Sequential(
        te.Linear(64, 64, fuse_wgrad_accumulation=True, device=device),
        te.Linear(64, 64, device=device),
    )
    layers[0].weight.main_grad = torch.zeros(64, 64, device=device)
    optimizer, before = FusedAdam(layers.parameters(), lr=1e-2), copies(layers)
    with pytest.raises(RuntimeError, match="has main_grad"), optimizer.step_in_backward():
        layers(torch.ones(32, 64, device=device)).sum().backward()
    assert is_unchanged(layers, before) and "step" not in optimizer.param_groups[0]


def test_a_gradient_that_another_hook_has_freed_is_an_error(device):
    p = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = FusedAdam([p], lr=0.1)
    p.register_post_accumulate_grad_hook(lambda q: setattr(q, "grad", None))
    with (
        pytest.raises(RuntimeError, match=r"no \.grad after its accumulation"),
        optimizer.step_in_backward(),
    ):
        p.sum().backward()
    assert "step" not in optimizer.param_groups[0]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("earlier_steps", [0, 2])
def test_an_exception_before_the_first_gradient_counts_no_step(capturable, earlier_steps, device):
    models = [make_model(device, torch.float32) for _ in range(2)]
    usual, fused = (FusedAdam(m.parameters(), lr=1e-2, capturable=capturable) for m in models)
    for seed in range(earlier_steps + 1):
        if seed == earlier_steps:
            with pytest.raises(KeyError), fused.step_in_backward():
                raise KeyError
            assert int(fused.param_groups[0].get("step", 0)) == earlier_steps
        for model, optimizer in zip(models, (usual, fused), strict=True):
            with optimizer.step_in_backward():
                loss_of(model, seed).backward()
    assert is_unchanged(models[0], models[1].parameters())
    assert int(fused.param_groups[0]["step"]) == earlier_steps + 1


@pytest.mark.parametrize("remedy", ["zero_grad", "load_state_dict"])
def test_a_retry_of_a_partial_step_is_an_error_until_the_batch_is_skipped(remedy, device):
    model = make_model(device, torch.float32)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    before, saved = copies(model), optimizer.state_dict()

    def fail(_):
        raise MemoryError

    handle = model[0].weight.register_hook(fail)
    with pytest.raises(MemoryError), optimizer.step_in_backward():
        loss_of(model, 0).backward()
    handle.remove()
    assert torch.equal(model[0].weight, before[0]) and not torch.equal(model[2].weight, before[2])
    assert optimizer.param_groups[0]["step"] == 1
    partial = copies(model)
    match = r"MemoryError ended step_in_backward\(\) after [12] of 3 parameters"
    with pytest.raises(RuntimeError, match=match), optimizer.step_in_backward():
        loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()
    assert is_unchanged(model, partial) and optimizer.param_groups[0]["step"] == 1
    if remedy == "zero_grad":
        optimizer.zero_grad()
    else:
        optimizer.load_state_dict(saved)
    with optimizer.step_in_backward():
        loss_of(model, 0).backward()
    assert optimizer.param_groups[0]["step"] == (2 if remedy == "zero_grad" else 1)


def test_the_context_is_one_step_for_schedulers_and_hooks(device):
    model = make_model(device, torch.float32)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append(("pre", args, kwargs)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(("post", args, kwargs)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.step_in_backward():
            loss_of(model, 0).backward()
            assert len(calls) == 1
        scheduler.step()
    assert calls == [("pre", (optimizer,), {}), ("post", (optimizer,), {})]
    with pytest.raises(KeyError), optimizer.step_in_backward():
        raise KeyError
    assert [call[0] for call in calls] == ["pre", "post", "pre"]


@pytest.mark.parametrize("capturable", [False, True])
def test_a_scaler_step_after_the_context_is_an_error(capturable, device):
    model = make_model(device, torch.float32)
    optimizer = FusedAdam(model.parameters(), lr=1e-2, capturable=capturable)
    scaler = torch.amp.GradScaler(torch.device(device).type)
    with optimizer.step_in_backward():
        scaler.scale(loss_of(model, 0)).backward()
    if capturable:
        with pytest.raises(RuntimeError, match=r"step_in_backward\(\) has freed them"):
            scaler.step(optimizer)
    else:  # torch's own check
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(optimizer)


@pytest.fixture
def process_group(request):
    """A process group without communication, whose number of ranks is the fixture's parameter."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist = torch.distributed
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def own_group():
    """A process group of this process only, which reduces gradients."""
    dist = torch.distributed
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.usefixtures("own_group")
def test_distributed_data_parallel_is_an_error(as_views, device):
    model = make_model(device, torch.float32)
    replica = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_views)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    loss = replica(torch.ones(8, 96, device=device)).square().mean()
    with (
        pytest.raises(RuntimeError, match="do not use it with DistributedDataParallel"),
        optimizer.step_in_backward(),
    ):
        loss.backward()


@pytest.mark.parametrize("process_group", [1, 2], indirect=True)
@pytest.mark.usefixtures("process_group")
def test_parameters_that_no_group_shards_are_warned_of_once(device):
    model = make_model(device, torch.float32)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    forget_issued()
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        for seed in range(2):
            with optimizer.step_in_backward():
                loss_of(model, seed).backward()
    messages = [str(warning.message) for warning in issued]
    assert len(messages) == torch.distributed.get_world_size() - 1
    assert all("DistributedDataParallel" in message for message in messages)
    assert all(warning.filename == __file__ for warning in issued)


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
