"""Experts under torch.compile(fullgraph=True, dynamic=True): one graph for several batches, as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, same_as_eager

pytestmark = pytest.mark.any_device

HIDDEN, INNER, EXPERTS, K = 16, 24, 3, 2


@pytest.fixture(autouse=True)
def _no_compiled_code_left():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Mixture(torch.nn.Module):
    """Experts that return (y [T, HIDDEN], balancing loss); the caller passes the tokens per expert."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.scale = 2.5  # an attribute of an object becomes a symbol in the graph
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False, device=device)
        self.fc1 = te.GroupedLinear(EXPERTS, HIDDEN, 2 * INNER, bias=False, device=device)
        self.fc2 = te.GroupedLinear(EXPERTS, INNER, HIDDEN, bias=False, device=device)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.router(x)
        return logits, *te.router.fused_topk_with_score_function(
            logits, K, False, None, None, self.scale, "sigmoid", None
        )

    def forward(self, x: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logits, probs, routing_map = self.route(x)
        _, scores = te.router.fused_compute_score_for_moe_aux_loss(logits, K, "sigmoid")
        counts, tokens = routing_map.sum(0), x.shape[0]
        balance = te.router.fused_moe_aux_loss(scores, counts, tokens, EXPERTS, K, 0.01)
        rows, row_id_map = te.moe_permute(x, routing_map, tokens * K)
        gate, linear = self.fc1(rows, splits).chunk(2, dim=-1)
        return te.moe_unpermute(self.fc2(F.silu(gate) * linear, splits), row_id_map, probs), balance


def train(device: torch.device, compiles: bool) -> list[torch.Tensor]:
    """Results and gradients from a step with each token count."""
    torch.manual_seed(0)
    layer = Mixture(device)
    model = (
        torch.compile(layer, fullgraph=True, dynamic=True, backend="eager") if compiles else layer
    )
    records = []
    for tokens in (32, 48):
        x = torch.randn(tokens, HIDDEN, device=device, requires_grad=True)
        splits = layer.route(x.detach())[2].sum(0).tolist()
        y, balance = model(x, splits)
        (y.square().mean() + balance).backward()
        records += [
            y.detach(),
            balance.detach(),
            x.grad,
            *(p.grad.clone() for p in layer.parameters() if p.grad is not None),
        ]
        layer.zero_grad()
    return records


def test_experts_compile_to_one_graph_for_several_batches(device):
    assert same_as_eager(train(device, False), train(device, True))


def grouped_steps(compiles: bool, recipe: Any) -> list[torch.Tensor]:
    """Results and gradients from GroupedLinear with a tensor of rows; a weight and a bias are frozen."""
    torch.manual_seed(0)
    layer = te.GroupedLinear(EXPERTS, 32, 32, device="cpu")
    layer.weight1.requires_grad_(False)
    layer.bias0.requires_grad_(False)
    run = (
        torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        if compiles
        else layer
    )
    records = []
    for rows in ([32, 0, 64], [64, 32, 96]):
        x = torch.randn(sum(rows), 32, requires_grad=True)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = run(x, torch.tensor(rows))
        y.square().sum().backward()
        records += [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
        layer.zero_grad()
    return records


@pytest.mark.parametrize(
    "name",
    [
        "mxfp8",
        *[pytest.param(name, marks=pytest.mark.slow) for name in ("none", "delayed", "current")],
    ],
)
def test_compiled_row_tensors_are_bitwise_equal_to_eager(name, emulated):
    expected, actual = grouped_steps(False, RECIPES[name]), grouped_steps(True, RECIPES[name])
    assert len(expected) == len(actual) == 2 * (2 + 2 * (EXPERTS - 1))
    assert all(map(torch.equal, actual, expected))


CALLS = {
    "by chunks": lambda x, mask: te.moe_sort_chunks_by_index(x, mask[:2, 1], torch.arange(2)),
    "by mask, back": lambda x, mask: te.moe_unpermute(*te.moe_permute(x, mask, 5)),
    "by index, back": lambda x, mask: te.moe_unpermute(
        *te.moe_permute(x, mask[:, :2], map_type="index"), torch.ones(5, 2), map_type="index"
    ),
    "scores of softplus": lambda x, mask: te.router.fused_compute_score_for_moe_aux_loss(
        x, 2, "sqrtsoftplus"
    )[1],
}


# test_experts_compile_to_one_graph_for_several_batches always compiles calls by mask.
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sampled(1)
def test_two_calls_share_one_graph(name):
    def twice(x, mask):
        return CALLS[name](x, mask) + CALLS[name](x * 2, mask)

    mask = torch.zeros(5, 3, dtype=torch.int32)
    mask[:, 1] = 1
    x = torch.randn(5, 6, requires_grad=True)
    actual = torch.compile(twice, fullgraph=True, dynamic=True, backend="eager")(x, mask)
    expected = twice(x, mask)
    assert torch.equal(actual, expected)
    own, reference = (torch.autograd.grad(y.sin().sum(), x)[0] for y in (actual, expected))
    assert torch.equal(own, reference)
