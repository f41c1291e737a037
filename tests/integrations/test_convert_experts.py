"""te.convert: experts in one parameter, which torch's grouped_mm multiplies, are computed by GroupedLinear."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe
from transformer_engine.pytorch.integrations.torch_modules.experts import compare_experts
from transformer_engine.pytorch.integrations.torch_modules.sample import SampleCall

pytestmark = [
    pytest.mark.usefixtures("emulated"),
    pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch has no grouped_mm"),
]

EXPERTS, WIDTH, INNER = 4, 64, 48
FREE = 3  # rows of no expert


class GroupedExperts(nn.Module):
    """SwiGLU experts as in torchtitan and transformers; ends of their rows are given."""

    def __init__(self, function: Any = None, stored: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.stored = function or F.grouped_mm, stored
        sizes = (EXPERTS, 2 * INNER, WIDTH) if stored else (EXPERTS, WIDTH, 2 * INNER)
        self.gate_up_proj = nn.Parameter(0.1 * torch.randn(sizes, dtype=torch.bfloat16))
        self.down_proj = nn.Parameter(
            0.1 * torch.randn(EXPERTS, WIDTH, INNER, dtype=torch.bfloat16)
        )

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        first = self.gate_up_proj.mT if self.stored else self.gate_up_proj
        gate, up = self.function(x, first, offs=ends).chunk(2, -1)
        return self.function(F.silu(gate) * up, self.down_proj.mT, offs=ends)


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    return x, torch.tensor([32, 32, 80, 96], dtype=torch.int32)


def gradients(model: nn.Module, x: Tensor, ends: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x, ends)
    rows = int(ends[-1])
    return [
        y[:rows],
        *torch.autograd.grad(y[:rows].float().square().mean(), [x, *model.parameters()]),
    ]


class ByHand(nn.Module):
    """The same experts in te.GroupedLinear."""

    def __init__(self, model: GroupedExperts, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self.layers = recipe, nn.ModuleList()
        for stack in (model.gate_up_proj, model.down_proj):
            _, width, depth = stack.shape
            options: Any = {"bias": False, "params_dtype": stack.dtype, "device": "cpu"}
            layer = te.GroupedLinear(EXPERTS, depth, width, **options)
            for number, weight in enumerate(stack.detach()):
                getattr(layer, f"weight{number}").data.copy_(weight)
            self.layers.append(layer)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        rows = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        with te.autocast(recipe=self.recipe):
            gate, up = self.layers[0](x, rows).chunk(2, -1)
            return self.layers[1](F.silu(gate) * up, rows)


@pytest.mark.parametrize(
    "recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=lambda r: type(r).__name__
)
def test_experts_equal_grouped_linear_bit_for_bit(recipe):
    model = GroupedExperts()
    exact = gradients(ByHand(model, recipe), *batch())
    te.convert(model, recipe, sample=batch(), verbose=False)
    (row,) = te.conversion_table(model)
    assert row.module == "grouped_mm" and row.choice == type(recipe).__name__
    y, dx, *grads = gradients(model, *batch())
    assert torch.equal(y, exact[0]) and torch.equal(dx, exact[1])
    stacked = [torch.stack(exact[2 + EXPERTS * i : 2 + EXPERTS * (i + 1)]) for i in range(2)]
    for result, expected in zip(grads, stacked, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("name", ["grouped_mm", "_grouped_mm"])
def test_without_a_recipe_results_match_torchs(name):
    function = getattr(F if name == "grouped_mm" else torch, name)
    model = GroupedExperts(function)
    exact = gradients(model, *batch())
    keys = list(model.state_dict())
    te.convert(model, sample=batch(), verbose=False)
    assert te.conversion_table(model).rows[0].choice == "te" and list(model.state_dict()) == keys
    for one in (model, copy.deepcopy(model)):
        for result, expected in zip(gradients(one, *batch()), exact, strict=True):
            torch.testing.assert_close(result, expected, rtol=2.0**-7, atol=2.0**-7)
    te.restore(model)
    for result, expected in zip(gradients(model, *batch()), exact, strict=True):
        assert torch.equal(result, expected)


def test_rows_of_no_expert_are_ignored():
    model, (x, ends) = GroupedExperts(), batch()
    exact = model(x, ends)
    te.convert(model, sample=(x, ends), verbose=False)
    more = torch.cat((x, torch.full((FREE, WIDTH), torch.nan, dtype=x.dtype)))
    y = model(more, ends)
    assert y.shape == (len(x) + FREE, WIDTH)
    torch.testing.assert_close(y[: len(x)], exact, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize(
    ("options", "recipe", "reason"),
    [
        ({"stored": False}, None, "not stored as"),
        ({}, Float8CurrentScaling(), "not divisible by 16"),
    ],
)
def test_unsupported_experts_are_left_with_the_reason(options, recipe, reason, monkeypatch):
    if recipe is not None:
        monkeypatch.setattr(f"{__name__}.INNER", 40)
    model = GroupedExperts(**options)
    te.convert(model, recipe, sample=batch(), verbose=False)
    (row,) = te.conversion_table(model)
    assert row.choice == "torch" and reason in row.reason


def test_experts_without_a_sample_or_under_a_compiler_are_left():
    for options, reason in (
        ({}, "in a sample"),
        ({"sample": batch(), "compiled": True}, "compile"),
    ):
        model = te.convert(GroupedExperts(), verbose=False, **options)
        (row,) = te.conversion_table(model)
        assert row.choice == "torch" and reason in row.reason


def test_filters_name_the_module_with_experts():
    model = nn.ModuleDict({"experts": GroupedExperts()})
    te.convert(
        model, sample=lambda model: model["experts"](*batch()), exclude="experts", verbose=False
    )
    (row,) = te.conversion_table(model)
    assert (row.choice, row.reason) == ("torch", "not selected")


def test_compiled_and_later_unsupported_calls_run_in_torch():
    model, (x, ends) = GroupedExperts(), batch()
    expected = model(x, ends)
    te.convert(model, Float8CurrentScaling(), sample=(x, ends), verbose=False)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x, ends), expected)
    model.function = lambda x, weight, offs: torch.bmm(x[None], weight[:1])[0]
    assert model(x, ends).shape == x.shape


@pytest.mark.parametrize("score", [torch.softmax, Tensor.sigmoid, lambda x, *_: x])
def test_routers_stay_in_high_precision(score):
    model = nn.ModuleDict({"router": nn.Linear(64, 32), "other": nn.Linear(64, 32)})

    def run(model: Any) -> Tensor:
        x = torch.randn(16, 64)
        scores = model["router"](x).float()
        values, _ = (score(scores, -1) if score is torch.softmax else score(scores)).topk(2)
        return model["other"](x).square() + values.sum()

    te.convert(model, Float8CurrentScaling(), sample=run, verbose=False)
    rows = {row.name: row for row in te.conversion_table(model)}
    assert "chooses experts" in rows["router"].reason
    assert rows["other"].choice == "Float8CurrentScaling"


def test_both_sides_are_timed():
    call = SampleCall(
        ((96, WIDTH), (EXPERTS, WIDTH, INNER)), torch.bfloat16, torch.device("cpu"), True
    )
    compared = compare_experts(Float8CurrentScaling(), Counter({call: 2}))
    assert compared.original.ms > 0 and compared.converted.ms > 0


def test_experts_of_transformers_are_converted():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        mlp_only_layers=[], max_position_embeddings=64, experts_implementation="grouped_mm",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    tokens = torch.randint(0, 96, (2, 24))
    expected = model(tokens, labels=tokens)
    te.convert(model, Float8CurrentScaling(), sample={"input_ids": tokens}, verbose=False)
    rows = {row.name: row for row in te.conversion_table(model)}
    assert rows["model.layers.0.mlp.experts"].choice == "Float8CurrentScaling"
    result = model(tokens, labels=tokens)
    result.loss.backward()
    torch.testing.assert_close(result.loss, expected.loss, rtol=0.05, atol=0.0)
    experts: Any = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.grad.abs().sum() > 0
    te.restore(model)
    assert torch.equal(model(tokens).logits, expected.logits)
