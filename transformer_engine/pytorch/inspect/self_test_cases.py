"""All self-test cases, including attention and linear attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.self_test import SelfTestSizes
from ..attention import DotProductAttention, GatedDeltaNet2Attention, GatedDeltaNetAttention
from ..quantization import autocast
from .self_test_products import (
    Draw,
    SelfTestCase,
    Tensors,
    draw_values,
    fp8_attention_recipes,
    grouped_cases,
    product_cases,
    uneven_cases,
)

# P is rounded to bfloat16 before the second product, dP and dS in the backward pass too.
ATTENTION_BOUND, FP8_ATTENTION_BOUND = 2e-2, 0.15
# Products in a chunk round their operands to bfloat16.
LINEAR_ATTENTION_BOUND = 4e-2
LINEAR_ATTENTION_TOKENS = 256  # four chunks


def cases(device: torch.device, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    """Yield the cases, those that decide about recipes first; inputs are allocated when a case is taken."""
    draw = partial(draw_values, device)
    yield from product_cases(draw, sizes)
    yield from attention_cases(draw, sizes)
    yield from grouped_cases(draw, sizes)
    yield from linear_attention_cases(draw, sizes)
    yield from uneven_cases(draw, sizes)


def attention_cases(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    """Yield attention in 16 bits, FP8 and MXFP8."""
    for heads, groups, depth in ((16, 16, 128), (16, 4, 64)):
        q = draw(2, sizes.tokens, heads, depth, spread=False)
        k, v = (draw(2, sizes.tokens, groups, depth, seed=seed, spread=False) for seed in (1, 2))
        name = f"2 x {sizes.tokens}, {heads} and {groups} heads of {depth}, causal"
        shared = {"bound": ATTENTION_BOUND, "baseline": partial(_torch_attention, q, k, v)}
        yield SelfTestCase(
            "attention", name, "attention", partial(_attend, q, k, v, None, True), **shared
        )
        if groups == heads:
            forward = partial(_attend, q, k, v, None, False)
            yield SelfTestCase(
                "attention", f"{name}, forward", "attention", forward, ATTENTION_BOUND
            )
            for path, scaling, recipe in fp8_attention_recipes():
                yield SelfTestCase(
                    path,
                    f"{name}, {scaling} scaling",
                    "fp8_attention",
                    partial(_attend, q, k, v, recipe, True),
                    FP8_ATTENTION_BOUND,
                    baseline=shared["baseline"],
                )


def _attend(q: Tensor, k: Tensor, v: Tensor, recipe: Any, backward: bool) -> Tensors:
    layer = DotProductAttention(
        q.shape[2], q.shape[3], num_gqa_groups=k.shape[2], qkv_format="bshd"
    )
    query, key, value = (x.clone().requires_grad_(backward) for x in (q, k, v))
    with autocast(enabled=recipe is not None, recipe=recipe), torch.set_grad_enabled(backward):
        out = layer(query, key, value, attn_mask_type="causal")
    if not backward:
        return (out,)
    return (out.detach(), *torch.autograd.grad(out, (query, key, value), q.reshape(out.shape)))


def _torch_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    repeated = inputs[0].shape[1] // inputs[1].shape[1]
    key, value = (x.repeat_interleave(repeated, 1) for x in inputs[1:])
    out = F.scaled_dot_product_attention(inputs[0], key, value, is_causal=True)
    torch.autograd.grad(out, inputs, out.detach())


def linear_attention_cases(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    """Yield the gated delta rules, whose reference computes the tokens one after another."""
    tokens = min(sizes.tokens, LINEAR_ATTENTION_TOKENS)
    for size in (64, 128):
        q, k, v = (draw(2, tokens, 4, size, seed=seed, spread=False) for seed in range(3))
        logits = [draw(2, tokens, 4, size, seed=seed, spread=False) for seed in range(3, 6)]
        decay, erase, write = (
            F.logsigmoid(logits[0].float()),
            torch.sigmoid(logits[1]),
            torch.sigmoid(logits[2]),
        )
        of_heads = (decay[..., 0], erase[..., 0].float())
        modules: dict[str, tuple[torch.nn.Module, Tensors]] = {
            "Gated DeltaNet": (GatedDeltaNetAttention(4, size, "bshd"), of_heads),
            "Gated DeltaNet 2": (GatedDeltaNet2Attention(4, size, "bshd"), (decay, erase, write)),
        }
        for title, (module, gates) in modules.items():
            compute = partial(_delta_rule, module, (q, k, v, *gates))
            name = f"{title}, 2 x {tokens}, 4 heads of {size}"
            yield SelfTestCase(
                "linear attention", name, "linear_attention", compute, LINEAR_ATTENTION_BOUND
            )


def _delta_rule(module: torch.nn.Module, tensors: Tensors) -> Tensors:
    inputs = [x.clone().requires_grad_() for x in tensors]
    out = module(*inputs, use_qk_l2norm_in_kernel=True)
    return (out.detach(), *torch.autograd.grad(out, inputs, tensors[0].reshape(out.shape)))
