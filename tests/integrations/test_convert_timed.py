"""te.convert with a sample that is timed: the engine is used where it is faster, and attention is replaced too."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_engine.pytorch as te
from tests.integrations.torch_models import HEAD, Attention, Decoder, Encoder, features, tokens
from tests.support.tolerances import ATTENDED
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.integrations.torch_modules import conversion
from transformer_engine.pytorch.integrations.torch_modules.layers import Converter
from transformer_engine.pytorch.integrations.torch_modules.sample import SampleCall
from transformer_engine.pytorch.integrations.torch_modules.timing import Comparison, Cost, compare

pytestmark = pytest.mark.usefixtures("emulated")

RECIPE, RECIPE_NAME = Float8CurrentScaling(), "Float8CurrentScaling"
FASTER, SLOWER = (Comparison(Cost(2.0, 8, 2.0), Cost(ms, 4, ms)) for ms in (1.0, 2.0))
LAUNCHED = Comparison(Cost(2.0, 8, 2.0), Cost(1.0, 4, 3.0))  # faster, but not on a slow host


@pytest.fixture
def times(monkeypatch):
    """Stubbed measurements: linear layers with 64 outputs are slower, everything else is faster."""
    measured: list[str] = []
    models = iter([10.0, 5.0, 6.0])

    def compare_step(module: Any, converter: Converter, calls: Counter[SampleCall]) -> Comparison:
        measured.append(repr(module))
        return SLOWER if getattr(module, "out_features", 0) == 64 else FASTER

    monkeypatch.setattr(conversion, "compare", compare_step)
    monkeypatch.setattr(conversion, "_compare_attention", lambda calls: FASTER)
    monkeypatch.setattr(conversion, "_model_ms", lambda *arguments: next(models))
    return measured


def test_the_faster_side_is_chosen_and_equal_layers_are_timed_once(times):
    model = te.convert(Decoder(), RECIPE, sample=tokens(), timed=True, verbose=False)
    rows = {row.name: row for row in te.conversion_table(model)}
    assert (
        rows["layers.0.attention.wq"].choice == "torch"
        and type(model.layers[0].attention.wq) is nn.Linear
    )
    assert (
        rows["layers.1.w1"].choice == "Float8CurrentScaling"
        and type(model.layers[1].w1) is not nn.Linear
    )
    assert rows["norm"].choice == "te"
    assert rows["layers.1.w1"].costs == FASTER
    assert (
        rows["layers.1.w1"].reason == "0.50 of the time"
        and rows["layers.1.w2"].reason == "1.00 of the time"
    )
    assert len(times) == 5  # the norms, 64 -> 64, 64 -> 32, 64 -> 128, 128 -> 64
    assert "whole model: 10 ms, converted 5 ms" in str(te.conversion_table(model))


def test_a_model_that_becomes_slower_is_restored(times, monkeypatch):
    models = iter([5.0, 10.0])
    monkeypatch.setattr(conversion, "_model_ms", lambda *arguments: next(models))
    model, x = Decoder(), tokens()
    expected = model(x)
    te.convert(model, RECIPE, sample=x, timed=True, verbose=False)
    assert torch.equal(model(x), expected)
    table = te.conversion_table(model)
    assert {row.choice for row in table} == {"torch"}
    assert "was restored" in str(table) and "the whole model was slower converted" in str(table)
    te.restore(model)


@pytest.mark.parametrize(("by_device", "by_host"), [(4.0, 5.0), (6.0, 5.0), (20.0, 30.0)])
def test_the_faster_of_both_choices_is_used(times, monkeypatch, by_device, by_host):
    """Layers whose kernels are faster and whose launches are slower are converted if the whole model gains."""
    models = iter([10.0, by_device, by_host])
    monkeypatch.setattr(conversion, "_model_ms", lambda *arguments: next(models))
    monkeypatch.setattr(
        conversion,
        "compare",
        lambda module, *_: LAUNCHED if getattr(module, "out_features", 0) == 64 else FASTER,
    )
    model, x = Decoder(), tokens()
    te.convert(model, RECIPE, sample=x, timed=True, verbose=False)
    rows = {row.name: row for row in te.conversion_table(model)}
    converted = {
        name: type(layer) is not nn.Linear
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    }
    assert (
        converted["layers.0.w1"]
        == (rows["layers.0.w1"].choice == RECIPE_NAME)
        == (min(by_device, by_host) < 10)
    )
    assert (
        converted["layers.0.w2"]
        == (rows["layers.0.w2"].choice == RECIPE_NAME)
        == (by_device < by_host < 10)
    )


def test_a_compiled_model_also_tries_every_linear_layer(times, monkeypatch):
    models = iter([10.0, 8.0, 7.0])
    monkeypatch.setattr(conversion, "_model_ms", lambda *arguments: next(models))
    model = te.convert(Decoder(), RECIPE, sample=tokens(), timed=True, compiled=True, verbose=False)
    table = te.conversion_table(model)
    rows = {row.name: row for row in table}
    assert (
        rows["layers.0.w2"].choice == RECIPE_NAME
        and "casts are fused" in rows["layers.0.w2"].reason
    )
    assert rows["norm"].choice == rows["output"].choice == "torch"
    assert "2 choices" in table.summary


def test_compiled_models_keep_their_torch_norms(times):
    model = te.convert(Decoder(), RECIPE, sample=tokens(), timed=True, compiled=True, verbose=False)
    rows = {row.name: row for row in te.conversion_table(model)}
    assert rows["norm"].choice == "torch" and "torch.compile fuses norms" in rows["norm"].reason


@pytest.mark.parametrize("make", [Decoder, Encoder])
def test_replaced_attention_matches_torchs(make: Any, times):
    model = make()
    x = tokens() if make is Decoder else features()
    expected = _gradients(model, x)
    te.convert(
        model,
        sample=x,
        timed=True,
        verbose=False,
        exclude=lambda name, module: hasattr(module, "weight"),
    )
    attentions = [
        row for row in te.conversion_table(model) if row.module == "scaled_dot_product_attention"
    ]
    assert attentions and {row.choice for row in attentions} == {"te"}
    for copied in (model, copy.deepcopy(model)):
        for result, exact in zip(_gradients(copied, x), expected, strict=True):
            torch.testing.assert_close(result, exact, **ATTENDED)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for result, exact in zip(_gradients(compiled, x), expected, strict=True):
        torch.testing.assert_close(result, exact, **ATTENDED)
    te.restore(model)
    for result, exact in zip(_gradients(model, x), expected, strict=True):
        assert torch.equal(result, exact)


def _gradients(model: Any, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y, *torch.autograd.grad(y.square().mean(), list(model.parameters()))]


class Masked(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (-1, HEAD)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, **self.options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attn_mask": torch.ones(24, 24).tril() > 0}, "mask tensor"),
        ({"dropout_p": 0.1}, "dropout"),
    ],
)
def test_attention_with_a_mask_or_dropout_is_left(options: dict[str, Any], reason: str, times):
    model = nn.ModuleList([Masked(**options)])
    te.convert(model, sample=lambda model: model[0](features()), timed=True, verbose=False)
    (row,) = te.conversion_table(model)
    assert row.choice == "torch" and reason in row.reason


def test_other_calls_of_a_replaced_attention_run_in_torch(times):
    """A module that later passes a mask is computed by torch, as before its conversion."""
    module, x = Masked(), features()
    te.convert(module, sample=x, timed=True, verbose=False)
    module.options["attn_mask"] = torch.ones(24, 24).tril() > 0
    result = module(x)
    te.restore(module)
    assert torch.equal(result, module(x))


@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["high precision", "current"])
def test_measured_times_are_those_of_both_sides(recipe: Any):
    layer, calls = (
        nn.Linear(64, 32),
        Counter(
            {
                SampleCall(
                    ((4, 8, 64),), torch.float32, torch.device("cpu"), needs_grad=True, trains=True
                ): 2
            }
        ),
    )
    compared = compare(layer, Converter(recipe), calls)
    assert compared.original.ms > 0 and compared.converted.ms > 0
    assert type(layer) is nn.Linear and layer.weight.grad is None


def test_a_whole_conversion_is_timed_on_any_device():
    model, x = Attention(), features(1)
    te.convert(model, RECIPE, sample=x, timed=True, verbose=False)
    table = te.conversion_table(model)
    for row in table:
        assert row.choice == "torch" or (
            row.costs is not None and row.costs.converted.ms < row.costs.original.ms
        )
    assert "timed forward and backward" in str(table)
