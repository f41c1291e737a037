"""Splitting a fused projection into q, k and v: the values, the gradients, and no unnecessary copies."""

from __future__ import annotations

import pytest
import torch

from transformer_engine.pytorch.functions.split_heads import split_heads

SIZE = 8


def parts(x: torch.Tensor, queries: int, groups: int, interleaved: bool):
    """The definition, head by head."""
    heads = x.unflatten(-1, (-1, SIZE)).unbind(-2)
    each = queries // groups
    if interleaved:
        rows = [heads[g * (each + 2) : (g + 1) * (each + 2)] for g in range(groups)]
        q = [head for row in rows for head in row[:each]]
        k, v = [row[each] for row in rows], [row[each + 1] for row in rows]
    else:
        q, k, v = heads[:queries], heads[queries : queries + groups], heads[queries + groups :]
    return [torch.stack(list(part), dim=-2) for part in (q, k, v)]


@pytest.mark.parametrize(("queries", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("leading", [(5, 2), (7,), (5, 0), (0,)])
def test_heads_and_gradients_equal_the_definition(device, queries, groups, interleaved, leading):
    torch.manual_seed(0)
    x = torch.randn(*leading, (queries + 2 * groups) * SIZE, device=device)
    results = []
    for split in (
        lambda x: split_heads(x, queries, groups, SIZE, interleaved),
        lambda x: parts(x, queries, groups, interleaved),
    ):
        leaf = x.clone().requires_grad_()
        result = split(leaf)
        sum((i + 1) * (part**2).sum() for i, part in enumerate(result)).backward()
        results.append([*(part.detach() for part in result), leaf.grad])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_and_values_are_views(device, interleaved):
    x = torch.randn(3, 8 * SIZE, device=device)
    _, k, v = split_heads(x, 4, 2, SIZE, interleaved)
    assert {part.untyped_storage().data_ptr() for part in (k, v)} == {
        x.untyped_storage().data_ptr()
    }


def test_the_gradient_of_an_unused_part_is_zero(device):
    x = torch.randn(3, 6 * SIZE, device=device, requires_grad=True)
    _, k, _ = split_heads(x, 2, 2, SIZE, True)
    k.sum().backward()
    assert x.grad is not None
    dq, dk, dv = split_heads(x.grad, 2, 2, SIZE, True)
    assert torch.equal(dk, torch.ones_like(dk)) and not dq.any() and not dv.any()


def test_splitting_heads_compiles_in_one_graph(device):
    def loss(x):
        q, k, v = split_heads(x, 4, 2, SIZE, True)
        return (q * 2).sum() + (k * v).sum()

    x = torch.randn(5, 2, 8 * SIZE, device=device)
    grads = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        function(leaf).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
