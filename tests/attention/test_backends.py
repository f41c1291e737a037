"""Every attention backend, on every pair of options, rejects the call or is about as exact as plain PyTorch.

The measure is the float32 reference: the root-mean-square error in a backend's output and in every gradient
is at most twice the error of a literal bfloat16 computation.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.attention.attention_oracle import cumulative, padding_mask
from transformer_engine.common.dispatch import Unsupported, use_backend
from transformer_engine.common.hardware import NO_GPU
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.primitives.attention import reference
from transformer_engine.pytorch.primitives.attention.call import AttentionInputs
from transformer_engine.pytorch.primitives.attention.choose import TABLE
from transformer_engine.pytorch.runtime.device import current_hardware

# On a CPU the tests check two backends, which have no tiles.
LENGTHS_Q, LENGTHS_KV = (
    ([150, 77, 1], [200, 130, 64]) if torch.cuda.is_available() else ([48, 30, 1], [64, 50, 24])
)
GAPS_Q, GAPS_KV = [10, 0, 3], [0, 8, 24]  # tokens behind each that belong to no sequence
HEADS = 4

AXES: dict[str, tuple[Any, ...]] = {
    "layout": ("bshd", "sbhd", "thd", "thd with gaps", "thd with a tail", "packed", "interleaved"),
    "mask": (
        "no_mask",
        "padding",
        "causal",
        "padding_causal",
        "causal_bottom_right",
        "padding_causal_bottom_right",
        "arbitrary",
        "padding tensors",
    ),
    "window": (None, (40, 0), (30, 20)),
    "keys": ("as queries", "more"),
    "groups": (4, 2, 1),
    "sizes": ((64, 64), (128, 128), (192, 128), (256, 256), (40, 40)),
    "bias": (
        "none",
        "pre_scale [1, h, i, j]",
        "post_scale [b, 1, i, j]",
        "post_scale [1, 1, 1, j]",
        "alibi",
        "slopes",
    ),
    "softmax": ("vanilla", "off-by-one", "learnable"),
    "dtype": (torch.bfloat16, torch.float16),
    "extra": ("nothing", "max_logit", "deterministic", "no gradient", "scale"),
}
# Options that all FlashAttention libraries support, combined separately.
BANDS: dict[str, tuple[Any, ...]] = {
    **AXES,
    "mask": AXES["mask"][:6],
    "sizes": ((64, 64), (128, 128), (96, 96), (192, 128), (256, 256)),
    "bias": ("none",),
    "softmax": ("vanilla", "learnable"),
    "extra": ("nothing", "deterministic", "no gradient", "scale"),
}
# Options that PyTorch's own operators support.
DENSE: dict[str, tuple[Any, ...]] = {
    **BANDS,
    "layout": ("bshd", "sbhd", "packed", "interleaved"),
    "mask": ("no_mask", "causal"),
    "window": (None,),
    "sizes": ((64, 64), (128, 128)),
    "softmax": ("vanilla",),
    "extra": ("nothing", "no gradient", "scale"),
}


class Case(NamedTuple):
    layout: str
    mask: str
    window: tuple[int, int] | None
    keys: str
    groups: int
    sizes: tuple[int, int]
    bias: str
    softmax: str
    dtype: torch.dtype
    extra: str


def exists(case: dict[str, Any]) -> bool:
    """Whether the options can be combined."""
    layout, mask = case.get("layout", "bshd"), case.get("mask", "padding")
    if layout.startswith("thd") and mask not in (
        "padding",
        "padding_causal",
        "padding_causal_bottom_right",
    ):
        return False
    if layout in ("packed", "interleaved"):
        sizes = case.get("sizes", (64, 64))
        if case.get("keys") == "more" or case.get("groups", HEADS) != HEADS or sizes[0] != sizes[1]:
            return False
    window = case.get("window")
    return not (window is not None and "causal" in mask and window[1] != 0)


def pairwise(axes: dict[str, tuple[Any, ...]]) -> list[Case]:
    """Cases that cover every valid value pair on two axes (greedy, seeded)."""
    names = list(axes)
    position = {name: number for number, name in enumerate(names)}
    expected = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in axes[a]
        for y in axes[b]
        if exists({a: x, b: y})
    }
    draw = random.Random(0)
    cases: list[Case] = []
    for first in sorted(expected, key=repr):
        if first not in expected:
            continue
        best: dict[str, Any] = {}
        for _ in range(40):
            case = dict(first)
            for name in draw.sample(names, len(names)):
                if name in case:
                    continue
                options = [v for v in axes[name] if exists({**case, name: v})]
                before = [other for other in case.items() if position[other[0]] < position[name]]
                after = [other for other in case.items() if position[other[0]] > position[name]]
                scores = [
                    sum((other, (name, v)) in expected for other in before)
                    + sum(((name, v), other) in expected for other in after)
                    for v in options
                ]
                top = max(scores, default=-1)
                if top < 0:
                    break
                case[name] = draw.choice(
                    [v for v, s in zip(options, scores, strict=True) if s == top]
                )
            if len(case) == len(names) and (
                not best or _covers(names, case, expected) > _covers(names, best, expected)
            ):
                best = case
        if best:
            expected -= {((a, best[a]), (b, best[b])) for a, b in itertools.combinations(names, 2)}
            cases.append(Case(**best))
    return cases


def _covers(names: list[str], case: dict[str, Any], expected: set[Any]) -> int:
    return sum(
        ((a, case[a]), (b, case[b])) in expected for a, b in itertools.combinations(names, 2)
    )


ALL = pairwise(AXES)
CASES = list(dict.fromkeys([*ALL, *pairwise(BANDS), *pairwise(DENSE)]))
NUMBERS = {case: number for number, case in enumerate(CASES)}


def identity(case: Case) -> str:
    return f"c{NUMBERS[case]:03d} " + ", ".join(str(value).removeprefix("torch.") for value in case)


class Call(NamedTuple):
    """A module, its call arguments, and the tensors that get gradients."""

    module: DotProductAttention
    arguments: dict[str, Any]
    leaves: dict[str, Tensor]
    grad: Tensor


def random_tensor(device: torch.device, *shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def build(case: Case, device: torch.device, dtype: torch.dtype) -> Call:
    """A case's call; its tensors hold values in case.dtype, stored as `dtype`."""
    size_qk, size_v = case.sizes
    lengths_q = LENGTHS_Q
    lengths_kv = LENGTHS_Q if case.keys == "as queries" else LENGTHS_KV
    packed = case.layout.startswith("thd")
    gaps = case.layout == "thd with gaps"
    batch, longest_q, longest_kv = len(lengths_q), max(lengths_q), max(lengths_kv)
    tail = 37 if case.layout == "thd with a tail" else 0

    def leaf(seed: int, *shape: int) -> Tensor:
        return random_tensor(device, *shape, seed=seed).to(case.dtype).to(dtype).requires_grad_()

    def leading(lengths: list[int], between: list[int]) -> tuple[int, ...]:
        longest = max(lengths)
        if packed:
            return (sum(lengths) + (sum(between) if gaps else 0) + tail,)
        return (longest, batch) if case.layout == "sbhd" else (batch, longest)

    rows_q, rows_kv = (
        leading(lengths_q, GAPS_Q),
        leading(lengths_kv, GAPS_KV if case.keys == "more" else GAPS_Q),
    )
    arguments: dict[str, Any] = {}
    if case.layout in ("packed", "interleaved"):
        axis = -3 if case.layout == "packed" else -2
        shape = (3, HEADS, size_qk) if axis == -3 else (HEADS, 3, size_qk)
        leaves = {"qkv": leaf(0, *rows_q, *shape)}
        arguments.update(qkv_layer=leaves["qkv"], qkv_interleave_dim=axis)
    else:
        leaves = {
            "q": leaf(1, *rows_q, HEADS, size_qk),
            "k": leaf(2, *rows_kv, case.groups, size_qk),
            "v": leaf(3, *rows_kv, case.groups, size_v),
        }
        arguments.update(query_layer=leaves["q"], key_layer=leaves["k"], value_layer=leaves["v"])
    mask = case.mask
    if mask == "padding tensors":
        mask = "padding"
        masks = [padding_mask(n, max(n), device) for n in (lengths_q, lengths_kv)]
        for shifted in masks:  # left padding in the second sequence
            shifted[1] = shifted[1].flip(-1)
        arguments["attention_mask"] = tuple(masks)
    elif mask.startswith("padding"):
        bounds = cumulative(lengths_q, device)
        arguments["cu_seqlens_q"] = bounds
        arguments["cu_seqlens_kv"] = (
            bounds if case.keys == "as queries" else cumulative(lengths_kv, device)
        )
    elif mask == "arbitrary":
        hidden = random_tensor(device, batch, 1, longest_q, longest_kv, seed=4) > 0.4
        hidden[1, 0, 3] = True
        arguments["attention_mask"] = hidden
    if packed:
        arguments.update(max_seqlen_q=longest_q, max_seqlen_kv=longest_kv)
    if gaps:
        for name, lengths, between in (
            ("q", lengths_q, GAPS_Q),
            ("kv", lengths_kv, GAPS_KV if case.keys == "more" else GAPS_Q),
        ):
            padded = cumulative([n + gap for n, gap in zip(lengths, between, strict=True)], device)
            arguments[f"cu_seqlens_{name}_padded"] = padded
    if case.bias.startswith(("pre", "post")):
        kind = case.bias.split()[0]
        shape = {
            "[1, h, i, j]": (1, HEADS, longest_q, longest_kv),
            "[b, 1, i, j]": (batch, 1, longest_q, longest_kv),
            "[1, 1, 1, j]": (1, 1, 1, longest_kv),
        }[case.bias.split(" ", 1)[1]]
        leaves["bias"] = leaf(5, *shape)
        arguments.update(
            core_attention_bias_type=f"{kind}_bias", core_attention_bias=leaves["bias"]
        )
    elif case.bias in ("alibi", "slopes"):
        arguments["core_attention_bias_type"] = "alibi"
        if case.bias == "slopes":
            arguments["alibi_slopes"] = random_tensor(device, batch, HEADS, seed=6).abs() * 0.1
    module = DotProductAttention(
        HEADS,
        (size_qk, size_v),
        num_gqa_groups=case.groups,
        qkv_format={"packed": "bshd", "interleaved": "bshd"}.get(
            case.layout, case.layout.split()[0]
        ),
        attn_mask_type=mask,
        window_size=case.window,
        attention_type="cross" if case.keys == "more" else "self",
        softmax_type=case.softmax,
        softmax_scale=0.2 if case.extra == "scale" else None,
        return_max_logit=case.extra == "max_logit",
    )
    if module.softmax_offset is not None:
        with torch.no_grad():
            module.softmax_offset.copy_(torch.linspace(-1, 1, HEADS))
        leaves["sink"] = module.softmax_offset
    grad = random_tensor(device, *rows_q, HEADS * size_v, seed=7).to(case.dtype).to(dtype)
    return Call(module, arguments, leaves, grad)


def results(case: Case, call: Call) -> dict[str, Tensor]:
    """Map names to the output and gradients, in float32."""
    if case.extra == "no gradient":
        with torch.no_grad():
            return {"output": call.module(**call.arguments).float()}
    out = call.module(**call.arguments)
    found = {}
    if case.extra == "max_logit":
        out, found["max_logit"] = out
    gradients = torch.autograd.grad(out, list(call.leaves.values()), call.grad)
    found |= {"output": out} | dict(zip(call.leaves, gradients, strict=True))
    return {name: x.detach().float() for name, x in found.items()}


def plain(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Compute attention literally with every tensor in bfloat16 or float16, as a model without a library does."""
    from transformer_engine.pytorch.primitives.attention import dense

    with monkeypatch.context() as patch, use_backend(attention="reference"):
        patch.setattr(dense, "_wide", lambda x: x.to(case.dtype))
        return results(case, build(case, device, case.dtype))


_exact: dict[Case, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}


def measures(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Results in float32 and from the literal 16-bit computation, cached per case."""
    if case not in _exact:
        with use_backend(attention="reference"):
            exact = results(case, build(case, device, torch.float32))
        _exact[case] = exact, plain(case, device, monkeypatch)
    return _exact[case]


def error(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).square().mean().sqrt())


def backend_parameters() -> list[Any]:
    """Every backend on every case; some cases are slow without a GPU.

    Backends that need a GPU reject every case, always an eighth. The reference takes all options, whose pairs
    meet in the cases in `ALL`.
    """
    results = []
    for number, name in enumerate(TABLE.names()):
        always = {"torch_sdpa": CASES, "reference": ALL}.get(name, CASES[number % 8 :: 8])
        for case in CASES:
            slow = not torch.cuda.is_available() and case not in always
            marks = pytest.mark.slow if slow else ()
            results.append(pytest.param(name, case, id=f"{name}-{identity(case)}", marks=marks))
    return results


@pytest.mark.parametrize(("backend", "case"), backend_parameters())
def test_a_backend_rejects_or_is_as_exact_as_plain_pytorch(backend, case, device, monkeypatch):
    monkeypatch.setenv(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0" if case.extra == "deterministic" else "1"
    )
    with use_backend(attention=backend):
        try:
            got = results(case, build(case, device, case.dtype))
        except Unsupported as rejection:
            pytest.skip(str(rejection))
        if case.extra == "deterministic":
            repeated = results(case, build(case, device, case.dtype))
            assert all(torch.equal(got[name], repeated[name]) for name in got)
    exact, literal = measures(case, device, monkeypatch)
    for name, value in exact.items():
        assert got[name].isfinite().all(), name
        floor = 1e-3 * float(value.square().mean().sqrt())
        allowed = 2 * error(literal[name], value) + floor
        assert error(got[name], value) <= allowed, (
            f"{name}: {error(got[name], value):.2e} > {allowed:.2e}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=identity)
def test_the_reference_is_not_needed_on_a_gpu(case, device, monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    monkeypatch.setenv(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0" if case.extra == "deterministic" else "1"
    )
    results(case, build(case, device, case.dtype))


@pytest.mark.parametrize("axes", [AXES, BANDS, DENSE], ids=["all", "bands", "dense"])
def test_every_valid_pair_of_options_occurs_in_a_case(axes):
    among = [case for case in CASES if all(getattr(case, name) in axes[name] for name in axes)]
    for a, b in itertools.combinations(axes, 2):
        for x, y in itertools.product(axes[a], axes[b]):
            if exists({a: x, b: y}):
                assert any(getattr(c, a) == x and getattr(c, b) == y for c in among), (a, x, b, y)


@pytest.mark.parametrize("backend", TABLE.names())
def test_dropout_replays_from_the_seed_and_keeps_the_mean(backend, device):
    q, k, v = (
        random_tensor(device, 2, 128, HEADS, 64, seed=i).bfloat16().requires_grad_()
        for i in range(3)
    )
    ones = torch.ones_like(v)
    module = DotProductAttention(HEADS, 64, qkv_format="bshd", attention_dropout=0.25)

    def run(value: Tensor) -> list[Tensor]:
        torch.manual_seed(5)
        out = module(q, k, value)
        return [out, *torch.autograd.grad(out.float().square().sum(), [q, k])]

    with use_backend(attention=backend):
        try:
            first, second = run(v), run(v)
        except Unsupported as rejection:
            pytest.skip(str(rejection))
        torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)
        for a, b in zip(first[1:], second[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        weights = run(ones)[0].detach().float()
        assert not torch.equal(run(ones)[0], module(q, k, ones))
    # 2 x 128 x 4 rows with up to 128 kept or scaled weights: three standard deviations.
    assert abs(float(weights.mean()) - 1.0) < 0.06
    assert (weights.std() > 0.01) and weights.isfinite().all()


@pytest.mark.parametrize("backend", TABLE.names())
def test_dropout_gradient_uses_the_forward_mask(backend, device):
    """With v = identity the output is the dropped probabilities, so dv = (output)^T grad."""
    size = 64
    q, k = (
        random_tensor(device, 1, size, 1, size, seed=i).bfloat16().requires_grad_()
        for i in range(2)
    )
    v = torch.eye(size, device=device, dtype=torch.bfloat16)[None, :, None].clone().requires_grad_()
    grad = random_tensor(device, 1, size, size, seed=3).bfloat16()
    module = DotProductAttention(
        1, size, qkv_format="bshd", attn_mask_type="no_mask", attention_dropout=0.5
    )
    with use_backend(attention=backend):
        try:
            out = module(q, k, v)
        except Unsupported as rejection:
            pytest.skip(str(rejection))
    (grad_v,) = torch.autograd.grad(out, [v], grad)
    expected = out.float()[0].t() @ grad.float()[0]
    torch.testing.assert_close(grad_v[0, :, 0].float(), expected, rtol=2e-2, atol=2e-2)
    assert 0.3 < float((out == 0).float().mean()) < 0.7


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("backend", TABLE.names())
def test_gradients_in_any_layout_are_read_correctly(backend, tensor_format, device):
    """Gradients are slices of wider rows, one expanded number, or have their first axes exchanged in memory."""
    torch.manual_seed(0)
    shape = (64, 4, 32) if tensor_format == "thd" else (32, 2, 4, 32)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    module = DotProductAttention(4, 32, qkv_format=tensor_format, attn_mask_type="no_mask")
    options = {}
    if tensor_format == "thd":
        bounds = torch.tensor([0, 32, 64], dtype=torch.int32, device=device)
        options = {
            "attn_mask_type": "padding",
            "cu_seqlens_q": bounds,
            "max_seqlen_q": 32,
            "max_seqlen_kv": 32,
        }
    with use_backend(attention=backend):
        try:
            out = module(q, k, v, **options)
        except Unsupported as rejection:
            pytest.skip(str(rejection))
    wide = torch.randn(*out.shape[:-1], 2 * out.shape[-1], device=device, dtype=dtype)
    gradients = {
        "slice": wide[..., : out.shape[-1]],
        "one number": wide.new_full((1,), 0.5).expand(out.shape),
        "exchanged": wide[..., : out.shape[-1]].transpose(0, 1).contiguous().transpose(0, 1),
    }
    for name, gradient in gradients.items():
        actual = torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)
        expected = torch.autograd.grad(out, (q, k, v), gradient.contiguous(), retain_graph=True)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_score_mod_and_the_tensors_it_holds_are_differentiated(trainable, recompute, device):
    q, k, v = (random_tensor(device, 2, 128, 2, 64, seed=i).requires_grad_() for i in range(3))
    table = random_tensor(device, 2, 256, seed=4).requires_grad_(trainable)

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 4.0 * torch.tanh(score / 4.0) + table[h, i - j + 127]

    module = DotProductAttention(2, 64, qkv_format="bshd", score_mod=modify)
    out = module(q, k, v, checkpoint_core_attention=recompute)
    leaves = [q, k, v, table] if trainable else [q, k, v]
    gradients = torch.autograd.grad(out.square().sum(), leaves)

    a, b, c = (x.transpose(1, 2) for x in (q, k, v))
    position = torch.arange(128, device=device)
    score = 4.0 * torch.tanh(a @ b.transpose(-1, -2) / math.sqrt(64) / 4.0)
    score = score + table[:, position[:, None] - position[None, :] + 127]
    hidden = position[None, :] > position[:, None]
    reference = (score.masked_fill(hidden, -math.inf).softmax(-1) @ c).transpose(1, 2).flatten(2)
    expected = torch.autograd.grad(reference.square().sum(), leaves)
    for ours, original in zip((out, *gradients), (reference, *expected), strict=True):
        torch.testing.assert_close(ours, original, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("q_format", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("backend", TABLE.names())
def test_attention_to_a_cache_equals_attention_to_its_tokens(backend, paged, q_format, device):
    """Call the backend directly with 3 sequences of 1 to 20 new queries and pages in any order."""
    from transformer_engine.pytorch.primitives.attention.call import AttentionCall, Switches
    from transformer_engine.pytorch.primitives.attention.mask import Mask

    batch, groups, size, page, dtype = 3, 2, 64, 16, torch.bfloat16
    lengths_q, lengths_kv, longest_q, longest_kv = [1, 7, 20], [33, 100, 128], 20, 128
    starts = cumulative(lengths_q, device)
    q = random_tensor(device, batch, longest_q, HEADS, size, seed=1).to(dtype)
    k, v = (
        random_tensor(device, batch, longest_kv, groups, size, seed=s).to(dtype) for s in (2, 3)
    )
    real = (
        torch.arange(longest_q, device=device)[None]
        < torch.tensor(lengths_q, device=device)[:, None]
    )
    input_value = {"bshd": q, "sbhd": q.transpose(0, 1).contiguous(), "thd": q[real]}[q_format]
    request = AttentionCall(
        dtype=dtype,
        device_type=device.type,
        batch=batch,
        heads=HEADS,
        groups=groups,
        seqlen_q=longest_q,
        seqlen_kv=longest_kv,
        head_dim_qk=size,
        head_dim_v=size,
        q_format=q_format,
        kv_format="bshd",
        mask=Mask("padding_causal_bottom_right", (-1, 0), True),
        scale=0.125,
        switches=Switches(),
        needs_gradient=False,
        hardware=current_hardware() if device.type == "cuda" else NO_GPU,
        page_size=page if paged else 0,
        cached=True,
    )
    table = None
    if paged:
        pages = batch * longest_kv // page
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(9)).to(device)
        table = order.reshape(batch, -1).int()
        scattered = []
        for x in (k, v):
            store = torch.empty(pages, page, groups, size, dtype=dtype, device=device)
            store[order] = x.reshape(pages, page, groups, size)
            scattered.append(store)
        k, v = scattered
    chosen = TABLE.named(backend)
    reason = chosen.rejection_reason(request)
    if reason is not None:
        pytest.skip(reason)
    inputs = AttentionInputs(
        input_value,
        k,
        v,
        lengths_q=torch.tensor(lengths_q, dtype=torch.int32, device=device),
        lengths_kv=torch.tensor(lengths_kv, dtype=torch.int32, device=device),
        starts_q=starts if q_format == "thd" else None,
        page_table=table,
    )
    got = chosen.bind(request)(request, inputs).output
    expected = reference.forward(request, inputs).output.flatten(-2)
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=2e-2)
