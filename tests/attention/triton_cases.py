"""Requests for the Triton attention, with references in float64 and in PyTorch in the tensors' dtype."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_engine.common.hardware import NO_GPU
from transformer_engine.pytorch.primitives.attention import layout, mask, reference
from transformer_engine.pytorch.primitives.attention.call import (
    AttentionCall,
    AttentionInputs,
    Switches,
)
from transformer_engine.pytorch.primitives.attention.packed import lengths_of_mask
from transformer_engine.pytorch.primitives.attention.visible import visible as visible_of
from transformer_engine.pytorch.runtime.device import current_hardware


@dataclass(frozen=True)
class Case:
    """Sizes are those for the interpreter; a GPU takes `grown` times as many tokens."""

    name: str
    mask: str = "no_mask"
    window: tuple[int, int] | None = None
    bottom_right: bool | None = None
    form: str = "bshd"
    batch: int = 2
    heads: int = 2
    groups: int = 1
    size_q: int = 40
    size_kv: int = 56
    head: tuple[int, int] = (32, 32)
    lengths_q: tuple[int, ...] = (40, 23)
    lengths_kv: tuple[int, ...] = (37, 56)
    gaps: bool = False
    mask_tensors: bool = False
    hidden: tuple[int, ...] = ()
    bias: str = "no_bias"
    bias_shape: tuple[int, ...] = ()
    bias_dtype: torch.dtype | None = None
    slopes: str = "h"
    softmax: str = "vanilla"
    softcap: float = 0.0
    dropout: float = 0.0
    max_logit: bool = False
    packed_buffer: bool = False
    page: int = 0
    gradient: bool = True
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return self.name


class Outcome(NamedTuple):
    """`rounding` maps gradients that are sums to the elementwise root of the sum of their terms' squares."""

    output: Tensor
    max_logit: Tensor
    gradients: dict[str, Tensor]
    rounding: dict[str, Tensor]


def build(case: Case, device: torch.device, grown: int) -> tuple[AttentionCall, AttentionInputs]:
    """A case's request and tensors."""
    generator = torch.Generator().manual_seed(len(case.name) + 7 * case.size_q)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    rule = mask.resolve(case.mask, case.window, case.bottom_right)
    if case.window is not None:
        left, right = (size if size < 0 else min(size * grown, sys.maxsize) for size in case.window)
        rule = mask.resolve(case.mask, (left, right), case.bottom_right)
    packed = case.form == "thd"
    padded = rule.padding
    size_q, size_kv = case.size_q * grown, case.size_kv * grown
    lengths_q, lengths_kv = (
        torch.tensor(
            [length * grown - (length * grown > 7) * (i % 2) for i, length in enumerate(lengths)],
            dtype=torch.int32,
        )
        for lengths in (case.lengths_q, case.lengths_kv)
    )
    starts_q, starts_kv = (_starts(lengths, case.gaps) for lengths in (lengths_q, lengths_kv))
    q, k, v = _tensors(case, size_q, size_kv, starts_q, starts_kv, normal)
    page_table = None
    if case.page:
        k, v, page_table = _paged(case, k, v, generator)
    masked_q = masked_kv = None
    if case.mask_tensors:
        masked_q, masked_kv = (
            torch.rand(case.batch, 1, 1, n, generator=generator) < 0.3 for n in (size_q, size_kv)
        )
        lengths_q, lengths_kv = lengths_of_mask(masked_q), lengths_of_mask(masked_kv)
    masked = None
    if case.hidden:
        shape = [
            1 if n == 0 else m
            for n, m in zip(case.hidden, (case.batch, case.heads, size_q, size_kv), strict=True)
        ]
        masked = torch.rand(shape, generator=generator) < 0.4
        if shape[2] > 1:
            masked[..., 3, :] = True  # a row that sees nothing
    bias = None
    if case.bias_shape:
        shape = [
            1 if n == 0 else m
            for n, m in zip(case.bias_shape, (case.batch, case.heads, size_q, size_kv), strict=True)
        ]
        bias = normal(*shape).to(case.bias_dtype or case.dtype)
    slopes = None
    if case.bias == "alibi":
        shape = (case.heads,) if case.slopes == "h" else (case.batch, case.heads)
        slopes = torch.rand(shape, generator=generator) * (0.3 / grown)
    sink = None if case.softmax == "vanilla" else normal(case.heads) * (case.softmax == "learnable")

    def there(x: Tensor | None, expected: bool = True) -> Tensor | None:
        return x.to(device) if x is not None and expected else None

    inputs = AttentionInputs(
        q,
        k,
        v,
        there(lengths_q, padded),
        there(lengths_kv, padded),
        there(starts_q, packed),
        there(starts_kv, packed and not case.page),
        there(masked_q),
        there(masked_kv),
        there(masked),
        bias,
        there(slopes),
        there(sink),
        there(page_table),
    )
    request = AttentionCall(
        dtype=case.dtype,
        device_type=device.type,
        batch=case.batch,
        heads=case.heads,
        groups=case.groups,
        seqlen_q=size_q,
        seqlen_kv=size_kv,
        head_dim_qk=case.head[0],
        head_dim_v=case.head[1],
        q_format=case.form,
        kv_format="bshd" if case.page else case.form,
        mask=rule,
        scale=case.head[0] ** -0.5,
        switches=Switches(),
        bias=case.bias,
        softmax=case.softmax,
        softcap=case.softcap,
        dropout=case.dropout,
        padded_between=case.gaps,
        max_logit=case.max_logit,
        needs_gradient=case.gradient,
        hardware=current_hardware() if device.type == "cuda" else NO_GPU,
        bias_shape=None if bias is None else tuple(bias.shape),
        bias_gradient=bias is not None,
        slopes_shape=None if slopes is None else tuple(slopes.shape),
        slopes_given=slopes is not None,
        masked_shape=None if masked is None else tuple(masked.shape),
        padding_tensors=case.mask_tensors,
        page_size=case.page,
        cached=bool(case.page),
    )
    return request, inputs


def _starts(lengths: Tensor, gaps: bool) -> Tensor:
    room = lengths + 5 if gaps else lengths
    return torch.nn.functional.pad(room.cumsum(0), (1, 0)).to(torch.int32)


def _tensors(
    case: Case, size_q: int, size_kv: int, starts_q: Tensor, starts_kv: Tensor, normal
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with three tokens after the last packed sequence, optionally as views into one buffer."""

    def shape_like(starts: Tensor, size: int, form: str, heads: int, width: int) -> Tensor:
        if form == "thd":
            return normal(int(starts[-1]) + 3, heads, width).to(case.dtype)
        outer = (size, case.batch) if form == "sbhd" else (case.batch, size)
        return normal(*outer, heads, width).to(case.dtype)

    kv_form = "bshd" if case.page else case.form
    q = shape_like(starts_q, size_q, case.form, case.heads, case.head[0])
    if case.packed_buffer:
        buffer = shape_like(starts_q, size_q, case.form, case.heads + 2 * case.groups, case.head[0])
        q, k, v = buffer.split((case.heads, case.groups, case.groups), dim=-2)
        return q, k, v
    k = shape_like(starts_kv, size_kv, kv_form, case.groups, case.head[0])
    return q, k, shape_like(starts_kv, size_kv, kv_form, case.groups, case.head[1])


def _paged(
    case: Case, k: Tensor, v: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values on randomly ordered pages; some pages belong to no sequence."""
    pages = -(-k.shape[1] // case.page)
    order = torch.randperm(case.batch * pages + 2, generator=generator)[: case.batch * pages].to(
        k.device
    )
    stored = []
    for x in (k, v):
        full = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * case.page - x.shape[1]))
        cache = torch.randn(
            case.batch * pages + 2, case.page, *x.shape[2:], generator=generator
        ).to(x)
        cache[order] = full.reshape(case.batch * pages, case.page, *x.shape[2:])
        stored.append(cache)
    return stored[0], stored[1], order.reshape(case.batch, pages).to(torch.int32)


def literal(
    request: AttentionCall,
    inputs: AttentionInputs,
    grad_output: Tensor | None,
    dtype: torch.dtype,
    saved: Tensor | None,
) -> Outcome:
    """Attention as five lines of PyTorch in one dtype, and autograd's gradients."""
    leaves: dict[str, Tensor] = {}
    for name in ("q", "k", "v", "bias", "sink"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            leaves[name] = tensor.detach().to(dtype, copy=True).requires_grad_()
    inputs = inputs._replace(**leaves)
    q, k, v = layout.dense_qkv(request, inputs)
    share = request.heads // request.groups
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    logits = (q @ k.transpose(-1, -2)) * request.scale
    bias = reference.additive_bias(request, inputs)
    biased = logits
    if bias is not None:
        logits = biased = logits + bias.to(dtype)
    if request.softcap and request.bias == "pre_scale_bias":
        logits = request.softcap * torch.tanh(biased / request.softcap)
    elif request.softcap:
        logits = request.softcap * torch.tanh(
            (q @ k.transpose(-1, -2)) * request.scale / request.softcap
        )
        logits = biased = logits if bias is None else logits + bias.to(dtype)
    visible = visible_of(request, inputs)
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    max_logit = logits.detach().amax(dim=(0, 2, 3)).float()
    terms = {"bias": biased}
    if inputs.sink is not None:
        column = inputs.sink[None, :, None, None].expand(*logits.shape[:-1], 1)
        terms["sink"] = column
        probabilities = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
    else:
        blind = (logits == -torch.inf).all(-1, keepdim=True)
        probabilities = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    if saved is not None:
        probabilities = probabilities * saved / (1.0 - request.dropout)
    output = layout.from_bhsd(request, inputs, probabilities @ v)
    gradients, rounding = {}, {}
    if grad_output is not None:
        terms = {name: term for name, term in terms.items() if name in leaves}
        expected = [*leaves.values(), *terms.values()]
        actual = torch.autograd.grad(output, expected, grad_output.to(dtype), allow_unused=True)
        gradients = dict(zip(leaves, actual, strict=False))
        for name, term in zip(terms, actual[len(leaves) :], strict=True):
            shape = (1, request.heads, 1, 1) if name == "sink" else leaves[name].shape
            if term.shape != shape:
                rounding[name] = term.double().square().sum_to_size(shape).sqrt()
    return Outcome(output.detach(), max_logit, gradients, rounding)


def philox_kept(rng_state: Tensor, shape: tuple[int, int, int, int], probability: float) -> Tensor:
    """Philox4x32-7 (Salmon et al., Parallel Random Numbers, 2011), key = seed, counter = (j, i, head + high, low)."""
    b, h, size_q, size_kv = shape
    seed, offset = (int(x) for x in rng_state.tolist())
    low = (1 << 32) - 1
    device = rng_state.device
    one, two, three, four = torch.broadcast_tensors(
        torch.arange(size_kv, device=device)[None, None, None, :],
        torch.arange(size_q, device=device)[None, None, :, None],
        (torch.arange(b * h, device=device).reshape(b, h, 1, 1) + (offset >> 32)) & low,
        torch.full((1, 1, 1, 1), offset & low, device=device),
    )
    key_one, key_two = seed & low, (seed >> 32) & low

    def wide(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
        """(high, low) 32 bits of a product between two 32-bit numbers, without passing 2^63."""
        upper, lower = (x >> 16) * factor, (x & 0xFFFF) * factor
        total = upper + (lower >> 16)
        return total >> 16, ((total & 0xFFFF) << 16) | (lower & 0xFFFF)

    for _ in range(7):
        high_two, low_two = wide(three, 0xCD9E8D57)
        high_one, low_one = wide(one, 0xD2511F53)
        one, two, three, four = (
            high_two ^ two ^ key_one,
            low_two,
            high_one ^ four ^ key_two,
            low_one,
        )
        key_one, key_two = (key_one + 0x9E3779B9) & low, (key_two + 0xBB67AE85) & low
    signed = torch.where(one >= 1 << 31, one - (1 << 32), one)
    magnitude = torch.where(signed < 0, -signed - 1, signed)
    return magnitude.to(torch.float32) * 4.6566127342e-10 >= probability


# Each case shows one feature; the interpreter runs these.
PLAIN = (
    Case("everything visible", max_logit=True),
    Case("causal", mask="causal", size_kv=40, form="sbhd"),
    Case(
        "causal bottom right, one buffer",
        mask="causal_bottom_right",
        size_kv=40,
        packed_buffer=True,
    ),
    Case("window, cross attention", window=(40, 4), size_q=56, size_kv=41),
    Case(
        "a window of 2^31 - 1",
        mask="causal_bottom_right",
        window=(2**31 - 1, 0),
        size_q=56,
        size_kv=41,
    ),
    Case(
        "two windows of 2^31 - 1",
        window=(2**31 - 1, 2**31 - 1),
        bias="post_scale_bias",
        bias_shape=(1, 0, 1, 1),
    ),
    Case(
        "a window of 2^63 - 1", mask="padding_causal", window=(sys.maxsize, 0), lengths_kv=(40, 23)
    ),
    Case("padding", mask="padding", softmax="off-by-one"),
    Case("padding as tensors", mask="padding", mask_tensors=True, softmax="learnable"),
    Case(
        "packed causal with gaps",
        mask="padding_causal_bottom_right",
        form="thd",
        gaps=True,
        softmax="learnable",
    ),
    Case(
        "arbitrary",
        mask="arbitrary",
        hidden=(1, 0, 1, 1),
        bias="post_scale_bias",
        bias_shape=(0, 1, 1, 1),
    ),
    Case(
        "bias before the scale",
        bias="pre_scale_bias",
        bias_shape=(1, 0, 0, 1),
        mask="causal",
        size_kv=40,
        groups=2,
    ),
    Case("alibi of each sequence", bias="alibi", slopes="bh", mask="causal_bottom_right"),
    Case("dropout", dropout=0.3, mask="causal", size_kv=40, groups=2),
    Case("two head sizes", head=(48, 24), mask="causal_bottom_right", dtype=torch.float16),
    Case("float32", head=(20, 16), mask="padding_causal", lengths_kv=(40, 23), dtype=torch.float32),
    Case("softcap", softcap=0.7, mask="causal", size_kv=40, max_logit=True),
    Case(
        "softcap behind a bias",
        softcap=1.5,
        bias="pre_scale_bias",
        bias_shape=(1, 0, 0, 1),
        window=(9, 4),
        groups=2,
    ),
    Case(
        "softcap before a bias",
        softcap=1.5,
        bias="post_scale_bias",
        bias_shape=(1, 1, 1, 1),
        softmax="learnable",
    ),
    Case(
        "softcap, alibi, packed",
        softcap=0.9,
        bias="alibi",
        mask="padding_causal",
        form="thd",
        lengths_kv=(40, 23),
    ),
    Case(
        "softcap of float32",
        softcap=30.0,
        head=(20, 16),
        mask="causal",
        size_kv=40,
        dtype=torch.float32,
    ),
    Case("softcap of small scores", softcap=5000.0, size_kv=40, dtype=torch.float32, dropout=0.3),
)


def pairs() -> list[Case]:
    """Few cases, chosen greedily, that cover every pair of options from different axes."""
    kinds = {
        "mask": [
            {"mask": "no_mask"},
            {"mask": "padding"},
            {"mask": "causal"},
            {"mask": "padding_causal"},
            {"mask": "causal_bottom_right"},
            {"mask": "padding_causal_bottom_right"},
            {"mask": "padding", "mask_tensors": True},
            {"mask": "arbitrary", "hidden": (1, 1, 1, 1)},
            {"mask": "arbitrary", "hidden": (0, 0, 0, 1)},
        ],
        "window": [
            {},
            {"window": (11, 6)},
            {"window": (5, 0)},
            {"window": (8, 8), "bottom_right": False},
        ],
        "form": [
            {"form": "bshd"},
            {"form": "sbhd"},
            {"form": "thd"},
            {"form": "thd", "gaps": True},
        ],
        "bias": [
            {},
            {"bias": "post_scale_bias", "bias_shape": (1, 1, 1, 1)},
            {"bias": "pre_scale_bias", "bias_shape": (0, 1, 1, 1), "bias_dtype": torch.float32},
            {"bias": "post_scale_bias", "bias_shape": (0, 0, 1, 1)},
            {"bias": "post_scale_bias", "bias_shape": (1, 1, 0, 1)},
            {"bias": "post_scale_bias", "bias_shape": (1, 0, 1, 0)},
            {"bias": "alibi"},
            {"bias": "alibi", "slopes": "bh"},
        ],
        "softmax": [{"softmax": kind} for kind in ("vanilla", "off-by-one", "learnable")],
        "softcap": [{}, {"softcap": 1.0}, {"softcap": 20.0}],
        "dropout": [{}, {"dropout": 0.2}],
        "heads": [{"heads": 4, "groups": groups} for groups in (1, 2, 4)],
        "head": [
            {"head": head}
            for head in ((64, 64), (128, 128), (40, 40), (192, 128), (96, 64), (256, 256), (17, 30))
        ],
        "dtype": [{"dtype": dtype} for dtype in (torch.bfloat16, torch.float16, torch.float32)],
        "sizes": [
            {"size_q": 40, "size_kv": 56},
            {"size_q": 56, "size_kv": 40, "lengths_kv": (40, 11)},
        ],
    }
    names = list(kinds)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(kinds[names[a]]))
        for j in range(len(kinds[names[b]]))
        if _compatible(names[a], kinds[names[a]][i], names[b], kinds[names[b]][j])
    }
    cases = []
    generator = torch.Generator().manual_seed(0)
    while missing:
        chosen = _richest(kinds, names, missing, generator)
        covered = {
            (a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(range(len(names)), 2)
        }
        missing -= covered
        options: dict = {}
        for index, name in enumerate(names):
            options |= kinds[name][chosen[index]]
        cases.append(Case(f"pairwise {len(cases)}", max_logit=True, **options))
    return cases


def _compatible(a: str, first: dict, b: str, second: dict) -> bool:
    joint = first | second
    if joint.get("form") == "thd" and "mask" in joint:
        return joint["mask"].startswith("padding") and not joint.get("mask_tensors")
    if "window" in joint and "causal" in joint.get("mask", ""):
        return "bottom_right" not in joint
    return True


def _richest(kinds: dict, names: list[str], missing: set, generator: torch.Generator) -> list[int]:
    """The best of 60 random choices built around a missing pair: it covers the most missing pairs."""
    best, most = [], -1
    ordered = sorted(missing)
    for _ in range(60):
        a, i, b, j = ordered[int(torch.randint(len(ordered), (1,), generator=generator))]
        choice = [int(torch.randint(len(kinds[name]), (1,), generator=generator)) for name in names]
        choice[a], choice[b] = i, j
        fixed = {a, b}
        for _ in range(20):
            clash = next(
                (
                    (x, y)
                    for x, y in itertools.combinations(range(len(names)), 2)
                    if not _compatible(
                        names[x], kinds[names[x]][choice[x]], names[y], kinds[names[y]][choice[y]]
                    )
                ),
                None,
            )
            if clash is None:
                break
            change = next((x for x in clash if x not in fixed), clash[0])
            choice[change] = int(
                torch.randint(len(kinds[names[change]]), (1,), generator=generator)
            )
        else:
            continue
        if (choice[a], choice[b]) != (i, j):
            continue
        covered = sum(
            (x, choice[x], y, choice[y]) in missing
            for x, y in itertools.combinations(range(len(names)), 2)
        )
        if covered > most:
            best, most = choice, covered
    return best
