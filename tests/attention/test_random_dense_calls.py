"""Random dense calls that `test_random_calls` does not draw, against explicit score matrices in float64.

They have masks as tensors, packed projections, 16-bit inputs, a softcap in the constructor or the call,
broadcast-bias gradients, and largest logits.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import transformer_engine.pytorch as te

CASES, PER_TEST = 120, 10
RESULTS = ("output", "q", "k", "v", "bias")
MASKS = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal_bottom_right",
    "arbitrary",
)
# Largest error relative to the largest value: each factor and result is rounded once.
BOUNDS = {torch.float32: 5e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}


class Case(NamedTuple):
    """A call: `sizes` are (b, s_q, s_kv, groups, heads per group, d_qk, d_v)."""

    sizes: tuple[int, int, int, int, int, int, int]
    mask: str
    lengths: tuple[list[int], list[int]]
    window: tuple[int, int]
    bottom_right: bool
    bias: str
    bias_axes: tuple[bool, bool, bool, bool]
    softcap: float
    in_constructor: bool
    packed: bool
    dtype: torch.dtype


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    mask, batch, cross = draw.choice(MASKS), draw.randint(1, 3), draw.random() < 0.5
    packed = not cross and draw.random() < 0.4
    queries = draw.randint(1, 17)
    keys = draw.randint(1, 17) if cross else queries
    groups, per_group = draw.randint(1, 3), 1 if packed else draw.randint(1, 3)
    size = draw.choice((3, 8, 16))
    lengths = [draw.randint(1, queries) for _ in range(batch)]
    window = draw.choice(((-1, -1), (0, 1), (2, 0), (3, 5)))
    return Case(
        (batch, queries, keys, groups, per_group, size, size if packed else draw.choice((4, 5, 8))),
        mask,
        (lengths, [draw.randint(1, keys) for _ in range(batch)] if cross else lengths),
        (window[0], 0) if "causal" in mask else window,
        draw.random() < 0.7,
        draw.choice(("no_bias", "pre_scale_bias", "post_scale_bias")),
        (draw.random() < 0.6, draw.random() < 0.6, draw.random() < 0.6, draw.random() < 0.6),
        draw.choice((0.5, 1.0, 3.0, 50.0)),
        draw.random() < 0.5,
        packed,
        draw.choice(tuple(BOUNDS)),
    )


def hidden(case: Case, masked: Tensor) -> Tensor:
    """Whether sequence b hides key j from query i, bool [b, 1, s_q, s_kv]."""
    batch, queries, keys = case.sizes[:3]
    full = ([queries] * batch, [keys] * batch)
    real_q, real_kv = (torch.tensor(n) for n in (case.lengths if "padding" in case.mask else full))
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    aligned = "bottom_right" in case.mask or ("causal" not in case.mask and case.bottom_right)
    ahead = j - i - (real_kv - real_q)[:, None, None] * aligned
    unseen = (i >= real_q[:, None, None]) | (j >= real_kv[:, None, None])
    if "causal" in case.mask:
        unseen = unseen | (ahead > 0)
    left, right = case.window
    if left >= 0:
        unseen = unseen | (ahead < -left)
    if right >= 0 and "causal" not in case.mask:
        unseen = unseen | (ahead > right)
    return unseen[:, None] | (masked if case.mask == "arbitrary" else False)


def exact(
    case: Case, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, unseen: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [b, s_q, h d_v] and capped, biased scores [b, h, s_q, s_kv] from bshd tensors."""
    k, v = (x.repeat_interleave(case.sizes[4], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    if bias is not None and case.bias == "pre_scale_bias":
        scores = scores + bias
    scores = case.softcap * torch.tanh(scores / math.sqrt(case.sizes[5]) / case.softcap)
    if bias is not None and case.bias == "post_scale_bias":
        scores = scores + bias
    scores = scores.masked_fill(unseen, -math.inf)
    exponentials = (scores - scores.detach().amax(-1, keepdim=True).clamp(min=-1e9)).exp()
    p = exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.einsum("bhij,bjhd->bihd", p, v).flatten(2), scores


def absolute_terms(
    case: Case, inputs: list[Tensor], scores: Tensor, grad: Tensor
) -> dict[str, float]:
    """Largest sum of absolute terms per result, whose roundings remain where the terms cancel."""
    q, k, v = (x.detach().abs() for x in inputs[:3])
    k, v = (x.repeat_interleave(case.sizes[4], 2) for x in (k, v))
    grad = grad.view(*q.shape[:3], -1).abs()
    p = scores.detach().softmax(-1).nan_to_num()
    dp = torch.einsum("bihd,bjhd->bhij", grad, v)
    ds = p * (dp + (p * dp).sum(-1, keepdim=True))  # from p (dp - sum p dp)

    def group_values(x: Tensor) -> Tensor:
        return x.unflatten(2, case.sizes[3:5]).sum(3)

    sums = {
        "output": torch.einsum("bhij,bjhd->bihd", p, v),
        "q": torch.einsum("bhij,bjhd->bihd", ds, k),
        "k": group_values(torch.einsum("bhij,bihd->bjhd", ds, q)),
        "v": group_values(torch.einsum("bhij,bihd->bjhd", p, grad)),
        "bias": ds.sum_to_size(inputs[3].shape) if len(inputs) > 3 else ds,
    }
    return {name: float(value.max()) for name, value in sums.items()}


def run(case: Case, seed: int, device: torch.device) -> None:
    batch, queries, keys, groups, per_group, d_qk, d_v = case.sizes
    heads, generator = groups * per_group, torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    inputs = [normal(batch, queries, heads, d_qk), normal(batch, keys, groups, d_qk)]
    inputs += [normal(batch, keys, groups, d_v)]
    grad = normal(batch, queries, heads * d_v)
    extents = zip(case.bias_axes, (batch, heads, queries, keys), strict=True)
    bias = None if case.bias == "no_bias" else normal(*[n if has else 1 for has, n in extents])
    masked = torch.rand(batch, 1, queries, keys, generator=generator) < 0.4
    arguments: dict[str, Any] = {} if case.in_constructor else {"softcap": case.softcap}
    if case.mask == "arbitrary":
        arguments["attention_mask"] = masked.to(device)
    elif "padding" in case.mask:
        pair = [
            (torch.arange(extent) >= torch.tensor(lengths)[:, None])[:, None, None].to(device)
            for extent, lengths in zip((queries, keys), case.lengths, strict=True)
        ]
        arguments["attention_mask"] = tuple(pair)
    layer = te.DotProductAttention(
        heads,
        (d_qk, d_v),
        groups,
        qkv_format="bshd",
        attn_mask_type=case.mask,
        window_size=case.window,
        attention_type="cross",
        softcap=case.softcap if case.in_constructor else 7.0,
        return_max_logit=True,
        bottom_right_diagonal=None if "causal" in case.mask else case.bottom_right,
    )
    leaves = [x.to(device).requires_grad_() for x in (*inputs, *([] if bias is None else [bias]))]
    if bias is not None:
        arguments |= {"core_attention_bias_type": case.bias, "core_attention_bias": leaves[3]}
    if case.packed:
        out, largest = layer(qkv_layer=torch.stack(leaves[:3], dim=-3), **arguments)
    else:
        out, largest = layer(*leaves[:3], **arguments)
    gradients = torch.autograd.grad(out, leaves, grad.to(device))
    wide = [x.detach().cpu().double().requires_grad_() for x in leaves]
    reference, scores = exact(
        case, *wide[:3], wide[3] if bias is not None else None, hidden(case, masked)
    )
    expected_value = torch.autograd.grad(reference, wide, grad.double())
    terms = absolute_terms(case, wide, scores, grad.double())
    for name, actual, expected in zip(
        RESULTS, (out, *gradients), (reference, *expected_value), strict=False
    ):
        expected = expected.detach()
        error = float((actual.detach().cpu().double() - expected).abs().max())
        rounding = torch.finfo(case.dtype).eps * terms[name]
        assert error <= BOUNDS[case.dtype] * float(expected.abs().max()) + rounding, (name, case)
    best = scores.detach().amax((0, 2, 3))
    visible = best.isfinite()
    actual = largest.cpu().double()
    assert (actual[~visible] == -math.inf).all(), case
    assert (
        (actual - best)[visible].abs() <= BOUNDS[case.dtype] * best[visible].abs().clamp(min=1)
    ).all(), case


@pytest.mark.parametrize("first", range(0, CASES, PER_TEST))
def test_random_calls_equal_explicit_score_matrices(first, device):
    for seed in range(first, first + PER_TEST):
        run(random_case(seed), seed, device)
