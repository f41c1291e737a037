"""A call that may run again with gradients chooses its backend as if it recorded them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.attention.dot_product_attention.last_choice import last_choice
from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionParams
from transformer_engine.pytorch.attention.inference import InferenceParams
from transformer_engine.pytorch.primitives.attention.choose import explain

HEADS, SIZE, TOKENS, BATCH = 2, 16, 8, 2
CHECKPOINTS = {
    "te reentrant": lambda function, *x: te.checkpoint(function, *x, use_reentrant=True),
    "te": lambda function, *x: te.checkpoint(function, *x, use_reentrant=False),
    "torch reentrant": lambda function, *x: torch_checkpoint(function, *x, use_reentrant=True),
    "torch": lambda function, *x: torch_checkpoint(function, *x, use_reentrant=False),
}


def heads(device, gradient=True):
    return [
        torch.randn(TOKENS, BATCH, HEADS, SIZE, device=device, requires_grad=gradient)
        for _ in range(3)
    ]


def expects_gradients() -> bool:
    """Whether the last attention was planned with a backward pass."""
    return last_choice.seen[0].needs_gradient


@pytest.mark.parametrize("training", [True, False])
def test_only_training_mode_expects_gradients_where_none_are_recorded(training, device):
    attention, x = te.DotProductAttention(HEADS, SIZE).train(training), heads(device)
    with torch.no_grad():
        attention(*x)
    assert expects_gradients() is training
    with torch.inference_mode():
        attention(*heads(device, gradient=False))
    assert not expects_gradients()
    attention(*heads(device, gradient=False))
    assert expects_gradients() is training


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("training", [True, False])
def test_both_runs_of_a_checkpoint_have_one_plan(name, training, device):
    attention, x, calls = te.DotProductAttention(HEADS, SIZE).train(training), heads(device), []

    def run(*x):
        y = attention(*x)
        calls.append(last_choice.seen[0])
        return y

    CHECKPOINTS[name](run, *x).sum().backward()
    # Without reentry the second run ends with the last saved tensor, before the function does.
    assert len(calls) == 1 + ("reentrant" in name)
    assert all(call == calls[0] and call.needs_gradient for call in calls)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("kind", ["MultiheadAttention", "TransformerLayer"])
def test_layers_plan_both_runs_alike(name, kind, device):
    sizes = (
        (HEADS * SIZE, HEADS)
        if kind == "MultiheadAttention"
        else (HEADS * SIZE, HEADS * SIZE, HEADS)
    )
    layer, calls = getattr(te, kind)(*sizes, device=device), []
    x = torch.randn(TOKENS, BATCH, HEADS * SIZE, device=device, requires_grad=True)

    def run(x):
        y = layer(x)
        calls.append(last_choice.seen[0])
        return y

    CHECKPOINTS[name](run, x).sum().backward()
    # Without reentry the second run ends with the last saved tensor, before the function does.
    assert len(calls) == 1 + ("reentrant" in name)
    assert all(call == calls[0] and call.needs_gradient for call in calls)


def test_cached_steps_expect_no_gradients(device):
    attention = te.DotProductAttention(HEADS, SIZE, layer_number=1, qkv_format="bshd")
    cache = InferenceParams(BATCH, TOKENS, HEADS, SIZE, torch.float32)
    cache.allocate_memory(1)
    cache.pre_step(dict.fromkeys(range(BATCH), 4))
    x = [torch.randn(BATCH, 4, HEADS, SIZE, device=device) for _ in range(3)]
    with torch.no_grad():
        attention(*x, inference_params=cache, attn_mask_type="padding_causal")
    assert not expects_gradients()


def rejections(**options):
    call = AttentionParams(deterministic=True, **options).request()
    verdicts = explain(dataclasses.replace(call, device_type="cuda", hardware=nvidia(9, 0)))
    return {verdict.backend for verdict in verdicts if "determin" in (verdict.reason or "")}


def test_the_environment_and_not_the_gradient_mode_demands_determinism():
    training = rejections(is_training=True)
    assert training >= {"torch_sdpa", "torch_cudnn", "flex"}
    assert rejections(is_training=False) == training


@pytest.mark.parametrize("warns_only", [False, True])
def test_torch_operators_that_only_warn_are_not_deterministic(warns_only):
    torch.use_deterministic_algorithms(True, warn_only=warns_only)
    try:
        result = rejections(is_training=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ({"torch_sdpa", "torch_flash"} <= result) is warns_only


def test_cached_steps_keep_backends_without_deterministic_gradients():
    cache = InferenceParams(BATCH, TOKENS, HEADS, SIZE, torch.float32)
    assert "torch_sdpa" not in rejections(is_training=False, inference_params=cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_repeats_the_dropout_mask(name, dtype, device, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    attention = te.DotProductAttention(HEADS, SIZE, attention_dropout=0.3)
    x = [tensor.detach().to(dtype).requires_grad_() for tensor in heads(device)]
    results = []
    for call in (lambda *x: attention(*x), lambda *x: CHECKPOINTS[name](attention, *x)):
        torch.manual_seed(3)
        y = call(*x)
        y.float().sin().sum().backward()
        results.append([y.detach(), *[tensor.grad for tensor in x]])
        for tensor in x:
            tensor.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
