"""Forward-mode differentiation and torch.func transforms raise errors that name the layer and the remedy.

A kernel or a cast to codes does not see a tangent or a sample: without an error the tangent would be missing, or wrong.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import transformer_engine.pytorch as te
from tests.functions.test_torch_autocast import FUNCTIONS
from tests.module.test_independence import (
    CASES,
    LAYERS,
    bind_forward,
    make_layer,
    recipe_context,
    sample_input,
)
from tests.tensor.quantizer_cases import QUANTIZED, create_quantizer

pytestmark = pytest.mark.usefixtures("emulated")

MODES = ["recorded", "frozen", "no_grad"]


def bind_layer(name, recipe, mode, device):
    """A layer's call as a function that takes the input, and the input."""
    layer = make_layer(name, device).eval()
    if mode == "frozen":
        layer.requires_grad_(False)
    forward = bind_forward(name, layer)

    def call(x):
        with torch.set_grad_enabled(mode != "no_grad"), recipe_context(recipe):
            return forward(x)

    return call, sample_input(name, device).detach()


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_forward_mode_raises_with_the_remedy(name, recipe, mode, device):
    call, x = bind_layer(name, recipe, mode, device)
    words = "does not support forward-mode differentiation; compute gradients in reverse mode"
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=words):
        call(forward_ad.make_dual(x, torch.ones_like(x)))


def is_torch_attention(name: str) -> bool:
    """Attention that autograd records as torch operations supports torch.func.grad."""
    return name.startswith("DotProductAttention")


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "recipe"), [case for case in CASES if not is_torch_attention(case.values[0])]
)
def test_transforms_raise_with_the_remedy(name, recipe, mode, device):
    call, x = bind_layer(name, recipe, mode, device)
    words = (
        r"does not support the transforms of torch\.func .*torch\.autograd\.grad or backward\(\)"
    )
    with pytest.raises(RuntimeError, match=words):
        torch.func.grad(lambda x: call(x).sum())(x)
    with pytest.raises(RuntimeError, match=words):
        torch.func.vmap(call)(x[None])
    with pytest.raises(RuntimeError, match=words):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP", "Sequential", "LayerNorm"])
def test_layers_compute_inside_a_forward_mode_level_for_other_tensors(name, device):
    """A forward-mode level that does not reach the layer changes nothing."""
    call, x = bind_layer(name, "none", "recorded", device)
    expected = call(x)
    with forward_ad.dual_level():
        assert torch.equal(call(x), expected)


def test_the_error_names_the_layer(device):
    x = torch.randn(32, 64, device=device)
    for layer, words in (
        (te.Linear(64, 64, device=device), "^Linear does not"),
        (te.LayerNormLinear(64, 64, device=device), "^LayerNormLinear does not"),
        (te.LayerNormMLP(64, 64, device=device), "^LayerNormMLP does not"),
        (te.ops.Sequential(te.ops.GELU()), "^Sequential does not"),
    ):
        for frozen in (False, True):
            layer.requires_grad_(not frozen)
            with pytest.raises(RuntimeError, match=words):
                torch.func.vmap(layer)(x[None])


def test_the_error_names_the_row_operation(device):
    x, sizes, order = torch.randn(4, 16, device=device), torch.tensor([1, 3]), torch.tensor([1, 0])
    sizes, order = sizes.to(device), order.to(device)
    for call, words in (
        (
            lambda x: te.moe_sort_chunks_by_index(x, sizes, order),
            "^moe_sort_chunks_by_index does not",
        ),
        (
            lambda x: te.moe_sort_chunks_by_index_with_probs(x, x[:, 0], sizes, order)[0],
            "^moe_sort_chunks_by_index_with_probs does not",
        ),
        (lambda x: te.Fp8Padding(2)(x, [1, 3])[0], "^Fp8Padding does not"),
        (lambda x: te.Fp8Unpadding(2)(x, [1, 3]), "^Fp8Unpadding does not"),
    ):
        with pytest.raises(RuntimeError, match=words):
            torch.func.vmap(call)(x[None])
        with pytest.raises(RuntimeError, match=words):
            torch.func.grad(lambda x, call=call: call(x).sum())(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_reject_tangents_instead_of_dropping_them(name, device, monkeypatch):
    def dual(device, *shape, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(shape, generator=generator).to(device, dtype)
        return forward_ad.make_dual(x, torch.ones_like(x))

    monkeypatch.setattr("tests.functions.test_torch_autocast.matrix", dual)
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="does not support forward-mode differentiation"),
    ):
        FUNCTIONS[name](device, torch.float32)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantizers_reject_tangents_instead_of_dropping_them(name, device):
    quantizer, x = create_quantizer(name, device), torch.randn(128, 64, device=device)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="a quantizer does not support"):
        quantizer(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding"])
@pytest.mark.parametrize("training", [True, False])
def test_attention_by_torch_operations_supports_reverse_mode(mask, training):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(16, 2, 4, 32, generator=generator) for _ in range(3))
    layer = te.DotProductAttention(4, 32, attn_mask_type=mask, attention_dropout=0.0).train(
        training
    )
    padding = torch.arange(16).view(1, 1, 1, 16) >= torch.tensor([12, 16]).view(2, 1, 1, 1)

    def call(x):
        return layer(x, k, v, attention_mask=padding if mask == "padding" else None)

    leaf = q.clone().requires_grad_()
    call(leaf).square().sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda x: call(x).square().sum())(q), leaf.grad)
    if mask != "padding":
        torch.testing.assert_close(
            torch.func.vmap(call)(torch.stack([q, 2 * q])), torch.stack([call(q), call(2 * q)])
        )
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: torch.func.grad(lambda x: call(x).square().sum())(x).sum())(q)


def test_every_layer_is_tested():
    assert {"Linear", "GroupedLinear", "TransformerLayer", "Sequential"} <= set(LAYERS)
