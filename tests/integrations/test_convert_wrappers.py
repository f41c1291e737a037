"""te.restore on modules that contain, or are part of, a model that te.convert converted."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

pytestmark = pytest.mark.usefixtures("emulated")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


def convert_model(model: nn.Module) -> nn.Module:
    return te.convert(model, Float8CurrentScaling(), verbose=False)


@pytest.mark.parametrize(
    "wrap",
    [nn.Sequential, torch.compile, nn.ModuleList([]).append],
    ids=["container", "compiled", "list"],
)
def test_a_wrapper_of_a_converted_model_is_restored(wrap: Callable[[nn.Module], nn.Module]):
    model = Layers()
    expected = copy.deepcopy(model)
    outer = wrap(convert_model(model))
    assert te.restore(outer) is outer
    assert [type(module) for module in model.modules()] == [
        type(module) for module in expected.modules()
    ]
    x = torch.randn(32, 64)
    assert torch.equal(model(x), expected(x))
    with pytest.raises(ValueError, match="nothing to restore"):
        te.restore(model)
    convert_model(model)


def test_a_part_of_a_converted_model_is_restored():
    model = convert_model(nn.Sequential(Layers(), nn.Linear(64, 64)))
    te.restore(model[0])  # pyright: ignore[reportIndexIssue]
    assert type(model[0].first) is nn.Linear and type(model[1]) is not nn.Linear  # pyright: ignore
    te.restore(model)
    assert type(model[1]) is nn.Linear  # pyright: ignore[reportIndexIssue]


def test_a_model_merged_by_peft_is_restored():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["first", "second"], init_lora_weights=False)
    adapted = convert_model(peft.get_peft_model(Layers(), config))
    merged = adapted.merge_and_unload()
    te.restore(merged)
    assert (
        type(merged.first) is type(merged.second) is nn.Linear and type(merged.norm) is nn.LayerNorm
    )
    outer = peft.get_peft_model(convert_model(merged), config)
    te.restore(outer)
    assert type(outer.base_model.model.first.base_layer) is nn.Linear
