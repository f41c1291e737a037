"""torch.compile(fullgraph=True, dynamic=True): one graph for several shapes, bitwise equal to eager.

Failures with dynamic shapes occur where the tracer reads numbers; the tests trace two layers that share them.
"""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.cases import cross_cases
from tests.support.layers import RECIPES, same_as_eager
from transformer_engine.common.recipe import Float8CurrentScaling, MMParams, recipe_description
from transformer_engine.pytorch.attention import MultiheadAttention
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast

pytestmark = pytest.mark.any_device

HIDDEN, FFN, HEADS = 64, 96, 2
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
LAYERS = {
    "linear": lambda d: torch.nn.Sequential(
        te.Linear(HIDDEN, FFN, device=d), te.Linear(FFN, HIDDEN, device=d)
    ),
    "layernorm_linear": lambda d: te.LayerNormLinear(HIDDEN, FFN, device=d),
    "layernorm_mlp": lambda d: te.LayerNormMLP(HIDDEN, FFN, device=d),
    "checkpointed": lambda d: te.LayerNormMLP(HIDDEN, FFN, checkpoint=True, device=d),
    "layernorm": lambda d: te.LayerNorm(HIDDEN, device=d),
    "rmsnorm": lambda d: te.RMSNorm(HIDDEN, device=d),
    "grouped_linear": lambda d: te.GroupedLinear(2, HIDDEN, FFN, device=d),
    "attention": lambda d: MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, input_layernorm=True, device=d
    ),
    "two layers": lambda d: torch.nn.Sequential(
        te.TransformerLayer(HIDDEN, FFN, HEADS, device=d, **PLAIN),
        te.TransformerLayer(
            HIDDEN, FFN, HEADS, normalization="RMSNorm", activation="geglu", device=d, **PLAIN
        ),
    ),
}
SHAPES = ((32, 2), (64, 3))
# Every layer and every recipe; tracing a quantized layer with symbolic shapes takes 5 to 30 s on one core.
ALWAYS = {
    ("linear", "current"),
    ("linear", "block"),
    ("layernorm_linear", "delayed"),
    ("layernorm_linear", "mxfp8"),
    ("layernorm_mlp", "none"),
    ("checkpointed", "none"),
    ("layernorm", "none"),
    ("rmsnorm", "none"),
    ("layernorm_linear", "nvfp4"),
    ("grouped_linear", "none"),
    ("attention", "none"),
    ("two layers", "none"),
}


@pytest.fixture(autouse=True)
def _no_compiled_code_left():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(kind, recipe, device, backend):
    """Outputs and gradients from a step with each shape."""
    FP8GlobalStateManager.reset()
    torch.manual_seed(0)
    layer = LAYERS[kind](device)
    model = (
        layer
        if backend is None
        else torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    )
    records = []
    for tokens, batch in SHAPES:
        x = torch.randn(tokens, batch, HIDDEN, device=device, requires_grad=True)
        splits = ([tokens, tokens * (batch - 1)],) if kind == "grouped_linear" else ()
        with autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x, *splits)
        (y.sin().sum() * 3).backward()
        records += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        layer.zero_grad()
    return records


@pytest.mark.parametrize(("kind", "name"), cross_cases(LAYERS, RECIPES, ALWAYS))
@pytest.mark.sampled(1)
def test_training_with_several_shapes_equals_eager_mode(kind, name, device):
    backend = "eager" if (kind, name) in ALWAYS else "aot_eager"
    eager = train(kind, RECIPES[name], device, None)
    assert same_as_eager(eager, train(kind, RECIPES[name], device, backend))


def test_a_recipe_describes_its_current_fields():
    recipe = Float8CurrentScaling()
    assert recipe_description(recipe) == repr(recipe)
    recipe.fp8_gemm_fprop = MMParams(use_split_accumulator=True)
    assert recipe_description(recipe) == repr(recipe)
    assert "use_split_accumulator=True" in repr(recipe)
