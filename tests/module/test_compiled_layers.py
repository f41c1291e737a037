"""Whole layers under torch.compile(fullgraph=True): three training steps per recipe equal eager bitwise."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import cross_cases
from tests.support.layers import RECIPES, same
from transformer_engine.pytorch.attention import MultiheadAttention
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast
from transformer_engine.pytorch.transformer import TransformerLayer

pytestmark = pytest.mark.any_device

HIDDEN, HEADS, TOKENS, BATCH = 64, 2, 16, 2
LAYERS = {
    "attention": lambda device: MultiheadAttention(
        HIDDEN,
        HEADS,
        attention_dropout=0.0,
        input_layernorm=True,
        fuse_qkv_params=True,
        device=device,
    ),
    "llama": lambda device: TransformerLayer(
        HIDDEN,
        96,
        HEADS,
        num_gqa_groups=1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        fuse_qkv_params=True,
        device=device,
    ),
    "gpt": lambda device: TransformerLayer(
        HIDDEN, 96, HEADS, hidden_dropout=0.0, attention_dropout=0.0, device=device
    ),
}


def train(kind: str, name: str, device, compiles: bool) -> list[torch.Tensor]:
    torch.manual_seed(11)
    FP8GlobalStateManager.reset()
    layer = LAYERS[kind](device)
    model = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiles else layer
    records: list[torch.Tensor] = []
    for _ in range(3):
        x = torch.randn(TOKENS, BATCH, HIDDEN, device=device, requires_grad=True)
        with autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            y = model(x)
        (y.sin().sum() * 3).backward()
        records += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        layer.zero_grad()
    return records


@pytest.mark.slow
@pytest.mark.parametrize("drop_path", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_compiled_and_eager_dropout_drop_the_same_elements(drop_path, device):
    options = {"hidden_dropout": 0.3, "attention_dropout": 0.0, "drop_path_rate": drop_path}
    torch.manual_seed(5)
    layer = TransformerLayer(HIDDEN, 96, HEADS, device=device, **options)
    x = torch.randn(TOKENS, BATCH, HIDDEN, device=device)
    torch._dynamo.reset()
    results = []
    for model in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(6)
        results.append(model(x).detach())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


# Every recipe in a whole layer, and each layer under per-tensor scaling and under block scaling.
ALWAYS = {
    ("none", "gpt"),
    ("delayed", "llama"),
    ("current", "gpt"),
    ("block", "llama"),
    ("mxfp8", "attention"),
    ("nvfp4", "attention"),
}


@pytest.mark.parametrize(("name", "kind"), cross_cases(RECIPES, LAYERS, ALWAYS))
@pytest.mark.sampled(1)
def test_training_compiled_equals_training_eagerly(kind, name, device):
    torch._dynamo.reset()
    eager, compiled = train(kind, name, device, False), train(kind, name, device, True)
    if device.type == "cpu":
        assert same(eager, compiled)
        return
    for a, b in zip(eager, compiled, strict=True):
        # On a GPU, attention gradients differ bitwise between launches.
        assert float((a - b).norm()) <= 0.1 * float(a.norm()) + 1e-6
