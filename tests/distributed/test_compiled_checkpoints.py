"""torch.utils.checkpoint around a compiled function repeats the delayed scales."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_engine.pytorch as te
from tests.distributed.test_other_checkpoints import (
    LAYERS,
    Function,
    scaling_states,
    torch_checkpoint_caller,
    train_two_steps,
)
from tests.support.layers import HIDDEN, RECIPES
from tests.support.tolerances import relative_error
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import compiled_runs

pytestmark = [pytest.mark.usefixtures("emulated"), pytest.mark.any_device]

WAYS: dict[str, Callable[[Function], Function]] = {
    "hooks": torch_checkpoint_caller(False),
    "reentrant": torch_checkpoint_caller(True),
    "hooks in reentrant": lambda f: torch_checkpoint_caller(True)(
        torch_checkpoint_caller(False)(f)
    ),
    "reentrant in hooks": lambda f: torch_checkpoint_caller(False)(
        torch_checkpoint_caller(True)(f)
    ),
    "hooks in hooks": lambda f: torch_checkpoint_caller(False)(torch_checkpoint_caller(False)(f)),
    "te hooks": lambda f: lambda x: te.checkpoint(f, x, use_reentrant=False),
    "te": lambda f: lambda x: te.checkpoint(f, x),
    "contexts of te": torch_checkpoint_caller(
        False, context_fn=te.distributed.get_activation_recompute_contexts
    ),
}
OFTEN = ("LayerNormMLP", "GroupedLinear", "called twice", "TransformerLayer")


def compiled(
    way: Callable[[Function], Function], backend: str, frames: list[CompileCounterWithBackend]
):
    """The way around a compiled function."""

    def wrap(function: Function) -> Function:
        torch._dynamo.reset()
        frames.append(CompileCounterWithBackend(backend))
        return way(torch.compile(function, backend=frames[-1]))

    return wrap


def assert_compiled_equals_eager(layer, recipe, way, inside, device, backend="aot_eager"):
    module = LAYERS[layer](device=device) if "ttention" not in layer else LAYERS[layer]().to(device)
    twin = copy.deepcopy(module)
    frames: list[CompileCounterWithBackend] = []
    expected = train_two_steps(module, RECIPES[recipe], WAYS["te"], inside)
    actual = train_two_steps(twin, RECIPES[recipe], compiled(WAYS[way], backend, frames), inside)
    assert len(expected) == len(actual) > 0 and frames[0].frame_count > 0
    for ours, reference in zip(actual, expected, strict=True):
        if backend == "aot_eager" and not ours.is_cuda:
            assert torch.equal(ours, reference)
        assert relative_error(ours.float(), reference.float()) <= 1e-2
    assert not compiled_runs.is_recomputed()


@pytest.mark.parametrize("inside", [False, True], ids=["autocast outside", "autocast inside"])
@pytest.mark.parametrize(
    "layer",
    ["Linear", *(pytest.param(layer, marks=pytest.mark.slow) for layer in ("te.ops", *OFTEN))],
)
def test_delayed_scales_are_repeated_in_compiled_functions(layer, inside, device):
    assert_compiled_equals_eager(layer, "delayed", "hooks", inside, device)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["autocast outside", "autocast inside"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
@pytest.mark.parametrize("layer", ["Linear", "te.ops", *OFTEN])
def test_compiled_functions_have_the_bits_of_eager_ones(layer, recipe, way, inside, device):
    assert_compiled_equals_eager(layer, recipe, way, inside, device)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hooks", "reentrant"])
@pytest.mark.parametrize("layer", ["Linear", "te.ops"])
def test_compiled_kernels_repeat_scales(layer, way, device):
    assert_compiled_equals_eager(layer, "delayed", way, False, device, backend="inductor")


def test_both_runs_call_one_graph(device):
    torch._dynamo.reset()
    layer, graphs = te.Linear(HIDDEN, HIDDEN, device=device), CompileCounterWithBackend("aot_eager")
    function = torch.compile(layer, backend=graphs, fullgraph=True)
    for _ in range(3):
        x = torch.randn(16, HIDDEN, device=device, requires_grad=True)
        with te.autocast(recipe=DelayedScaling()):
            y = torch_checkpoint_caller(False)(function)(x)
        y.square().sum().backward()
    assert graphs.frame_count == 1


def test_the_second_run_leaves_scales_and_histories_alone(device):
    layer = te.Linear(HIDDEN, HIDDEN, device=device)
    function = torch_checkpoint_caller(False)(torch.compile(layer, backend="aot_eager"))
    recipe = DelayedScaling(amax_history_len=4)
    outputs = []
    for size in (1.0, 30.0):
        x = (size * torch.randn(16, HIDDEN, device=device)).requires_grad_()
        with te.autocast(recipe=recipe):
            outputs.append(function(x))
    forward = scaling_states(layer)[:2]
    torch.autograd.grad(outputs[0].sum(), list(layer.parameters()))
    for before, after in zip(forward, scaling_states(layer)[:2], strict=True):
        assert torch.equal(before, after)


def test_eager_and_compiled_layers_in_one_checkpoint(device):
    model = torch.nn.Sequential(*(te.Linear(HIDDEN, HIDDEN, device=device) for _ in range(3)))
    twin = copy.deepcopy(model)
    twin[1] = torch.compile(twin[1], backend="aot_eager")  # pyright: ignore[reportArgumentType]
    expected = train_two_steps(model, RECIPES["delayed"], torch_checkpoint_caller(False), False)
    actual = train_two_steps(twin, RECIPES["delayed"], torch_checkpoint_caller(False), False)
    for ours, reference in zip(actual, expected, strict=True):
        assert ours.is_cuda or torch.equal(ours, reference)
        # a GPU's eager kernels fuse more
        assert relative_error(ours.float(), reference.float()) <= 1e-2


def test_a_scale_that_the_first_run_did_not_read_raises(device):
    scale, history = torch.ones(1, device=device), torch.zeros(4, 1, device=device)
    with (
        compiled_runs.compiled_run({}, again=True, marked=True),
        pytest.raises(
            RuntimeError,
            match=r"reads a scale 1 times in the second run .* and 0 times in its first",
        ),
    ):
        compiled_runs.replay_scale(scale, history, "state")
