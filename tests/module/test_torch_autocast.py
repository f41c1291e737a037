"""Under torch.autocast, parameters and input in float32: every module's output has autocast's dtype."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES
from transformer_engine.pytorch.attention import MultiheadAttention
from transformer_engine.pytorch.quantization import autocast

HIDDEN, FFN, HEADS, TOKENS, BATCH = 64, 96, 2, 16, 4
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def layer(**options):
    return lambda d: te.TransformerLayer(HIDDEN, FFN, HEADS, device=d, **(NO_DROPOUT | options))


MODULES = {
    "layernorm": lambda d: te.LayerNorm(HIDDEN, device=d),
    "rmsnorm": lambda d: te.RMSNorm(HIDDEN, device=d),
    "linear": lambda d: te.Linear(HIDDEN, FFN, return_bias=True, device=d),
    "layernorm_linear": lambda d: te.LayerNormLinear(
        HIDDEN, FFN, return_layernorm_output=True, device=d
    ),
    "layernorm_mlp": lambda d: te.LayerNormMLP(HIDDEN, FFN, return_layernorm_output=True, device=d),
    "attention": lambda d: MultiheadAttention(
        HIDDEN,
        HEADS,
        attention_dropout=0.0,
        input_layernorm=True,
        return_layernorm_output=True,
        device=d,
    ),
    "pre-norm": layer(),
    "llama": layer(normalization="RMSNorm", activation="swiglu", bias=False),
    "post-norm": layer(output_layernorm=True),
    "residual post-norm": layer(apply_residual_connection_post_layernorm=True),
    "parallel": layer(parallel_attention_mlp=True),
    "decoder": layer(layer_type="decoder"),
    "drop path": layer(drop_path_rate=1e-9),
    "dropout": layer(hidden_dropout=1e-9),
}


def run(module, x, recipe, enabled, call=None):
    """(outputs, input and parameter gradients)"""
    encoded = {}
    if isinstance(module, te.TransformerLayer) and module.layer_type == "decoder":
        encoded = {"encoder_output": x.detach() * 0.5}
    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    with (
        torch.autocast(x.device.type, torch.bfloat16, enabled=enabled),
        autocast(enabled=recipe is not None, recipe=recipe),
    ):
        y = (module if call is None else call)(x, **encoded)
    ys = y if isinstance(y, tuple) else (y,)
    sum((part.float() * (1 + i)).sin().sum() for i, part in enumerate(ys)).backward()
    return ys, [x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def close(a, b, tolerance):
    """The exact gradient of the keys' bias is 0; the computed one is rounding error, up to 4e-4 in bfloat16."""
    return (
        float((a.detach().float() - b.detach().float()).norm())
        <= tolerance * float(b.detach().norm()) + 1e-3
    )


def check(name, recipe, device, how=None):
    torch.manual_seed(0)
    module = MODULES[name](device)
    x = torch.randn(TOKENS, BATCH, HIDDEN, device=device)
    exact, exact_grads = run(module, x, RECIPES[recipe], False)
    outputs, grads = run(module, x, RECIPES[recipe], True, None if how is None else how(module))
    assert {part.dtype for part in outputs} == {torch.bfloat16}
    assert {grad.dtype for grad in grads} == {torch.float32}
    # Values are rounded to bfloat16 before quantizing, so some codes differ by one step.
    tolerance = 0.03 if recipe == "none" else 0.2
    assert all(close(a, b, tolerance) for a, b in zip(outputs, exact, strict=True))
    assert all(close(a, b, tolerance) for a, b in zip(grads, exact_grads, strict=True))


@pytest.mark.parametrize("recipe", ["none", "current", "block"])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sampled
def test_eager_outputs_have_autocasts_dtype(name, recipe, device):
    check(name, recipe, device)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("name", ["pre-norm", "post-norm", "parallel"])
@pytest.mark.sampled
def test_checkpointed_outputs_have_autocasts_dtype(name, recipe, use_reentrant, device):
    check(
        name, recipe, device, lambda m: lambda x: te.checkpoint(m, x, use_reentrant=use_reentrant)
    )


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("layernorm_linear", "none"),
        ("attention", "none"),
        *[
            pytest.param(name, recipe, marks=pytest.mark.slow)
            for name, recipe in (
                ("pre-norm", "none"),
                ("parallel", "none"),
                ("pre-norm", "current"),
            )
        ],
    ],
)
def test_compiled_outputs_have_autocasts_dtype(name, recipe, device):
    torch._dynamo.reset()
    check(name, recipe, device, lambda m: torch.compile(m, fullgraph=True, backend="aot_eager"))


def test_a_stack_in_half_precision_keeps_its_dtype_without_autocast(device):
    module = MODULES["pre-norm"](device).to(torch.bfloat16)
    assert (
        module(torch.randn(TOKENS, BATCH, HIDDEN, device=device, dtype=torch.bfloat16)).dtype
        == torch.bfloat16
    )


def test_the_input_is_not_cast_outside_of_autocast(device):
    module = MODULES["pre-norm"](device)
    assert module(torch.randn(TOKENS, BATCH, HIDDEN, device=device)).dtype == torch.float32
