"""Every public layer under torch.compile(fullgraph=True): results equal eager mode, with each scaling.

Chains of te.ops are in tests/ops/test_compiled.py.
"""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import NAMES, RECIPES, make_call, make_layer
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

pytestmark = [pytest.mark.any_device, pytest.mark.usefixtures("emulated")]

# Always one recipe per layer; test_compiled_layers.py always runs layers with attention.
ALWAYS = {
    ("Linear", "delayed"),
    ("LayerNormLinear", "current"),
    ("LayerNormMLP", "block"),
    ("GroupedLinear", "current"),
    ("LayerNorm", "none"),
    ("RMSNorm", "none"),
    ("DotProductAttention", "none"),
}
CASES = [
    pytest.param(layer, recipe, marks=() if (layer, recipe) in ALWAYS else pytest.mark.slow)
    for layer in NAMES
    for recipe in RECIPES
]


def train(layer: str, name: str, device: torch.device, compiles: bool) -> list[torch.Tensor]:
    """Outputs and gradients of two steps."""
    FP8GlobalStateManager.reset()
    torch._dynamo.reset()
    module, recipe = make_layer(layer, device=device), RECIPES[name]
    x, call = make_call(module)
    if compiles:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    records: list[torch.Tensor] = []
    for _ in range(2):
        module.zero_grad()
        x.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = call()
        (y.sin().sum() * 3).backward()
        records += [
            y.detach(),
            *(p.grad.clone() for p in (x, *module.parameters()) if p.grad is not None),
        ]
    return records


@pytest.mark.parametrize(("layer", "recipe"), CASES)
def test_a_compiled_layer_trains_as_in_eager_mode(layer, recipe, device):
    eager, compiled = train(layer, recipe, device, False), train(layer, recipe, device, True)
    assert len(eager) == len(compiled) >= 4
    for a, b in zip(eager, compiled, strict=True):
        if a.is_cuda:
            # On a GPU, attention gradients differ bitwise between launches.
            assert float((a - b).norm()) <= 0.1 * float(a.norm()) + 1e-6
        else:
            assert torch.equal(a, b)
