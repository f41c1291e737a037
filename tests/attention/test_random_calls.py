"""Random attention calls against softmax(softcap(scale q k^T) + bias) v in float64, with gradients."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import transformer_engine.pytorch as te
from tests.attention.attention_oracle import cumulative
from tests.support.tolerances import ATTENDED
from transformer_engine.pytorch.primitives.attention.visible import default_slopes

CASES, PER_TEST = 240, 20
MASKS = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
)


class Case(NamedTuple):
    """A call of DotProductAttention.

    Attributes:
        lengths: Query tokens and key tokens per sequence.
        extents: Query tokens and key tokens per packed sequence, including the padding behind it.
        bias: Bias type and shape.
    """

    format: str
    mask: str
    window: tuple[int, int] | None
    bottom_right: bool | None
    heads: tuple[int, int]
    sizes: tuple[int, int]
    lengths: tuple[list[int], list[int]]
    extents: tuple[list[int], list[int]]
    cross: bool
    bias: tuple[str, tuple[int, int, int, int] | None]
    slopes: str
    softmax: str
    softcap: float
    scale: float | None
    recompute: bool


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    layout = draw.choice(("bshd", "sbhd", "thd"))
    mask = draw.choice(MASKS[3:] if layout == "thd" else MASKS)
    batch, cross = draw.randint(1, 3), draw.random() < 0.4
    if "padding" in mask:
        lengths = [draw.randint(0 if layout == "thd" else 1, 7) for _ in range(batch)]
        lengths[0] = max(lengths[0], 1)
        rest = [draw.randint(1, 7) for _ in range(batch)] if cross else lengths
    else:
        lengths = [draw.randint(1, 7)] * batch
        rest = [draw.randint(1, 7)] * batch if cross else lengths
    gaps = draw.random() < 0.4
    extents = [n + draw.choice((0, 2)) * gaps for n in lengths]
    others_padded = extents if rest is lengths else [n + draw.choice((0, 3)) * gaps for n in rest]
    groups = draw.choice((1, 2))
    heads = (groups * draw.choice((1, 2, 3)), groups)
    window = None
    if draw.random() < 0.5:
        causal = "causal" in mask
        window = (
            draw.choice((0, 1, 3, -1 if causal else 2)),
            0 if causal else draw.choice((0, 1, 2)),
        )
    kind = draw.choice(("no_bias", "alibi", "post_scale_bias", "pre_scale_bias"))
    shape = None
    if kind.endswith("scale_bias"):
        kind = "no_bias" if layout == "thd" else kind
        sizes = (batch, heads[0], max(lengths), max(rest))
        shape = None if layout == "thd" else tuple(draw.choice((1, n)) for n in sizes)
    return Case(
        layout,
        mask,
        window,
        draw.choice((None, True, False)) if "causal" not in mask else None,
        heads,
        (draw.choice((4, 8)), draw.choice((4, 8))),
        (lengths, rest),
        (extents, others_padded),
        rest is not lengths,
        (kind, shape),  # pyright: ignore[reportArgumentType]
        draw.choice(("default", "heads", "batch")),
        draw.choice(("vanilla", "off-by-one", "learnable")),
        draw.choice((0.0, 0.3, 1.5, 20.0)),
        draw.choice((None, 0.7)),
        draw.random() < 0.2,
    )


def visible(case: Case, b: int) -> Tensor:
    """Whether query i in sequence b sees key j, bool [i, j], within the sequence's real tokens."""
    n, m = (lengths[b] for lengths in case.lengths)
    i, j = torch.arange(n)[:, None], torch.arange(m)[None]
    if "causal" in case.mask:
        shift = m - n if "bottom_right" in case.mask else 0
    else:
        shift = 0 if case.bottom_right is False else m - n
    ahead = j - i - shift
    left, right = case.window or (-1, -1)
    visible = ahead <= 0 if "causal" in case.mask else torch.ones(n, m, dtype=torch.bool)
    if left >= 0:
        visible = visible & (ahead >= -left)
    if right >= 0 and "causal" not in case.mask:
        visible = visible & (ahead <= right)
    return visible


def exact(
    case: Case, b: int, q: Tensor, k: Tensor, v: Tensor, bias: Any, slopes: Any, sink: Any
) -> Tensor:
    """Output [n, h, d_v] for one sequence q [n, h, d], k [m, g, d], v [m, g, d_v], in float64."""
    heads, groups = case.heads
    k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    n, m = q.shape[0], k.shape[0]
    scores = torch.einsum("ihd,jhd->hij", q, k)
    scale = case.scale if case.scale is not None else 1 / math.sqrt(case.sizes[0])
    added = 0.0
    if bias is not None:
        full = bias.expand(len(case.lengths[0]), heads, -1, -1)[b]
        added = full.expand(heads, max(case.lengths[0]), max(case.lengths[1]))[:, :n, :m]
    if case.bias[0] == "pre_scale_bias":
        scores, added = scores + added, 0.0
    scores = scores * scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores + added
    if slopes is not None:
        top_left = case.mask in ("causal", "padding_causal") or (
            "causal" not in case.mask and case.bottom_right is False
        )
        shift = 0 if top_left else m - n
        distance = (torch.arange(m)[None] - torch.arange(n)[:, None] - shift).abs()
        scores = scores - (slopes if slopes.ndim == 1 else slopes[b])[:, None, None] * distance
    observed = visible(case, b)
    exponentials = torch.where(observed, scores, -math.inf).exp()
    total = exponentials.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.exp()[:, None, None]
    p = torch.where(observed.any(-1)[None, :, None], exponentials / total.clamp(min=1e-300), 0.0)
    return torch.einsum("hij,jhd->ihd", p, v)


def packed(parts: list[Tensor], case: Case, side: int) -> Tensor:
    """Sequence tensors in the call's format; padding is 3."""
    extents = case.extents[side] if case.format == "thd" else [max(case.lengths[side])] * len(parts)
    rows = [
        torch.cat((x, x.new_full((size - x.shape[0], *x.shape[1:]), 3.0)))
        for x, size in zip(parts, extents, strict=True)
    ]
    if case.format == "thd":
        return torch.cat(rows)
    return torch.stack(rows, 0 if case.format == "bshd" else 1)


def split_sequences(x: Tensor, case: Case, side: int) -> list[Tensor]:
    """Split a tensor in the call's format into sequences, without padding."""
    if case.format == "thd":
        starts = cumulative(case.extents[side], "cpu").tolist()
        return [x[a : a + n] for a, n in zip(starts, case.lengths[side], strict=False)]
    rows = x.unbind(0 if case.format == "bshd" else 1)
    return [row[:n] for row, n in zip(rows, case.lengths[side], strict=True)]


def compare(seed: int, device: Any) -> None:
    case = random_case(seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    (heads, groups), (size, size_v) = case.heads, case.sizes
    shapes = ((0, heads, size), (1, groups, size), (1, groups, size_v))
    parts = [[normal(n, h, d) for n in case.lengths[side]] for side, h, d in shapes]
    leaves = [packed(x, case, side) for x, (side, _, _) in zip(parts, shapes, strict=True)]
    kind, shape = case.bias
    bias = None if shape is None else normal(*shape)
    slopes = None
    if kind == "alibi":
        batch = len(case.lengths[0])
        usual = default_slopes(heads, torch.device("cpu"))
        slopes = {
            "default": usual,
            "heads": normal(heads).abs(),
            "batch": normal(batch, heads).abs(),
        }[case.slopes]
    layer = te.DotProductAttention(
        heads,
        case.sizes,
        groups,
        qkv_format=case.format,
        attn_mask_type=case.mask,
        window_size=case.window,
        bottom_right_diagonal=case.bottom_right,
        softcap=case.softcap,
        softmax_type=case.softmax,
        softmax_scale=case.scale,
        attention_type="cross" if case.cross else "self",
    ).to(device)
    sink = None if case.softmax == "vanilla" else torch.zeros(heads)
    if case.softmax == "learnable":
        sink = normal(heads)
        with torch.no_grad():
            layer.softmax_offset.copy_(sink)
    leaf = [x.to(device).requires_grad_() for x in (*leaves, *(() if bias is None else (bias,)))]
    arguments: dict[str, Any] = {
        "core_attention_bias_type": kind,
        "checkpoint_core_attention": case.recompute,
    }
    if bias is not None:
        arguments["core_attention_bias"] = leaf[3]
    if slopes is not None and case.slopes != "default":
        arguments["alibi_slopes"] = slopes.to(device)
    if "padding" in case.mask:
        bounds = [cumulative(x, device) for x in (*case.lengths, *case.extents)]
        if not case.cross:
            bounds[1], bounds[3] = bounds[0], bounds[2]
        arguments |= {"cu_seqlens_q": bounds[0], "cu_seqlens_kv": bounds[1]}
        if case.extents != case.lengths and case.format == "thd":
            arguments |= {"cu_seqlens_q_padded": bounds[2], "cu_seqlens_kv_padded": bounds[3]}
    out = layer(*leaf[:3], **arguments)
    grads = [normal(n, heads, size_v) for n in case.lengths[0]]
    upstream = packed(grads, case, 0).flatten(-2).to(device)
    if case.softmax == "learnable":
        leaf.append(layer.softmax_offset)
    actual = torch.autograd.grad(out, leaf, upstream)

    wide = [[x.double().requires_grad_() for x in rows] for rows in parts]
    wide_bias = None if bias is None else bias.double().requires_grad_()
    wide_sink = None if sink is None else sink.double().requires_grad_()
    wide_slopes = None if slopes is None else slopes.double()
    rows = [
        exact(case, b, *x, wide_bias, wide_slopes, wide_sink)
        for b, x in enumerate(zip(*wide, strict=True))
    ]
    total = sum((row * grad.double()).sum() for row, grad in zip(rows, grads, strict=True))
    rest = [
        x for x in (wide_bias, wide_sink if case.softmax == "learnable" else None) if x is not None
    ]
    expected = torch.autograd.grad(
        total, [x for group in wide for x in group] + rest, allow_unused=True
    )

    def check(name: str, got: Tensor, expected_value: Tensor) -> None:
        torch.testing.assert_close(
            got.double().cpu(),
            expected_value.detach(),
            **ATTENDED,
            msg=lambda text: f"{name} of case {seed}, {case}: {text}",
        )

    for got, reference in zip(
        split_sequences(out.unflatten(-1, (heads, size_v)), case, 0), rows, strict=True
    ):
        check("output", got, reference)
    real = sum(case.lengths[0]) * heads * size_v
    assert (out != 0).sum() <= real, "padding has no output"
    count = len(case.lengths[0])
    for index, name in enumerate(("q", "k", "v")):
        exact_gradients = expected[index * count : (index + 1) * count]
        for got, reference, x in zip(
            split_sequences(actual[index], case, min(index, 1)),
            exact_gradients,
            wide[index],
            strict=True,
        ):
            check(
                f"gradient of {name}", got, torch.zeros_like(x) if reference is None else reference
            )
        assert (actual[index] != 0).sum() <= sum(x.numel() for x in parts[index]), (
            f"padding in {name}"
        )
    for got, reference in zip(actual[3:], expected[3 * count :], strict=True):
        check("gradient of bias or sink", got, reference)


@pytest.mark.parametrize("first", range(0, CASES, PER_TEST))
def test_random_calls_equal_the_equation_in_float64(first, device):
    for seed in range(first, first + PER_TEST):
        compare(seed, device)


def test_the_cases_cover_every_pair_of_options():
    cases = [random_case(seed) for seed in range(CASES)]
    options = {
        "format": ("bshd", "sbhd", "thd"),
        "mask": MASKS,
        "softmax": ("vanilla", "off-by-one", "learnable"),
        "window": (True, False),
        "grouped": (True, False),
        "bias": ("no_bias", "alibi", "post_scale_bias"),
    }
    results = set()
    for case in cases:
        values = {
            "format": case.format,
            "mask": case.mask,
            "softmax": case.softmax,
            "window": case.window is not None,
            "grouped": case.heads[0] > case.heads[1],
            "bias": case.bias[0],
        }
        if case.softcap:
            results |= {(a, values[a], b, values[b]) for a in values for b in values}
    impossible = {
        ("thd", kind) for kind in ("no_mask", "causal", "causal_bottom_right", "post_scale_bias")
    }
    for a, choices in options.items():
        for b, rest in options.items():
            if a < b:
                missing = {
                    (x, y)
                    for x in choices
                    for y in rest
                    if (a, x, b, y) not in results
                    and (x, y) not in impossible
                    and (y, x) not in impossible
                }
                assert not missing, (a, b, missing)
