"""te.checkpoint under delayed scaling: recomputation quantizes like its forward pass, despite later forward passes."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.distributed import activation_recompute_forward, checkpoint
from transformer_engine.pytorch.quantization import DelayedScalingRequest, recompute_states
from transformer_engine.pytorch.quantization.autocast import current

WIDTH = 32
BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "custom": lambda: CustomRecipe(qfactory=lambda role: DelayedScalingRequest(amax_history_len=4)),
}
LAYERS = {
    "linear": lambda device: te.Linear(WIDTH, WIDTH, device=device),
    "layernorm_linear": lambda device: te.LayerNormLinear(WIDTH, WIDTH, device=device),
    "layernorm_mlp": lambda device: te.LayerNormMLP(WIDTH, 48, device=device),
}


def tokens(device, size: float = 1.0) -> Tensor:
    return (size * torch.randn(16, WIDTH, device=device)).requires_grad_()


def plain(function, *arguments):
    return function(*arguments)


def checkpoint_caller(reentrant: bool):
    return lambda function, *arguments: checkpoint(function, *arguments, use_reentrant=reentrant)


def gradients(module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    return [x.grad for x in inputs] + [p.grad for p in module.parameters()]


def states(module: nn.Module) -> list[Tensor]:
    """Scales and histories from all layers inside."""
    results = []
    for layer in module.modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            state = getattr(layer, "fp8_meta", {}).get(key)
            for delayed in () if state is None else state.delayed_states:
                results += [delayed.scale.clone(), delayed.amax_history.clone()]
    return results


def equal(expected: list[Tensor], actual: list[Tensor]) -> bool:
    return len(expected) == len(actual) and all(map(torch.equal, expected, actual))


def _micro_batches(module, call, recipe, device):
    """Forwards whose inputs grow, then their backwards in the same order."""
    inputs, outputs = [tokens(device, 4.0**i) for i in range(3)], []
    for x in inputs:
        with te.autocast(recipe=recipe):
            outputs.append(call(module, x))
    for y in outputs:
        y.square().mean().backward()
    return inputs


def _micro_batches_reversed(module, call, recipe, device):
    inputs, outputs = [tokens(device, 4.0**i) for i in range(3)], []
    for x in inputs:
        with te.autocast(recipe=recipe):
            outputs.append(call(module, x))
    for y in reversed(outputs):
        y.square().mean().backward()
    return inputs


def _discard_forwards(module, call, recipe, device):
    inputs = [tokens(device, 4.0**i) for i in range(4)]
    for i, x in enumerate(inputs):
        with te.autocast(recipe=recipe):
            y = call(module, x)
        if i % 2:
            y.square().mean().backward()
    return inputs[1::2]


def _raising_forwards(module, call, recipe, device):
    def raising(x):
        module(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), te.autocast(recipe=recipe):
        call(raising, tokens(device, 50.0))
    return _micro_batches(module, call, recipe, device)


def _call_repeatedly(module, call, recipe, device):
    x = tokens(device)

    def thrice(x):
        for i in range(3):
            x = module(4.0**i * x)
        return x

    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = call(thrice, x)
        y.square().mean().backward()
    return [x]


def _nested(module, call, recipe, device):
    x = tokens(device)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = call(lambda x: module(call(module, 3.0 * x)), x)
        y.square().mean().backward()
    return [x]


def _nested_before_their_autocast(module, call, recipe, device):
    def inner(x):
        with te.autocast(recipe=recipe):
            return module(x)

    x = tokens(device)
    for _ in range(3):
        module.zero_grad()  # two backward passes through one weight add up in a different order
        call(lambda x: call(inner, torch.sin(call(inner, x))), x).square().mean().backward()
    return [x]


def _autocast_inside(module, call, recipe, device):
    def function(x):
        with te.autocast(recipe=recipe):
            return module(x)

    inputs, outputs = [tokens(device, 4.0**i) for i in range(4)], []
    for x in inputs[:2]:
        call(function, x).square().mean().backward()
    for x in inputs[2:]:
        outputs.append(call(function, x))
    for y in outputs:
        y.square().mean().backward()
    return inputs


WAYS = {
    "micro-batches": _micro_batches,
    "micro-batches in reverse": _micro_batches_reversed,
    "dropped forwards": _discard_forwards,
    "a forward that raised": _raising_forwards,
    "a layer called thrice": _call_repeatedly,
    "nested": _nested,
    "nested, autocast inside": _nested_before_their_autocast,
    "autocast inside": _autocast_inside,
}


@BOTH
@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_scales_and_histories_equal_a_run_without_recomputation(
    way, layer, kind, reentrant, device
):
    module = LAYERS[layer](device)
    twin, recipe = copy.deepcopy(module), RECIPES[kind]()
    torch.manual_seed(7)
    expected = WAYS[way](module, plain, recipe, device)
    torch.manual_seed(7)
    actual = WAYS[way](twin, checkpoint_caller(reentrant), recipe, device)
    assert equal(gradients(module, expected), gradients(twin, actual))
    assert equal(states(module), states(twin))


def test_nested_checkpoints_of_both_kinds_repeat_the_first_run(device):
    module, recipe = te.Linear(WIDTH, WIDTH, device=device), RECIPES["delayed"]()
    twin = copy.deepcopy(module)

    def function(layer, call_outside, call_inside):
        def run(x):
            with te.autocast(recipe=recipe):
                return layer(x)

        x = torch.ones(16, WIDTH, device=device).requires_grad_()
        for _ in range(3):
            call_outside(lambda x: call_inside(run, 2 * x), x).square().mean().backward()
        return [x]

    expected = gradients(module, function(module, plain, plain))
    for outer, inside in ((True, False), (False, True)):
        other = copy.deepcopy(twin)
        inputs = function(other, checkpoint_caller(outer), checkpoint_caller(inside))
        assert equal(expected, gradients(other, inputs))


@BOTH
def test_a_graph_that_is_retained_repeats_its_first_run_twice(reentrant, device):
    module, recipe = te.Linear(WIDTH, WIDTH, device=device), RECIPES["delayed"]()
    twin = copy.deepcopy(module)

    def run(layer, call):
        torch.manual_seed(7)
        x = tokens(device)
        with te.autocast(recipe=recipe):
            loss = call(layer, x).square().mean()
        with te.autocast(recipe=recipe):  # moves the scales on
            layer(100 * x.detach())
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(layer, [x])

    assert equal(run(module, plain), run(twin, checkpoint_caller(reentrant)))


@BOTH
def test_states_live_as_long_as_the_node_that_repeats_them(reentrant, device):
    layer, saved = te.Linear(WIDTH, WIDTH, device=device), []
    keep = recompute_states.ReplayStates.keep

    def watching(self, module, states):
        saved.append(weakref.ref(states[0][0][0]))
        keep(self, module, states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute_states.ReplayStates, "keep", watching)
        outputs = []
        for _ in range(50):
            with te.autocast(recipe=RECIPES["delayed"]()):
                outputs.append(checkpoint(layer, tokens(device), use_reentrant=reentrant))
    assert len(saved) == 50
    assert all(ref() is not None for ref in saved)
    del outputs[10:]
    gc.collect()
    assert sum(ref() is not None for ref in saved) == 10
    assert not any("replay" in name for name in vars(layer))
    assert len(recompute_states.marked_by_hand) == 0


@BOTH
def test_an_inner_autocast_updates_scales_once_per_step(reentrant, device):
    layer, recipe, amaxes = te.Linear(WIDTH, WIDTH, device=device), RECIPES["delayed"](), []

    def function(x):
        with te.autocast(recipe=recipe):
            return layer(x)

    for i in range(3):
        x = tokens(device, 2.0**i)
        amaxes.append(float(x.detach().abs().max()))
        checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    state = layer.fp8_meta["scaling_fwd"]
    assert state.amax_history[:, 0].tolist() == [0.0, *amaxes]
    assert not current().enabled


def test_a_second_run_that_differs_from_the_first_raises(device):
    layer, runs = te.Linear(WIDTH, WIDTH, device=device), []

    def function(x):
        runs.append(1)
        return layer(x) if len(runs) == 1 else layer(layer(x))

    with te.autocast(recipe=RECIPES["delayed"]()):
        y = checkpoint(function, tokens(device))
    with pytest.raises(RuntimeError, match=r"second run.*let the function do the same both times"):
        y.sum().backward()


def test_runs_that_are_marked_by_hand_are_paired_oldest_first(device):
    layer, recipe = te.Linear(WIDTH, WIDTH, device=device), RECIPES["delayed"]()
    inputs, first = [tokens(device, 4.0**i).detach() for i in range(3)], []
    for x in inputs:
        with (
            te.autocast(recipe=recipe),
            activation_recompute_forward(activation_recompute=True, recompute_phase=False),
        ):
            first.append(layer(x).detach())
    for x, y in zip(inputs, first, strict=True):
        with (
            te.autocast(recipe=recipe),
            activation_recompute_forward(activation_recompute=True, recompute_phase=True),
        ):
            assert torch.equal(layer(x), y)
    assert len(recompute_states.marked_by_hand) == 0


# torch's checkpoint.


def _backward_inside_checkpoint(layer, x, recipe):
    # On this thread: another one, as torch has for each of several GPUs, is in no block.
    with te.autocast(recipe=recipe), torch.autograd.set_multithreading_enabled(False):
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        y.square().sum().backward()


def _autocast_in_the_function(layer, x, recipe):
    def function(x):
        with te.autocast(recipe=Float8CurrentScaling()):
            return layer(x)

    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=True).square().sum().backward()


@pytest.mark.parametrize("way", [_backward_inside_checkpoint, _autocast_in_the_function])
def test_torchs_reentrant_checkpoint_under_the_same_autocast_gives_the_plain_gradients(way, device):
    layer, recipe = te.Linear(WIDTH, WIDTH, device=device), Float8CurrentScaling()
    twin, x = copy.deepcopy(layer), tokens(device)
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.square().sum().backward()
    repeated = x.detach().clone().requires_grad_()
    way(twin, repeated, recipe)
    assert equal(gradients(layer, [x]), gradients(twin, [repeated]))


def test_torchs_reentrant_checkpoint_without_autocast_works_after_an_evaluation_under_one(device):
    layer, x = te.Linear(WIDTH, WIDTH, device=device), tokens(device)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        layer(x)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(16, WIDTH))


@pytest.mark.parametrize("quantized", [False, True])
def test_a_layer_may_be_called_in_a_hook_of_a_backward(quantized, device):
    layer, x, records = te.Linear(WIDTH, WIDTH, device=device), tokens(device), []
    with torch.no_grad(), te.autocast(recipe=RECIPES["delayed"]()):
        layer(x)
    y = x * 2

    def hook(grad):
        with te.autocast(enabled=quantized, recipe=Float8CurrentScaling()):
            records.append(layer(grad))

    y.register_hook(hook)
    y.sum().backward()
    assert len(records) == 1
