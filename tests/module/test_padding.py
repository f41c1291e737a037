"""Fp8Padding and Fp8Unpadding: values, gradients, recipe alignments, and rejected arguments."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

SPLITS = [3, 0, 17, 32]
ALIGNMENTS = {
    recipes.DelayedScaling: 16,
    recipes.Float8CurrentScaling: 16,
    recipes.MXFP8BlockScaling: 32,
    recipes.NVFP4BlockScaling: 128,
}


def rows(device, dtype=torch.float32):
    return torch.randn(sum(SPLITS), 24, device=device, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_adds_zeros_and_unpadding_restores_the_rows(device, dtype):
    x = rows(device, dtype)
    y, padded = te.Fp8Padding(4, 16)(x, SPLITS)
    assert padded == [16, 0, 32, 32] and y.shape == (80, 24)
    for group, local in zip(y.split(padded), x.split(SPLITS), strict=True):
        assert (
            torch.equal(group[: local.shape[0]], local) and group[local.shape[0] :].abs().sum() == 0
        )
    back = te.Fp8Unpadding(4, 16)(y, SPLITS)
    assert torch.equal(back, x)
    gradient = torch.randn_like(back)
    back.backward(gradient)
    assert torch.equal(x.grad, gradient)


def test_removed_rows_have_zero_gradients(device):
    y = torch.randn(80, 24, device=device, requires_grad=True)
    te.Fp8Unpadding(4, 16)(y, SPLITS).sum().backward()
    assert [g.sum(1).count_nonzero().item() for g in y.grad.split([16, 0, 32, 32])] == SPLITS


@pytest.mark.parametrize("recipe", ALIGNMENTS, ids=lambda recipe: recipe.__name__)
def test_the_first_recipe_sets_the_multiple(device, recipe):
    layer = te.Fp8Padding(4)
    with te.emulate(), te.autocast(enabled=True, recipe=recipe()):
        _, padded = layer(rows(device), SPLITS)
    multiple = ALIGNMENTS[recipe]
    assert layer.align_size == multiple
    assert padded == [-(-m // multiple) * multiple for m in SPLITS]
    assert layer(rows(device), SPLITS)[1] == padded


def test_an_explicit_multiple_overrides_the_recipe(device):
    with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling()):
        assert te.Fp8Padding(4, align_size=128)(rows(device), SPLITS)[1] == [128, 0, 128, 128]


def test_aligned_rows_are_returned_unchanged(device):
    x, splits = torch.ones(48, 8, device=device), [16, 32]
    y, padded = te.Fp8Padding(2, 16)(x, splits)
    assert y is x and padded is splits
    assert te.Fp8Unpadding(2, 16)(x, splits) is x


def test_leading_dimensions_become_rows(device):
    y, _ = te.Fp8Padding(2, 16)(torch.ones(3, 4, 8, device=device), [5, 7])
    assert y.shape == (32, 8)


def test_padding_has_neither_parameters_nor_states():
    assert te.Fp8Padding(2).state_dict() == {} and list(te.Fp8Unpadding(2).parameters()) == []


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ([3, 0, 17], r"m_splits=\[3, 0, 17\] must be 4 numbers"),
        ([3, -1, 17, 33], "must be 4 numbers >= 0"),
        ([3, 0, 17, 31], "add up to 51, inp has 52 rows"),
    ],
)
def test_mismatched_splits_are_rejected(device, splits, words):
    with pytest.raises(ValueError, match=words):
        te.Fp8Padding(4, 16)(rows(device), splits)


def test_grouped_products_are_equal_with_and_without_padding(device):
    layer = te.GroupedLinear(4, 32, 32, bias=False, device=device)
    x = torch.randn(sum(SPLITS), 32, device=device)
    y, padded = te.Fp8Padding(4, 16)(x, SPLITS)
    result = te.Fp8Unpadding(4, 16)(layer(y, padded), SPLITS)
    torch.testing.assert_close(result, layer(x, SPLITS))


def test_padding_compiles_in_one_graph(device):
    padding, unpadding = te.Fp8Padding(4, 16), te.Fp8Unpadding(4, 16)

    def there_and_back(x):
        y, _ = padding(x, SPLITS)
        return unpadding(y * 2, SPLITS)

    x = rows(device)
    result = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(result, 2 * x)
