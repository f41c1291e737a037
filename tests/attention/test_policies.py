"""thd_attention_policies: each packed sequence has its policy's mask and window, as in separate calls."""

from __future__ import annotations

import random

import pytest
import torch

import transformer_engine.pytorch as te
from tests.attention.attention_oracle import attend, cumulative, visibility
from tests.support.tolerances import ATTENDED
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention.dot_product_attention import policies as module
from transformer_engine.pytorch.primitives.attention.choose import NoBackend

HEADS, GROUPS, SIZE = 2, 1, 4
MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")


def ids(device, *sequences, dtype=torch.int32):
    return torch.tensor(sequences, dtype=dtype, device=device)


def policy(device, sequences, mask="padding_causal", window=None, **more):
    return {
        "sequence_ids": ids(device, *sequences),
        "mask_type": mask,
        "window_size": window,
        **more,
    }


def batch(device, lengths, extents, heads, seed):
    """Packed tokens [t, heads, d], with two tokens behind the last sequence."""
    generator = torch.Generator().manual_seed(seed)
    assert len(lengths) == len(extents)
    return torch.randn(sum(extents) + 2, heads, SIZE, generator=generator).to(device)


def exact(leaves, grad, lengths, extents, lengths_kv, extents_kv, chosen, softcap=0.0):
    """Output and gradients in float64: sequence i with the mask, window and alignment chosen[i]."""
    q, k, v = (x.detach().double().cpu().requires_grad_() for x in leaves)
    out = torch.zeros(q.shape[0], HEADS * SIZE, dtype=torch.float64)
    start = start_kv = 0
    for i, (n, m) in enumerate(zip(lengths, lengths_kv, strict=True)):
        mask, window, bottom_right = chosen[i]
        if n and m:
            rule = visibility(mask, n, m, [n], [m], window or (-1, -1), bottom_right is not False)
            part, _ = attend(
                q[None, start : start + n],
                k[None, start_kv : start_kv + m],
                v[None, start_kv : start_kv + m],
                rule,
                softcap=softcap,
            )
            rows = torch.zeros_like(out)
            rows[start : start + n] = part[0]
            out = out + rows
        start, start_kv = start + extents[i], start_kv + extents_kv[i]
    return out, torch.autograd.grad(out, (q, k, v), grad.double().cpu())


def random_case(seed):
    """Lengths, extents and policies for a packed batch."""
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    lengths = [rng.randint(0, 6) for _ in range(count)]
    if not sum(lengths):
        lengths[0] = 3
    extents = [n + rng.choice((0, 0, 2)) for n in lengths]
    cross = rng.random() < 0.4
    lengths_kv = [rng.randint(1, 6) for _ in range(count)] if cross else lengths
    extents_kv = [n + rng.choice((0, 3)) for n in lengths_kv] if cross else extents
    number = rng.randint(1, 3)
    members: list[list[int]] = [[] for _ in range(number)]
    for i in range(count):
        members[rng.randrange(number)].append(i)
    kinds = []
    for _ in range(number):
        mask = rng.choice(MASKS)
        window = rng.choice((None, (2, 0), (1, 0) if "causal" in mask else (1, 2)))
        kinds.append((mask, window, rng.choice((None, False, True)) if mask == "padding" else None))
    return lengths, extents, lengths_kv, extents_kv, members, kinds


@pytest.mark.parametrize("dispatch", ["auto", "grouped"])
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_policies_equal_separate_sequences(first, dispatch, device):
    for seed in range(first, first + 20):
        lengths, extents, lengths_kv, extents_kv, members, kinds = random_case(seed)
        cross = lengths_kv is not lengths
        leaves = [
            batch(device, lengths, extents, HEADS, seed),
            batch(device, lengths_kv, extents_kv, GROUPS, seed + 1),
            batch(device, lengths_kv, extents_kv, GROUPS, seed + 2),
        ]
        leaves = [x.requires_grad_() for x in leaves]
        grad = batch(device, lengths, extents, HEADS, seed + 3).flatten(1)
        chosen = {i: kinds[p] for p, part in enumerate(members) for i in part}
        inputs = [
            policy(
                device,
                part,
                mask,
                window,
                **({} if diagonal is None else {"bottom_right_diagonal": diagonal}),
            )
            for part, (mask, window, diagonal) in zip(members, kinds, strict=True)
        ]
        layer = te.DotProductAttention(
            HEADS,
            SIZE,
            GROUPS,
            qkv_format="thd",
            attention_type="cross" if cross else "self",
            softcap=seed % 3 * 0.6,
        )
        bounds = [cumulative(x, device) for x in (lengths, lengths_kv, extents, extents_kv)]
        if not cross:
            bounds[1], bounds[3] = bounds[0], bounds[2]
        out = layer(
            *leaves,
            cu_seqlens_q=bounds[0],
            cu_seqlens_kv=bounds[1],
            cu_seqlens_q_padded=bounds[2],
            cu_seqlens_kv_padded=bounds[3],
            thd_attention_policies=inputs,
            thd_attention_policy_dispatch=dispatch,
        )
        actual = torch.autograd.grad(out, leaves, grad)
        reference, expected_value = exact(
            leaves, grad, lengths, extents, lengths_kv, extents_kv, chosen, layer.softcap
        )
        for got, expected in zip((out, *actual), (reference, *expected_value), strict=True):
            torch.testing.assert_close(
                got.double().cpu(), expected, **ATTENDED, msg=f"case {seed}".__add__
            )


def simple(device, **changes):
    q = batch(device, (3, 4), (3, 4), HEADS, 0)
    k = batch(device, (3, 4), (3, 4), GROUPS, 1)
    arguments = {
        "cu_seqlens_q": cumulative([3, 4], device),
        "thd_attention_policies": [policy(device, (0,)), policy(device, (1,), "padding", (1, 1))],
    }
    return (q, k, k), {**arguments, **changes}


def test_one_policy_for_all_sequences_equals_the_call_without_policies(device, monkeypatch):
    layer = te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type="padding")
    qkv, arguments = simple(device)
    inputs = [policy(device, (0, 1), "causal,padding", (2, 0)), policy(device, ())]
    arguments["thd_attention_policies"] = inputs
    monkeypatch.setattr(module, "_in_place", None)
    got = layer(*qkv, **arguments)
    plain = layer(
        *qkv,
        cu_seqlens_q=arguments["cu_seqlens_q"],
        attn_mask_type="padding_causal",
        window_size=(2, 0),
    )
    assert torch.equal(got, plain)
    assert torch.equal(
        layer(*qkv, thd_attention_policy_dispatch="grouped", **arguments)[:7], plain[:7]
    )


def test_tokens_are_gathered_if_no_backend_supports_gaps_between_sequences(device, monkeypatch):
    layer = te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type="padding")
    qkv, arguments = simple(device)
    expected = layer(*qkv, **arguments)

    def unsupported(*_):
        raise NoBackend("no backend")

    monkeypatch.setattr(module, "_in_place", unsupported)
    torch.testing.assert_close(layer(*qkv, **arguments), expected)


@pytest.mark.parametrize("dispatch", ["auto", "grouped"])
def test_zero_tokens_give_an_empty_differentiable_output(dispatch, device):
    leaves = [
        torch.empty(0, heads, SIZE, device=device, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    layer = te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd")
    out = layer(
        *leaves,
        cu_seqlens_q=cumulative([0, 0], device),
        thd_attention_policy_dispatch=dispatch,
        thd_attention_policies=[policy(device, (0,)), policy(device, (1,))],
    )
    assert out.shape == (0, HEADS * SIZE)
    assert all(
        x.shape == y.shape
        for x, y in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True)
    )


@pytest.mark.parametrize("kind", ["MultiheadAttention", "TransformerLayer"])
@pytest.mark.parametrize("hook", [False, True])
def test_layers_pass_policies_to_their_self_attention(kind, hook, device):
    torch.manual_seed(0)
    options = {"attention_dropout": 0.0, "device": device}
    if kind == "TransformerLayer":
        layer = te.TransformerLayer(
            16,
            32,
            2,
            hidden_dropout=0.0,
            attn_input_format="thd",
            self_attn_mask_type="padding_causal",
            **options,
        )
    else:
        layer = te.MultiheadAttention(
            16, 2, qkv_format="thd", attn_mask_type="padding_causal", **options
        )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, bounds = torch.randn(7, 16, device=device), {"cu_seqlens_q": cumulative([3, 4], device)}
    if kind == "MultiheadAttention":
        bounds["cu_seqlens_kv"] = bounds["cu_seqlens_q"]
    if hook:
        attention = layer.self_attention if kind == "TransformerLayer" else layer.core_attention
        attention.register_forward_hook(lambda *_: None)
    inputs = [policy(device, (0,)), policy(device, (1,), "padding")]
    got = layer(x, thd_attention_policies=inputs, **bounds)
    name = "self_attn_mask_type" if kind == "TransformerLayer" else "attn_mask_type"
    causal, full = (layer(x, **{name: mask}, **bounds) for mask in ("padding_causal", "padding"))
    torch.testing.assert_close(got[:3], causal[:3])
    torch.testing.assert_close(got[3:], full[3:])
    assert not torch.allclose(causal[3:], full[3:])
    with pytest.raises(ValueError, match="policies have mask types"):
        layer(x, thd_attention_policies=inputs, **{name: "padding"}, **bounds)


@pytest.mark.parametrize("with_policies", [True, False])
def test_an_unknown_dispatch_raises_with_and_without_policies(with_policies, device):
    layer = te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type="padding")
    q, k = torch.zeros(4, HEADS, SIZE, device=device), torch.zeros(4, GROUPS, SIZE, device=device)
    policies = [policy(device, (0,), "padding")] if with_policies else None
    bounds = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="thd_attention_policy_dispatch='group' does not exist"):
        layer(
            q,
            k,
            k,
            cu_seqlens_q=bounds,
            thd_attention_policies=policies,
            thd_attention_policy_dispatch="group",
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"thd_attention_policies": []}, "is not a non-empty list"),
        ({"thd_attention_policies": "all"}, "is not a non-empty list"),
        ({"thd_attention_policy_dispatch": "fast"}, "thd_attention_policy_dispatch"),
        ({"attn_mask_type": "padding"}, "attn_mask_type='padding'; policies have mask types"),
        ({"window_size": (1, 1)}, "window_size=.* policies have windows"),
        ({"attention_mask": torch.zeros(2, 1, 1, 4, dtype=torch.bool)}, "attention_mask"),
        ({"core_attention_bias_type": "alibi"}, "core_attention_bias_type='alibi'"),
        ({"score_mod": lambda score, *_: score}, "score_mod"),
        ({"fp8_output": True}, "fp8_output=True"),
        ({"qkv_format": "bshd"}, "qkv_format='bshd'"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q=None"),
        ({"inference_params": te.InferenceParams(2, 8, 1, 4)}, "inference_params"),
    ],
    ids=lambda value: "",
)
def test_arguments_that_policies_exclude_raise(changes, words, device):
    layer = te.DotProductAttention(
        HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type="padding", layer_number=1
    )
    qkv, arguments = simple(device, **changes)
    with pytest.raises(ValueError, match=words):
        layer(*qkv, **arguments)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (lambda d: [3], r"thd_attention_policies\[0\]=3 is not a dictionary"),
        (lambda d: [{"sequence_ids": ids(d, 0)}], "has the keys"),
        (lambda d: [policy(d, (0, 1), scale=1.0)], "has the keys .*scale"),
        (lambda d: [policy(d, (0, 1), "causal")], "mask_type='causal'"),
        (lambda d: [policy(d, (0, 1), "diagonal")], "mask_type='diagonal' does not exist"),
        (lambda d: [policy(d, (0, 1), bottom_right_diagonal=1)], "bottom_right_diagonal=1"),
        (lambda d: [policy(d, (0, 1), window=(1, 2, 3))], "window_size"),
        (lambda d: [{**policy(d, ()), "sequence_ids": [0, 1]}], "sequence_ids"),
        (
            lambda d: [{**policy(d, ()), "sequence_ids": torch.tensor([0.0, 1.0], device=d)}],
            "of int32 or int64",
        ),
        (
            lambda d: [{**policy(d, ()), "sequence_ids": torch.tensor([0, 1], device="meta")}],
            "is on meta",
        ),
        (lambda d: [policy(d, (1, 0))], "not strictly ascending"),
        (lambda d: [policy(d, (0, 0, 1))], "not strictly ascending"),
        (lambda d: [policy(d, (0,))], r"missing \[1\], repeated \[\]"),
        (lambda d: [policy(d, (0, 1)), policy(d, (1,))], r"missing \[\], repeated \[1\]"),
        (lambda d: [policy(d, (0, 1, 2))], "sequence 2 is outside 0..1"),
    ],
    ids=lambda value: "",
)
def test_wrong_policies_raise(argument, words, device):
    layer = te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type="padding")
    qkv, arguments = simple(device, thd_attention_policies=argument(device))
    with pytest.raises(ValueError, match=words):
        layer(*qkv, **arguments)


def test_largest_logits_and_fp8_exclude_policies(device):
    qkv, arguments = simple(device)
    layer = te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd", return_max_logit=True)
    with pytest.raises(ValueError, match="return_max_logit"):
        layer(*qkv, **arguments)
    layer = te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd")
    with (
        te.autocast(recipe=DelayedScaling(fp8_dpa=True)),
        pytest.raises(ValueError, match="FP8 attention"),
    ):
        layer(*qkv, **arguments)


def test_ids_are_read_once_until_they_change(device, monkeypatch):
    layer = te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type="padding")
    qkv, arguments = simple(device)
    read = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(x) or original(x))
    for _ in range(3):
        layer(*qkv, **arguments)
    assert (
        len([x for x in read if x is arguments["thd_attention_policies"][0]["sequence_ids"]]) == 1
    )
    arguments["thd_attention_policies"][0]["sequence_ids"].add_(1)
    with pytest.raises(ValueError, match=r"missing \[0\], repeated \[1\]"):
        layer(*qkv, **arguments)


def test_ids_are_compared_by_identity(device):
    """Tensors with several elements have no truth value, and equal values of one element may change later."""
    first, second, other = (torch.tensor(ids, device=device) for ids in ([0, 1], [2, 3], [2, 3]))
    module.check_coverage([first, second], 4)
    module.check_coverage([first, other], 4)
    with pytest.raises(ValueError, match=r"missing \[2, 3\]"):
        module.check_coverage([first], 4)


@pytest.mark.parametrize("dispatch", ["auto", "grouped"])
def test_tokens_without_sequences_are_padding(dispatch, device):
    leaves = [
        torch.randn(4, heads, SIZE, device=device, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    layer = te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type="padding")
    out = layer(
        *leaves,
        cu_seqlens_q=cumulative([], device),
        thd_attention_policy_dispatch=dispatch,
        thd_attention_policies=[policy(device, ())],
    )
    assert out.shape == (4, HEADS * SIZE) and not out.any()


@pytest.mark.gpu
def test_a_captured_call_needs_ids_that_were_checked_before():
    device = torch.device("cuda")
    layer = te.DotProductAttention(8, 64, 2, qkv_format="thd", attn_mask_type="padding").eval()
    q, k = (torch.randn(200, heads, 64, device=device).bfloat16() for heads in (8, 2))
    bounds = {
        "cu_seqlens_q": cumulative([80, 120], device),
        "max_seqlen_q": 120,
        "max_seqlen_kv": 120,
    }
    known, new = ([policy(device, (0,)), policy(device, (1,), "padding")] for _ in range(2))
    with torch.no_grad():
        for _ in range(3):
            want = layer(q, k, k, thd_attention_policies=known, **bounds)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layer(q, k, k, thd_attention_policies=known, **bounds)
            with pytest.raises(RuntimeError, match="call the attention with the same tensors once"):
                layer(q, k, k, thd_attention_policies=new, **bounds)
        graph.replay()
    torch.testing.assert_close(got, want)


def test_inference_tensors_cannot_be_captured_and_the_error_names_them(monkeypatch):
    class OnDevice(torch.Tensor):
        is_cuda = True  # pyright: ignore[reportAssignmentType]

    counted = torch.tensor([0]).as_subclass(OnDevice)
    with torch.inference_mode():
        uncounted = torch.tensor([1]).as_subclass(OnDevice)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    module.check_coverage([counted, uncounted], 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError,
        match=r"policies \[1\] are inference tensors.* outside of torch.inference_mode",
    ):
        module.check_coverage([counted, uncounted], 2)
    with pytest.raises(
        RuntimeError, match="call the attention with the same tensors once before the capture"
    ):
        module.check_coverage([counted], 1)


@pytest.mark.any_device
@pytest.mark.parametrize("members", [((0, 1, 2),), ((1,), (), (0,), (2,))], ids=str)
def test_a_compiled_call_is_one_graph(members, device):
    torch._dynamo.reset()
    lengths, extents = (3, 2, 4), (3, 3, 4)
    layer = te.DotProductAttention(
        HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type="padding", softcap=0.7
    )
    leaves = [
        batch(device, lengths, extents, n, n).requires_grad_() for n in (HEADS, GROUPS, GROUPS)
    ]
    grad = batch(device, lengths, extents, HEADS, 9).flatten(1)
    arguments = {
        "cu_seqlens_q": cumulative(lengths, device),
        "cu_seqlens_q_padded": cumulative(extents, device),
        "max_seqlen_q": 4,
        "max_seqlen_kv": 4,
        "thd_attention_policies": [
            policy(device, part, mask, window)
            for part, (mask, window) in zip(
                members,
                [
                    ("padding_causal", (1, 0)),
                    ("padding", None),
                    ("padding", (1, 1)),
                    (MASKS[2], None),
                ],
                strict=False,
            )
        ],
    }
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        out = call(*leaves, **arguments)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager, atol=1e-6, rtol=1e-6)


@pytest.mark.any_device
def test_compiled_layers_pass_policies_on(device):
    torch._dynamo.reset()
    options = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "device": device,
        "attn_input_format": "thd",
    }
    layer = te.TransformerLayer(16, 32, 2, self_attn_mask_type="padding_causal", **options)
    x, bounds = torch.randn(7, 16, device=device), cumulative([3, 4], device)
    arguments = {
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": 4,
        "max_seqlen_kv": 4,
        "thd_attention_policies": [policy(device, (0,)), policy(device, (1,), "padding")],
    }
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, **arguments), layer(x, **arguments))


@pytest.mark.any_device
def test_a_compiled_call_checks_ids_when_it_runs(device):
    torch._dynamo.reset()
    layer = te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type="padding")
    qkv, arguments = simple(device)
    arguments |= {"max_seqlen_q": 4, "max_seqlen_kv": 4}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv, **arguments), layer(*qkv, **arguments))
    arguments["thd_attention_policies"][0]["sequence_ids"].add_(1)
    with pytest.raises(ValueError, match=r"missing \[0\], repeated \[1\]"):
        compiled(*qkv, **arguments)


@pytest.mark.any_device
def test_a_grouped_dispatch_breaks_the_graph_and_states_the_reason(device):
    torch._dynamo.reset()
    layer = te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type="padding")
    qkv, arguments = simple(
        device, thd_attention_policy_dispatch="grouped", max_seqlen_q=4, max_seqlen_kv=4
    )
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv, **arguments), layer(*qkv, **arguments))
    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="gathers tokens, whose number depends on values"
    ):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(*qkv, **arguments)
