"""Training-mode results are bitwise equal with and without recorded gradients and checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from tests.support.layers import HIDDEN, NAMES, RECIPES, make_call, make_layer, same

DROPOUT = {
    "DotProductAttention": {"attention_dropout": 0.2},
    "MultiheadAttention": {"attention_dropout": 0.2},
    "TransformerLayer": {"attention_dropout": 0.2, "hidden_dropout": 0.1},
}
CHAINS = {
    "ops MLP": lambda: te.ops.Sequential(
        te.ops.RMSNorm(HIDDEN),
        te.ops.Linear(HIDDEN, 2 * HIDDEN),
        te.ops.GELU(),
        te.ops.Linear(2 * HIDDEN, HIDDEN),
    ),
}


@pytest.fixture(autouse=True)
def _emulation(emulated):
    """Enable emulation in every test of this file."""


def clone_outputs(y):
    return [
        part.detach().clone() for part in (y if isinstance(y, tuple) else (y,)) if part is not None
    ]


def ways(layer, function, x):
    """{way to call: call} for calls that have to agree."""

    def without_gradients():
        with torch.no_grad():
            return function(x)

    return {
        "recorded": lambda: function(x),
        "not recorded": without_gradients,
        "te reentrant": lambda: te.checkpoint(function, x, use_reentrant=True),
        "te": lambda: te.checkpoint(function, x, use_reentrant=False),
        "torch reentrant": lambda: torch_checkpoint(function, x, use_reentrant=True),
        "torch": lambda: torch_checkpoint(function, x, use_reentrant=False),
    }


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [*NAMES, *CHAINS])
@pytest.mark.sampled
def test_results_do_not_depend_on_how_gradients_are_recorded(kind, recipe):
    layer = CHAINS[kind]() if kind in CHAINS else make_layer(kind, **DROPOUT.get(kind, {}))
    if kind in CHAINS:
        layer.to("cuda" if torch.cuda.is_available() else "cpu")
    x, _ = make_call(torch.nn.Identity() if kind in CHAINS else layer)
    x = x.detach().to(next(layer.parameters(), x).device).requires_grad_()
    expected = None
    for name in ways(layer, None, x):
        if recipe == "delayed" and name.startswith("torch"):
            continue  # other checkpoints do not repeat delayed-scaling scales, see `repeatable`
        module = copy.deepcopy(layer)

        def function(x, module=module):
            with te.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
                return call(module, x)

        x.grad = None
        torch.manual_seed(5)
        y = ways(module, function, x)[name]()
        actual = clone_outputs(y)
        gradients = []
        if name != "not recorded":
            first = y[0] if isinstance(y, tuple) else y
            first.float().sin().sum().backward()
            gradients = [p.grad for p in (x, *module.parameters()) if p.grad is not None]
        if expected is None:
            expected = actual, gradients
        assert same(actual, expected[0]), name
        assert not gradients or same(gradients, expected[1]), name


def call(layer, x):
    if isinstance(layer, te.DotProductAttention):
        return layer(qkv_layer=x)
    if isinstance(layer, te.GroupedLinear):
        rows = x.shape[0] * x.shape[1] // layer.num_gemms
        return layer(x, [rows] * layer.num_gemms)
    return layer(x)


def test_gelu_fused_into_a_product_is_requested_with_and_without_gradients(monkeypatch):
    from transformer_engine.pytorch.functions import norm_mlp

    seen, original = [], norm_mlp.gemm_gelu
    monkeypatch.setattr(
        norm_mlp,
        "gemm_gelu",
        lambda a, b, epilogue, keeps_input: (
            seen.append(keeps_input),
            original(a, b, epilogue, keeps_input=keeps_input),
        )[1],
    )
    layer = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, device="cpu")
    x = torch.randn(16, HIDDEN, requires_grad=True)
    layer(x)
    with torch.no_grad():
        layer(x)
        layer.eval()(x)
    te.checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert seen == [True, True, False, True, True]
