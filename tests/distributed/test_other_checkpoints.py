"""torch.utils.checkpoint repeats the first run's autocast, recipe and scales: results stay bitwise equal."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from tests.support.layers import HEADS, HIDDEN, KINDS, RECIPES, make_layer
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from transformer_engine.pytorch.quantization import recompute_states
from transformer_engine.pytorch.quantization.autocast import current

pytestmark = [pytest.mark.usefixtures("emulated"), pytest.mark.any_device]

Function = Callable[[Tensor], Tensor]
ALL_RECIPES: dict[str, Recipe | None] = {
    **RECIPES,
    "delayed attention": DelayedScaling(amax_history_len=4, fp8_dpa=True, fp8_mha=True),
    "current attention": Float8CurrentScaling(fp8_dpa=True),
}


class _Grouped(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.layer = make_layer("GroupedLinear", **options)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // HIDDEN // 2
        return self.layer(x.reshape(-1, HIDDEN), [rows, rows])


class _Attention(nn.Module):
    def __init__(self, dropout: float, **options: Any):
        super().__init__()
        self.qkv = te.Linear(HIDDEN, 3 * HIDDEN, **options)
        self.core = te.DotProductAttention(HEADS, HIDDEN // HEADS, attention_dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.core(qkv_layer=self.qkv(x).view(*x.shape[:2], 3, HEADS, HIDDEN // HEADS))


class _Twice(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.layer = te.Linear(HIDDEN, HIDDEN, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(8 * self.layer(x))


def _operations(**options: Any) -> nn.Module:
    return te.ops.Sequential(
        te.ops.LayerNorm(HIDDEN, **options),
        te.ops.Linear(HIDDEN, 96, **options),
        te.ops.GELU(),
        te.ops.Linear(96, HIDDEN, **options),
    )


LAYERS: dict[str, Callable[..., nn.Module]] = {
    **{
        kind.__name__: partial(make_layer, kind.__name__)
        for kind in KINDS
        if "Linear" not in kind.__name__
    },
    "Linear": partial(te.Linear, HIDDEN, HIDDEN),
    "LayerNormLinear": partial(te.LayerNormLinear, HIDDEN, HIDDEN),
    "GroupedLinear": _Grouped,
    "DotProductAttention": partial(_Attention, 0.0),
    "attention with dropout": partial(_Attention, 0.2),
    "TransformerLayer with dropout": partial(
        make_layer, "TransformerLayer", hidden_dropout=0.1, attention_dropout=0.1
    ),
    "te.ops": _operations,
    "called twice": _Twice,
}


def _selective(saved: Callable[[Any], bool]) -> Callable[[], Any]:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if saved(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


# torch's `debug=True` logs operations with arguments for which the message has no place; pytest formats each message.
logging.getLogger("LoggingTensor").disabled = True
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def torch_checkpoint_caller(reentrant: bool, **options: Any) -> Callable[[Function], Function]:
    return lambda function: (
        lambda x: torch_checkpoint(function, x, use_reentrant=reentrant, **options)
    )


def _nested(outer: bool, inner: bool) -> Callable[[Function], Function]:
    return lambda function: torch_checkpoint_caller(outer)(torch_checkpoint_caller(inner)(function))


def _disable_early_stop(function: Function) -> Function:
    def call(x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            return torch_checkpoint_caller(False)(function)(x)

    return call


WAYS: dict[str, Callable[[Function], Function]] = {
    "reentrant": torch_checkpoint_caller(True),
    "hooks": torch_checkpoint_caller(False),
    "hooks without early stop": _disable_early_stop,
    "debug": torch_checkpoint_caller(False, debug=True),
    "products saved": torch_checkpoint_caller(False, context_fn=_selective(_PRODUCTS.__contains__)),
    "nothing saved": torch_checkpoint_caller(False, context_fn=_selective(lambda operator: False)),
    "reentrant in reentrant": _nested(outer=True, inner=True),
    "hooks in reentrant": _nested(outer=True, inner=False),
    "reentrant in hooks": _nested(outer=False, inner=True),
    "hooks in hooks": _nested(outer=False, inner=False),
    "contexts of te": torch_checkpoint_caller(
        False, context_fn=te.distributed.get_activation_recompute_contexts
    ),
    "te in hooks": lambda f: torch_checkpoint_caller(False)(lambda x: te.checkpoint(f, x)),
    "hooks in te": lambda f: lambda x: te.checkpoint(torch_checkpoint_caller(False)(f), x),
    "te": lambda f: lambda x: te.checkpoint(f, x),
}


def scaling_states(module: nn.Module) -> list[Tensor]:
    """Copies of all delayed scales and histories."""
    results = []
    for layer in module.modules():
        states: list[Any] = []
        if isinstance(layer, te.module.base.TransformerEngineBaseModule):
            states = [
                s
                for key in ("scaling_fwd", "scaling_bwd")
                for s in layer.numerics.delayed_states(key)
            ]
        elif isinstance(layer, te.ops.BasicOperation):
            states = [s for mode in ("forward", "backward") for s in layer.delayed_states(mode)]
        results += [
            tensor.clone() for state in states for tensor in (state.scale, state.amax_history)
        ]
    return results


def train_two_steps(
    module: nn.Module,
    recipe: Recipe | None,
    way: Callable[[Function], Function] | None,
    inside: bool,
) -> list[Tensor]:
    """Results from two steps with two growing micro-batches, whose backward passes follow both forwards."""
    device = next(module.parameters(), torch.empty(0)).device
    quantizing = partial(te.autocast, enabled=recipe is not None, recipe=recipe)

    def function(x: Tensor) -> Tensor:
        if not inside:
            return module(x)
        with quantizing():
            return module(x)

    call = function if way is None else way(function)
    records: list[Tensor] = []
    for step in range(2):
        module.zero_grad()
        inputs, outputs = [], []
        for size in (1.0, 20.0):
            generator = torch.Generator().manual_seed(step)
            x = (size * torch.randn(16, 4, HIDDEN, generator=generator)).to(device).requires_grad_()
            torch.manual_seed(step)
            with quantizing(enabled=recipe is not None and not inside):
                outputs.append(call(x))
            inputs.append(x)
        for y in outputs:
            torch.manual_seed(7)  # later draws must not matter
            y.square().mean().backward()
        records += [y.detach() for y in outputs] + [x.grad for x in inputs if x.grad is not None]
        records += [
            p.grad.clone() for p in module.parameters() if p.grad is not None
        ] + scaling_states(module)
    return records


def assert_same(expected: list[Tensor], actual: list[Tensor]) -> None:
    """The same bits; on a GPU, up to the order in which attention adds up its gradients."""
    assert len(expected) == len(actual) > 0
    for a, b in zip(expected, actual, strict=True):
        if a.is_cuda:
            assert float((a.float() - b.float()).norm()) <= 0.02 * float(a.float().norm()) + 1e-6
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("inside", [False, True], ids=["autocast outside", "autocast inside"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ALL_RECIPES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.sampled(40)
def test_torchs_checkpoint_has_the_bits_of_saved_activations(layer, recipe, way, inside, device):
    module = LAYERS[layer](device=device) if "ttention" not in layer else LAYERS[layer]().to(device)
    twin = copy.deepcopy(module)
    expected = train_two_steps(module, ALL_RECIPES[recipe], None, inside)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*checkpoint")
        assert_same(expected, train_two_steps(twin, ALL_RECIPES[recipe], WAYS[way], inside))
    assert not recompute_states.runs() and not current().enabled


# The layers and recipes that are recomputed most, in every way.
@pytest.mark.parametrize("inside", [False, True], ids=["autocast outside", "autocast inside"])
@pytest.mark.parametrize("way", ["reentrant", "hooks"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("layer", ["Linear", "LayerNormMLP", "te.ops"])
def test_frequent_recomputations_have_the_bits_of_saved_activations(
    layer, recipe, way, inside, device
):
    test_torchs_checkpoint_has_the_bits_of_saved_activations(layer, recipe, way, inside, device)


@pytest.mark.parametrize("implementation", [CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT])
def test_the_checkpoint_wrapper_of_fsdp_repeats_scales(implementation, device):
    layer = te.LayerNormMLP(HIDDEN, 96, device=device)
    twin = checkpoint_wrapper(copy.deepcopy(layer), checkpoint_impl=implementation)
    recipe = ALL_RECIPES["delayed"]
    assert_same(
        train_two_steps(layer, recipe, way=None, inside=False),
        train_two_steps(twin, recipe, way=None, inside=False),
    )


def test_a_model_that_is_evaluated_without_gradients_runs_once_and_updates_no_scales(device):
    layer, x = te.Linear(HIDDEN, HIDDEN, device=device), torch.randn(16, HIDDEN, device=device)
    for reentrant in (True, False):
        with torch.no_grad(), te.autocast(recipe=ALL_RECIPES["delayed"]):
            torch_checkpoint(layer, x, use_reentrant=reentrant)
    (_, history, *_) = scaling_states(layer)
    assert history[0].max() > 0  # recorded, and not updated, as without a checkpoint
    assert not history[1:].any()


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_a_retained_graph_repeats_its_first_run_twice(reentrant, device):
    layer = te.Linear(HIDDEN, HIDDEN, device=device)
    results = []
    for module, way in ((layer, None), (copy.deepcopy(layer), torch_checkpoint_caller(reentrant))):
        x = torch.ones(16, HIDDEN, device=device, requires_grad=True)
        with te.autocast(recipe=ALL_RECIPES["delayed"]):
            loss = (module if way is None else way(module))(x).square().mean()
        with te.autocast(recipe=ALL_RECIPES["delayed"]):  # moves the scales on
            module(100 * x.detach())
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([x.grad, *(p.grad for p in module.parameters()), *scaling_states(module)])
    assert_same(*results)


class _Foreign(torch.autograd.Function):
    """Another library's reentrant checkpoint, which restores no autocast."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.function(x), grad)
        return None, x.grad


class ForeignCheckpoint(_Foreign):
    pass


@pytest.mark.parametrize("layer", ["Linear", "LayerNormMLP", "GroupedLinear", "te.ops"])
def test_a_checkpoint_of_another_library_raises_if_it_loses_the_autocast(layer, device):
    module, x = (
        LAYERS[layer](device=device),
        torch.randn(16, 4, HIDDEN, device=device, requires_grad=True),
    )
    with te.autocast(recipe=Float8CurrentScaling()):
        y = ForeignCheckpoint.apply(module, x)
    with pytest.raises(
        RuntimeError, match=r"under no autocast.*under Float8CurrentScaling.*pytorch\.checkpoint"
    ):
        y.square().mean().backward()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_checkpoint_of_another_library_that_keeps_no_scales_is_announced(device):
    layer, x = te.Linear(HIDDEN, HIDDEN, device=device), torch.randn(16, HIDDEN, device=device)

    def function(x):
        with te.autocast(recipe=DelayedScaling()):
            return layer(x)

    y: Any = ForeignCheckpoint.apply(function, x.requires_grad_())
    with pytest.warns(
        UserWarning, match="does not keep the scales of delayed scaling runs Linear again"
    ):
        y.sum().backward()


def test_a_layer_called_by_a_backward_hook_does_not_count_as_recomputation(device):
    layer, x = te.Linear(HIDDEN, HIDDEN, device=device), torch.randn(16, HIDDEN, device=device)
    y = torch.randn(16, HIDDEN, device=device, requires_grad=True)
    called = []

    def hook(gradient):
        with te.autocast(recipe=DelayedScaling()):
            called.append(layer(x))

    y.register_hook(hook)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (y * 2).sum().backward()
    assert len(called) == 1
