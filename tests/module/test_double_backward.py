"""Second derivatives through every module and recipe are correct, or raise with the operation's name."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, same
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.attention import (
    DotProductAttention,
    MultiheadAttention,
    apply_rotary_pos_emb,
)
from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb
from transformer_engine.pytorch.functions.activation import activation
from transformer_engine.pytorch.functions.dropout import bias_dropout_add, dropout
from transformer_engine.pytorch.functions.split_heads import split_heads
from transformer_engine.pytorch.module.softmax import FusedScaleMaskSoftmax
from transformer_engine.pytorch.primitives.activation import ACTIVATIONS
from transformer_engine.pytorch.quantization import autocast

HIDDEN, FFN, HEADS, TOKENS, BATCH = 32, 64, 2, 16, 2
HEAD = HIDDEN // HEADS


def second_order(function, tensors):
    """Gradients of sum(g^2), where g are the gradients of sin(function(tensors)), for every tensor."""
    y = function(*tensors)
    ys = y if isinstance(y, tuple) else (y,)
    loss = sum((part * (1 + i)).sin().sum() for i, part in enumerate(ys))
    first = torch.autograd.grad(loss, tensors, create_graph=True)
    return first, torch.autograd.grad(sum(g.square().sum() for g in first), tensors)


def assert_right(ours, plain, tensors):
    """Compare first and second derivatives in float32 with a plain float64 program."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    for result, exact in zip(second_order(ours, tensors), second_order(plain, wide), strict=True):
        for a, b in zip(result, exact, strict=True):
            a, b = a.detach(), b.detach()
            assert float((a - b).norm()) <= 2e-5 * float(b.norm()) + 1e-6


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_second_derivatives_of_norms_are_correct(kind, zero_centered, device):
    layer = getattr(te, kind)(HIDDEN, zero_centered_gamma=zero_centered, device=device)

    def ours(x, *parameters):
        names = [name for name, _ in layer.named_parameters()]
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    def plain(x, gamma, beta=0.0):
        if kind == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layer.eps) * (gamma + zero_centered)
            + beta
        )

    parameters = [torch.randn_like(p) for p in layer.parameters()]
    assert_right(ours, plain, [torch.randn(3, TOKENS, HIDDEN, device=device) + 0.5, *parameters])


def plain_activation(name):
    curve = {
        "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "glu": torch.sigmoid,
        "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": torch.relu,
        "srelu": lambda x: torch.relu(x) ** 2,
        "silu": torch.nn.functional.silu,
    }
    gates = {
        "geglu": "gelu",
        "glu": "glu",
        "qgeglu": "qgelu",
        "reglu": "relu",
        "sreglu": "srelu",
        "swiglu": "silu",
    }

    def clamped(x):
        a, b = x.chunk(2, -1)
        a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0)
        return a * torch.sigmoid(1.702 * a) * (b + 1)

    if name == "clamped_swiglu":
        return clamped
    if name in gates:
        return lambda x: curve[gates[name]](x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
    return curve[name]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_second_derivatives_of_activations_are_correct(name, device):
    x = torch.randn(TOKENS, HIDDEN, device=device) * (4 if name == "clamped_swiglu" else 1)
    assert_right(lambda x: activation(name, x), plain_activation(name), [x])


@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives_of_scaled_softmax_are_correct(causal, device):
    layer = FusedScaleMaskSoftmax(lambda scores, mask: scores.masked_fill(mask, -1e4))
    mask = None if causal else torch.rand(BATCH, 1, TOKENS, TOKENS, device=device) < 0.2

    def plain(x):
        hidden = torch.ones(TOKENS, TOKENS, device=device).triu(1).bool() if causal else mask
        return torch.softmax((x * 0.5).masked_fill(hidden, -torch.inf), -1)

    x = torch.randn(BATCH, HEADS, TOKENS, TOKENS, device=device) * 3
    assert_right(lambda x: layer(x, mask, "causal" if causal else "padding", 0.5), plain, [x])


def test_second_derivatives_of_dropout_and_residual_sums_are_correct(device):
    x, bias, residual = (torch.randn(*s, HIDDEN, device=device) for s in ((TOKENS,), (), (TOKENS,)))
    torch.manual_seed(3)
    saved = (dropout(torch.ones_like(x), 0.3) != 0).double() / 0.7

    def seeded(function):
        def run(*tensors):
            torch.manual_seed(3)
            return function(*tensors)

        return run

    assert_right(seeded(lambda x: dropout(x, 0.3)), lambda x: x * saved, [x])
    assert_right(
        seeded(lambda *t: bias_dropout_add(*t, 0.3)),
        lambda x, b, r: r + (x + b) * saved,
        [x, bias, residual],
    )
    assert_right(
        lambda *t: bias_dropout_add(*t, 0.0), lambda x, b, r: r + x + b, [x, bias, residual]
    )


def apply_rotation(x, angles):
    a, b = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-b, a), -1) * angles.sin()


def test_second_derivatives_of_rotary_embedding_and_head_splits_are_correct(device):
    angles = te.RotaryPositionEmbedding(HEAD)(TOKENS).to(device)
    x = torch.randn(TOKENS, BATCH, HEADS, HEAD, device=device)
    assert_right(
        lambda x: apply_rotary_pos_emb(x, angles), lambda x: apply_rotation(x, angles.double()), [x]
    )
    packed = torch.randn(TOKENS, BATCH, HEADS, 3 * HEAD, device=device)

    def plain(x):
        q, k, v = x.chunk(3, -1)
        return apply_rotation(q, angles.double()), apply_rotation(k, angles.double()), v * 1.0

    assert_right(
        lambda x: apply_fused_qkv_rotary_pos_emb(x, angles, angles, (HEAD, HEAD, HEAD)),
        plain,
        [packed],
    )

    def split(x):
        parts = x.unflatten(-1, (HEADS, 3, HEAD))
        return parts.select(-2, 0), parts.select(-2, 1), parts.select(-2, 2)

    flat = packed.flatten(-2)
    assert_right(lambda x: split_heads(x, HEADS, HEADS, HEAD, True), split, [flat])


@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_second_derivatives_of_attention_are_correct(softmax, form, device, monkeypatch):
    """Use the dense backend on a CPU, because torch differentiates its own attention operators."""
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    mask_type = "padding_causal" if form == "thd" else "causal"
    layer = DotProductAttention(
        HEADS, HEAD, qkv_format=form, attn_mask_type=mask_type, softmax_type=softmax
    )
    layer.to(device)
    lengths = torch.tensor([0, TOKENS, BATCH * TOKENS], dtype=torch.int32, device=device)
    options = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths} if form == "thd" else {}

    def ours(q, k, v, *sink):
        return torch.func.functional_call(
            layer, {"softmax_offset": sink[0]} if sink else {}, (q, k, v), options
        )

    def plain(q, k, v, *sink):
        order = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
        if form == "thd":
            q, k, v = (x.unflatten(0, (BATCH, TOKENS)) for x in (q, k, v))
        q, k, v = (x.permute(*order.get(form, order["bshd"])) for x in (q, k, v))
        hidden = torch.ones(TOKENS, TOKENS, device=device).triu(1).bool()
        logits = (q @ k.mT / HEAD**0.5).masked_fill(hidden, -torch.inf)
        if softmax != "vanilla":
            zero = logits.new_zeros(HEADS) if softmax == "off-by-one" else sink[0]
            logits = torch.cat((logits, zero.view(1, -1, 1, 1).expand(BATCH, HEADS, TOKENS, 1)), -1)
        out = torch.softmax(logits, -1)[..., :TOKENS] @ v
        out = out.permute(2, 0, 1, 3) if form == "sbhd" else out.permute(0, 2, 1, 3)
        return (out.flatten(0, 1) if form == "thd" else out).flatten(-2)

    shape = {"sbhd": (TOKENS, BATCH), "bshd": (BATCH, TOKENS), "thd": (BATCH * TOKENS,)}[form]
    tensors = [torch.randn(*shape, HEADS, HEAD, device=device) for _ in range(3)]
    if softmax == "learnable":
        tensors.append(torch.randn(HEADS, device=device))
    assert_right(ours, plain, tensors)


NO_DERIVATIVE = r"the gradients of ({}) have no derivative of their own"
LAYERS = {
    "linear": (lambda d: te.Linear(HIDDEN, FFN, device=d), "Linear"),
    "grouped_linear": (lambda d: te.GroupedLinear(2, HIDDEN, FFN, device=d), "GroupedLinear"),
    "layernorm_linear": (lambda d: te.LayerNormLinear(HIDDEN, FFN, device=d), "LayerNormLinear"),
    **{
        f"layernorm_mlp {name}": (
            lambda d, name=name: te.LayerNormMLP(HIDDEN, FFN, activation=name, device=d),
            "LayerNormMLP",
        )
        for name in ACTIVATIONS
    },
    "layernorm_mlp checkpoint": (
        lambda d: te.LayerNormMLP(HIDDEN, FFN, checkpoint=True, device=d),
        "LayerNormMLP",
    ),
    "attention": (
        lambda d: MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, softmax_type="off-by-one", device=d
        ),
        "Linear",
    ),
    "transformer": (
        lambda d: te.TransformerLayer(
            HIDDEN, FFN, HEADS, hidden_dropout=0.1, softmax_type="off-by-one", device=d
        ),
        "Linear|LayerNormLinear|LayerNormMLP|attention with dropout",
    ),
}


def gradients(layer, x, recipe, **how):
    """First-order gradients for the input and every parameter; the loss is a sum of sines."""
    arguments = ([x[..., 0].numel() // 2] * 2,) if isinstance(layer, te.GroupedLinear) else ()
    torch.manual_seed(7)
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, *arguments)
    leaves = [x, *layer.parameters()]
    return leaves, list(
        torch.autograd.grad(y.float().sin().sum(), leaves, allow_unused=True, **how)
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sampled
def test_linear_layers_have_first_derivatives_and_reject_second_ones(name, recipe, device):
    make, operation = LAYERS[name]
    layer = make(device)
    twin = copy.deepcopy(layer)  # with the same scaling states, which a pass changes
    x = torch.randn(TOKENS, 2 * BATCH, HIDDEN, device=device, requires_grad=True)
    _, plain = gradients(twin, x, RECIPES[recipe])
    leaves, recorded = gradients(layer, x, RECIPES[recipe], create_graph=True)
    results = [(a, b) for a, b in zip(plain, recorded, strict=True) if a is not None]
    dense = {"attention"} if device.type == "cpu" else {"attention", "transformer"}
    if name in dense:  # gradients are then dense and rounded differently, and so are their codes
        assert all(float((a - b.detach()).norm()) <= 0.02 * float(a.norm()) for a, b in results)
    else:
        assert same([a for a, _ in results], [b.detach() for _, b in results])
    penalty = sum(b.square().sum() for _, b in results)
    for expected in leaves:
        with pytest.raises(RuntimeError, match=NO_DERIVATIVE.format(operation)):
            torch.autograd.grad(penalty, expected, retain_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE.format(operation)):
        penalty.backward()


def test_fp8_attention_rejects_second_derivatives(device):
    layer = DotProductAttention(HEADS, HEAD).to(device)
    q, k, v = (
        torch.randn(TOKENS, BATCH, HEADS, HEAD, device=device, requires_grad=True) for _ in range(3)
    )
    with autocast(recipe=DelayedScaling(fp8_format=Format.HYBRID, fp8_dpa=True)):
        y = layer(q, k, v)
    (grad,) = torch.autograd.grad(y.sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE.format("FP8 attention")):
        torch.autograd.grad(grad.sum(), v)


def test_torchs_attention_has_correct_second_derivatives_or_is_unsupported(device):
    layer = DotProductAttention(HEADS, HEAD, attn_mask_type="no_mask").to(device)
    tensors = [torch.randn(TOKENS, BATCH, HEADS, HEAD, device=device) for _ in range(3)]

    def plain(q, k, v):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return (torch.softmax(q @ k.mT / HEAD**0.5, -1) @ v).permute(2, 0, 1, 3).flatten(-2)

    try:
        assert_right(layer, plain, tensors)
    except RuntimeError as error:
        assert re.search(
            r"attention.* is not implemented|" + NO_DERIVATIVE.format(".*"), str(error)
        )


@pytest.mark.parametrize("recipe", RECIPES)
def test_second_derivatives_that_bypass_a_layer_are_correct(recipe, device):
    layer = te.Linear(HIDDEN, FFN, device=device)
    x = torch.randn(2 * TOKENS, HIDDEN, device=device)
    other = torch.randn(HIDDEN, device=device, requires_grad=True)
    with autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        loss = layer(x).sin().sum() + other.sin().sum()
    grad, weight_grad = torch.autograd.grad(loss, [other, layer.weight], create_graph=True)
    assert weight_grad.requires_grad
    (second,) = torch.autograd.grad(grad.sum(), other)
    assert torch.allclose(second, -other.detach().sin())


def test_a_frozen_layer_passes_on_constant_gradients(device):
    layer = te.Linear(HIDDEN, FFN, bias=False, device=device).requires_grad_(False)
    x = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    dy = torch.randn(TOKENS, FFN, device=device)
    (grad,) = torch.autograd.grad(layer(x), x, dy, create_graph=True)
    assert torch.allclose(grad, dy @ layer.weight, atol=1e-5)


def test_the_placeholder_for_a_main_grad_gradient_requires_no_gradient(device):
    layer = te.Linear(HIDDEN, FFN, bias=False, fuse_wgrad_accumulation=True, device=device)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    layer.weight.grad_added_to_main_grad = False
    x = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    for create in (True, False):
        _, placeholder = torch.autograd.grad(layer(x).sum(), [x, layer.weight], create_graph=create)
    assert not placeholder.requires_grad


@pytest.mark.parametrize("make", [te.LayerNorm, torch.nn.LayerNorm], ids=["ours", "torch's"])
def test_a_reentrant_checkpoint_rejects_second_derivatives(make, device):
    layer = make(HIDDEN, device=device)
    x = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    te.checkpoint(layer, x, use_reentrant=True).sin().sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE.format("a reentrant checkpoint")):
        torch.autograd.grad(x.grad.sum(), x)


def test_a_non_reentrant_checkpoint_has_correct_second_derivatives(device):
    layer = te.LayerNorm(HIDDEN, device=device)
    x = torch.randn(TOKENS, HIDDEN, device=device)
    outputs = [
        second_order(f, [x.clone().requires_grad_()])[1][0]
        for f in (layer, lambda x: te.checkpoint(layer, x, use_reentrant=False))
    ]
    assert torch.equal(*outputs)
