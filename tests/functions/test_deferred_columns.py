"""Columns of weights or an attention's output, cast again in the backward pass, equal saved columns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import transformer_engine.pytorch as te
from tests.support.training import same, train
from transformer_engine.common import recipe as recipes
from transformer_engine.common.dispatch import Unsupported, use_backend
from transformer_engine.pytorch.functions import deferred_columns
from transformer_engine.pytorch.functions.deferred_columns import (
    INPUT_COLUMNS,
    WEIGHT_COLUMNS,
    OperandColumns,
)

pytestmark = pytest.mark.any_device
TOKENS, HIDDEN, INNER, HEADS = 48, 64, 128, 4
SHAPE = (TOKENS, 1, HIDDEN)
RECIPES: dict[str, Callable[[], recipes.Recipe]] = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "power of two": lambda: recipes.Float8CurrentScaling(use_power_2_scales=True),
}
BF16 = {"params_dtype": torch.bfloat16}
LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "linear": lambda **o: te.Linear(HIDDEN, INNER, **BF16, **o),
    "layernorm_linear": lambda **o: te.LayerNormLinear(HIDDEN, INNER, **BF16, **o),
    "mlp": lambda **o: te.LayerNormMLP(HIDDEN, INNER, activation="swiglu", bias=False, **BF16, **o),
    "layer": lambda **o: te.TransformerLayer(
        HIDDEN,
        INNER,
        HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        **BF16,
        **o,
    ),
}
WEIGHTS = {"linear": HIDDEN * INNER, "layernorm_linear": HIDDEN * INNER, "mlp": 3 * HIDDEN * INNER}


@contextlib.contextmanager
def columns(mode: str) -> Iterator[None]:
    with te.emulate(), use_backend(weight_columns=mode, input_columns=mode):
        yield


def make_layer(name: str, device: torch.device, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return LAYERS[name](device=device, **options)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_columns_are_bitwise_equal_to_saved_columns(recipe, name, device):
    """Delayed scales change between each step's forward and backward pass."""
    with columns("saved"):
        reference, more = train(make_layer(name, device), RECIPES[recipe](), SHAPE)
    request = {"weight_columns": "recomputed"} | (
        {} if name == "layer" else {"input_columns": "saved"}
    )
    with te.emulate(), use_backend(**request):
        ours, less = train(make_layer(name, device), RECIPES[recipe](), SHAPE)
    assert same(ours, reference)
    if torch.cuda.is_available() or name == "layer":
        return  # some GPUs' products read the row-wise codes in both directions
    scales = {"linear": 1, "layernorm_linear": 1, "mlp": 2}[name] * 4
    unneeded = more - less - WEIGHTS[name]
    # The scale is saved with the codes; without codes, a multiplier or a maximum is saved.
    assert unneeded in (-scales, 0)


@pytest.mark.parametrize("name", ["layernorm_linear", "mlp"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recomputed_rms_norm_is_bitwise_equal_to_saved_columns(recipe, name, device):
    options = {"normalization": "RMSNorm"}
    with te.emulate(), use_backend(norm_columns="recomputed", weight_columns="saved"):
        ours, less = train(make_layer(name, device, **options), RECIPES[recipe](), SHAPE)
    with columns("saved"):
        reference, more = train(make_layer(name, device, **options), RECIPES[recipe](), SHAPE)
    assert same(ours, reference)
    if not torch.cuda.is_available():
        # One byte per element, and the codes' scale; the multiplier or the maximum instead.
        assert more - less in (TOKENS * HIDDEN, TOKENS * HIDDEN + 4)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_an_attentions_output_is_saved_once(recipe, device):
    """The projection after an attention saves no codes, and the layer's results equal saved codes bitwise."""
    results = {}
    for mode in ("recomputed", "saved"):
        with te.emulate(), use_backend(input_columns=mode, weight_columns="saved"):
            if mode == "saved":
                results[mode] = train(make_layer("layer", device), RECIPES[recipe](), SHAPE)
                continue
        with te.emulate():
            layer = make_layer("layer", device)
            INPUT_COLUMNS.forget()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    "transformer_engine.pytorch.functions.deferred_columns._FEWEST_ELEMENTS", 1
                )
                results[mode] = train(layer, RECIPES[recipe](), SHAPE)
            INPUT_COLUMNS.forget()
    assert same(results["recomputed"][0], results["saved"][0])
    if not torch.cuda.is_available():
        assert results["saved"][1] - results["recomputed"][1] >= TOKENS * HIDDEN


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize(
    "way", ["checkpoint", "reentrant", "frozen weight", "frozen input", "delay_wgrad"]
)
def test_recomputed_columns_work_with_other_options(recipe, way, device):
    def measure() -> list[Tensor]:
        options = {"delay_wgrad_compute": True} if way == "delay_wgrad" else {}
        layer = make_layer("mlp", device, **options)
        if way == "frozen weight":
            layer.fc1_weight.requires_grad_(False)

        def run(layer: torch.nn.Module, x: Tensor) -> Tensor:
            if way in ("checkpoint", "reentrant"):
                return te.checkpoint(layer, x, use_reentrant=way == "reentrant")
            return layer(x.detach() if way == "frozen input" else x) + 0 * x

        result = train(layer, RECIPES[recipe](), SHAPE, run=run)[0]
        if way == "delay_wgrad":
            layer.backward_dw()
            result += [p.grad for p in layer.parameters() if p.grad is not None]
        return result

    with te.emulate(), use_backend(weight_columns="recomputed"):
        ours = measure()
    with columns("saved"):
        reference = measure()
    assert same(ours, reference)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_retained_graphs_and_overlapping_passes_equal_saved_columns_bitwise(recipe, device):
    def measure() -> list[Tensor]:
        layer = make_layer("mlp", device)
        torch.manual_seed(1)
        inputs = [
            torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(2)
        ]
        outputs = []
        for x in inputs:
            x.requires_grad_()
            with te.autocast(recipe=RECIPES[recipe]()):
                outputs.append(layer(x))
        for y in outputs:
            y.float().sin().sum().backward(retain_graph=True)
        outputs[0].float().sum().backward()
        return [tensor.grad for tensor in (*inputs, *layer.parameters()) if tensor.grad is not None]

    with te.emulate(), use_backend(weight_columns="recomputed"):
        ours = measure()
    with columns("saved"):
        reference = measure()
    assert same(ours, reference)


def test_a_weight_that_changes_before_the_backward_pass_raises(device):
    """As for torch.nn.Linear, whose backward pass reads the weight too."""
    with te.emulate(), use_backend(weight_columns="recomputed"):
        layer = make_layer("linear", device)
        x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
        with te.autocast(recipe=recipes.Float8CurrentScaling()):
            y = layer(x)
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.float().sum().backward()


WHOLE = OperandColumns(
    elements=2**22,
    rows=16384,
    quantized=True,
    one_scale=True,
    copied=True,
    in_memory=True,
    communicates=False,
)


def test_large_operands_are_recomputed_by_default():
    assert WEIGHT_COLUMNS.choose(WHOLE) == INPUT_COLUMNS.choose(WHOLE) == "recomputed"
    fewer = WHOLE._replace(rows=8192)
    assert WEIGHT_COLUMNS.choose(fewer) == "saved"
    assert INPUT_COLUMNS.choose(fewer) == "recomputed"
    small = WHOLE._replace(elements=2**20)
    assert WEIGHT_COLUMNS.choose(small) == INPUT_COLUMNS.choose(small) == "saved"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantized": False}, "does not multiply codes"),
        ({"communicates": True}, "exchanges values with other ranks"),
        ({"cached": True}, "once for several microbatches"),
        ({"in_memory": False}, "not in memory until the backward pass"),
        ({"one_scale": False}, "only codes with one scale"),
        ({"copied": False}, "read the codes by rows in both directions"),
    ],
)
def test_saving_columns_instead_of_recomputing_has_a_reason(change, reason):
    request = WHOLE._replace(**change)
    assert WEIGHT_COLUMNS.choose(request) == "saved"
    refused = WEIGHT_COLUMNS.named("recomputed").rejection_reason(request)
    assert refused is not None and reason in refused


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_cached_weights_are_saved(recipe, name, device, monkeypatch):
    """Microbatches read the first one's codes, whatever the default for the size, and a request raises."""

    def outputs() -> list[Tensor]:
        layer, active, result = make_layer(name, device), RECIPES[recipe](), []
        for batch in range(3):
            x = torch.full((TOKENS, 1, HIDDEN), 1.0 + batch, dtype=torch.bfloat16, device=device)
            x.requires_grad_()
            with te.emulate(), te.autocast(recipe=active):
                y = layer(x, is_first_microbatch=batch == 0)
            y.float().square().sum().backward()
            assert x.grad is not None
            result += [y.detach(), x.grad]
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.mul_(1.5)
        return result

    with use_backend(weight_columns="saved"):
        expected = outputs()
    monkeypatch.setattr(deferred_columns, "_FEWEST_ROWS", 0)
    monkeypatch.setattr(deferred_columns, "_FEWEST_ELEMENTS", 0)
    assert same(outputs(), expected)
    with pytest.raises(Unsupported, match="once for several microbatches"), columns("recomputed"):
        outputs()
