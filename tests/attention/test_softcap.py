"""softcap: c * tanh(score / c) in every attention equals a float64 loop, with gradients; backends without it say so."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch

import transformer_engine.pytorch as te
from tests.attention.attention_oracle import attend, cumulative, visibility
from tests.attention.test_dot_product_attention import (
    LENGTHS_KV,
    LENGTHS_Q,
    MASKS,
    assert_same,
    mask_arguments,
    oracle_results,
    run,
    tensors,
)
from tests.attention.test_inference import GROUPS, HEADS, PAGED, WIDTH, params, play, tokens
from tests.support.tolerances import ATTENDED
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.hardware import nvidia
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionParams
from transformer_engine.pytorch.primitives.attention import choose
from transformer_engine.pytorch.primitives.attention.call import AttentionCall
from transformer_engine.pytorch.primitives.attention.visible import default_slopes

CAP = 0.8  # below most scores, so that the function is far from linear


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_equals_the_loop(mask, qkv_format, device):
    q, k, v, grad = tensors(device, groups=1)
    arguments, rule = mask_arguments(mask, device)
    module = te.DotProductAttention(
        2, 4, 1, attn_mask_type=mask, attention_type="cross", softcap=CAP
    )
    got = run(module, q, k, v, grad, qkv_format, **arguments)
    assert_same(got, oracle_results(q, k, v, grad, visibility(mask, 5, 6, **rule), softcap=CAP))


@pytest.mark.parametrize("window", [(2, 0), (1, 2)], ids=str)
@pytest.mark.parametrize("mask", ["no_mask", "padding"])
def test_windows_equal_the_loop(mask, window, device):
    q, k, v, grad = tensors(device)
    arguments, rule = mask_arguments(mask, device)
    module = te.DotProductAttention(
        2, 4, attn_mask_type=mask, window_size=window, attention_type="cross"
    )
    got = run(module, q, k, v, grad, softcap=CAP, **arguments)
    sees = visibility(mask, 5, 6, window=window, **rule)
    assert_same(got, oracle_results(q, k, v, grad, sees, softcap=CAP))


@pytest.mark.parametrize("shape", [(2, 2, 5, 6), (1, 2, 1, 6), (1, 1, 5, 1)], ids=str)
@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
def test_a_pre_scale_bias_is_capped_and_a_post_scale_bias_is_not(kind, shape, device):
    q, k, v, grad = tensors(device)
    bias = (
        torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(device).requires_grad_()
    )
    module = te.DotProductAttention(2, 4, attn_mask_type="no_mask", softcap=CAP)
    got = run(
        module,
        q,
        k,
        v,
        grad,
        extra=(bias,),
        core_attention_bias_type=kind,
        core_attention_bias=bias,
    )
    wide = bias.detach().double().cpu().requires_grad_()
    full = wide.expand(2, 2, 5, 6)
    expected = oracle_results(
        q,
        k,
        v,
        grad,
        visibility("no_mask", 5, 6),
        (wide,),
        bias=lambda b, h, i, j: full[b, h, i, j],
        bias_before_scale=kind == "pre_scale_bias",
        softcap=CAP,
    )
    assert_same(got, expected)


@pytest.mark.parametrize("mask", ["causal", "no_mask", "padding_causal_bottom_right"])
def test_alibi_is_added_after_the_softcap(mask, device):
    q, k, v, grad = tensors(device)
    arguments, rule = mask_arguments(mask, device)
    slopes = default_slopes(2, torch.device("cpu")).double()

    def bias(b, h, i, j):
        lengths = (LENGTHS_Q[b], LENGTHS_KV[b]) if "padding" in mask else (5, 6)
        shift = 0 if mask == "causal" else lengths[1] - lengths[0]
        return -slopes[h] * abs(j - i - shift)

    module = te.DotProductAttention(2, 4, attn_mask_type=mask, attention_type="cross", softcap=CAP)
    got = run(module, q, k, v, grad, core_attention_bias_type="alibi", **arguments)
    assert_same(
        got, oracle_results(q, k, v, grad, visibility(mask, 5, 6, **rule), bias=bias, softcap=CAP)
    )


@pytest.mark.parametrize("softmax", ["off-by-one", "learnable"])
def test_sinks_are_not_capped_and_max_logit_is_the_capped_one(softmax, device):
    q, k, v, grad = tensors(device)
    module = te.DotProductAttention(
        2, 4, attn_mask_type="no_mask", softmax_type=softmax, softcap=CAP, return_max_logit=True
    ).to(device)
    extra, sink = (), torch.zeros(2, dtype=torch.float64)
    wide = ()
    if softmax == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(torch.tensor([1.5, -0.5]))
        extra, sink = (
            (module.softmax_offset,),
            torch.tensor([1.5, -0.5], dtype=torch.float64).requires_grad_(),
        )
        wide = (sink,)
    got = run(module, q, k, v, grad, extra=extra)
    expected = oracle_results(
        q, k, v, grad, visibility("no_mask", 5, 6), wide, sink=sink, softcap=CAP
    )
    assert_same(got, expected)
    torch.testing.assert_close(got[2].double().cpu(), expected[2], **ATTENDED)
    assert got[2].max() <= CAP


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_packed_sequences_equal_the_loop(mask, device):
    q, k, v, grad = tensors(device)
    packed = [
        torch.cat([x[b, :n] for b, n in enumerate(lengths)])
        for x, lengths in ((q, LENGTHS_Q), (k, LENGTHS_KV), (v, LENGTHS_KV), (grad, LENGTHS_Q))
    ]
    module = te.DotProductAttention(
        2, 4, qkv_format="thd", attn_mask_type=mask, attention_type="cross"
    )
    leaves = [x.clone().requires_grad_() for x in packed[:3]]
    bounds = {
        "cu_seqlens_q": cumulative(LENGTHS_Q, device),
        "cu_seqlens_kv": cumulative(LENGTHS_KV, device),
    }
    out = module(*leaves, softcap=CAP, **bounds)
    actual = torch.autograd.grad(out, leaves, packed[3])
    sees = visibility(mask, 5, 6, LENGTHS_Q, LENGTHS_KV)
    expected, gradients, _ = oracle_results(q, k, v, grad, sees, softcap=CAP)
    for got, full, lengths in zip(
        (out, *actual),
        (expected, *gradients),
        (LENGTHS_Q, LENGTHS_Q, LENGTHS_KV, LENGTHS_KV),
        strict=True,
    ):
        reference = torch.cat([full[b, :n] for b, n in enumerate(lengths)])
        torch.testing.assert_close(got.double().cpu(), reference, **ATTENDED)


def test_gradients_match_finite_differences(device):
    leaves = [
        torch.randn(1, 3, 2, 4, dtype=torch.float64, device=device).requires_grad_()
        for _ in range(3)
    ]
    module = te.DotProductAttention(2, 4, qkv_format="bshd", softcap=CAP)
    with use_backend(attention="reference"):
        assert torch.autograd.gradcheck(lambda q, k, v: module(q, k, v), leaves)


def test_recomputed_attention_has_the_same_gradients(device):
    leaves = [x.requires_grad_() for x in tensors(device)[:3]]
    module = te.DotProductAttention(
        2, 4, qkv_format="bshd", attn_mask_type="causal_bottom_right", softcap=CAP
    )
    results = []
    for recompute in (False, True):
        out = module(*leaves, checkpoint_core_attention=recompute)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("softcap", [None, 0.0, 1.7])
def test_forward_overrides_the_constructor(softcap, device):
    q, k, v, _ = tensors(device, size_kv=5)
    layer = te.DotProductAttention(2, 4, qkv_format="bshd", softcap=CAP)
    assert layer.softcap == CAP
    plain = te.DotProductAttention(
        2, 4, qkv_format="bshd", softcap=CAP if softcap is None else softcap
    )
    assert torch.equal(layer(q, k, v, softcap=softcap), plain(q, k, v))


@pytest.mark.parametrize("softcap", [-1.0, math.inf, math.nan, -math.inf])
def test_a_negative_or_infinite_softcap_raises(softcap, device):
    q = tensors(device)[0]
    words = "softcap must be finite and non-negative, got"
    with pytest.raises(ValueError, match=words):
        te.DotProductAttention(2, 4, qkv_format="bshd")(q, q, q, softcap=softcap)
    for make in (
        lambda: te.DotProductAttention(2, 4, softcap=softcap),
        lambda: te.MultiheadAttention(8, 2, softcap=softcap, device=device),
        lambda: te.TransformerLayer(8, 8, 2, softcap=softcap, device=device),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_a_softcap_of_another_type_needs_no_compiler():
    """In a process that has not imported torch's compiler, as every eager program."""
    program = """
        import torch, transformer_engine.pytorch as te
        q = torch.randn(4, 1, 2, 16)
        attention = te.DotProductAttention(2, 16)
        wanted = attention(q, q, q, softcap=2.0)
        for softcap in (2, torch.tensor(2.0), torch.tensor(2)):
            assert torch.equal(attention(q, q, q, softcap=softcap), wanted)
        for softcap in (-1.0, float("nan"), -1, True, "2"):
            try:
                attention(q, q, q, softcap=softcap)
            except (TypeError, ValueError) as error:
                assert "softcap" in str(error), error
            else:
                raise AssertionError(softcap)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], check=True)


def test_layers_pass_the_softcap_to_their_attentions(device):
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": device}
    capped = te.TransformerLayer(16, 32, 2, layer_type="decoder", softcap=CAP, **options)
    plain = te.TransformerLayer(16, 32, 2, layer_type="decoder", **options)
    for parameter in capped.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    plain.load_state_dict(capped.state_dict())
    x, encoded = torch.randn(5, 1, 16, device=device) * 9, torch.randn(4, 1, 16, device=device) * 9
    expected = capped(x, encoder_output=encoded)
    assert not torch.equal(plain(x, encoder_output=encoded), expected)
    assert torch.equal(plain(x, encoder_output=encoded, softcap=CAP), expected)
    plain.softcap = CAP
    assert torch.equal(plain(x, encoder_output=encoded), expected)
    for attention in (plain.self_attention, plain.inter_attention):
        assert attention.softcap == attention.core_attention.softcap == CAP
    # A hook makes the layer call its attention by keywords.
    plain.self_attention.register_forward_hook(lambda *_: None)
    plain.self_attention.core_attention.register_forward_hook(lambda *_: None)
    plain.softcap = 0.0
    assert torch.equal(plain(x, encoder_output=encoded, softcap=CAP), expected)


@pytest.mark.parametrize("tensor_format", ["bshd", "thd"])
@PAGED
@torch.no_grad()
def test_cached_steps_equal_the_full_sequence(pages, tensor_format, device):
    mask = "padding_causal" if tensor_format == "thd" else "causal"
    layer = te.DotProductAttention(
        HEADS,
        WIDTH,
        GROUPS,
        qkv_format=tensor_format,
        attn_mask_type=mask,
        layer_number=1,
        softcap=CAP,
    )
    data = tokens(device, (HEADS + 2 * GROUPS) * WIDTH)
    cache = params(qkv_format=tensor_format, **pages)

    def qkv(x):
        return x.unflatten(-1, (-1, WIDTH)).split((HEADS, GROUPS, GROUPS), -2)

    outputs = play(lambda x: layer(*qkv(x), inference_params=cache), cache, data, tensor_format)
    for name, got in outputs.items():
        q, k, v = (x.double().cpu()[None] for x in qkv(data[name][: len(got)]))
        expected, _ = attend(q, k, v, visibility("causal", len(got), len(got)), softcap=CAP)
        torch.testing.assert_close(got.double().cpu(), expected[0], **ATTENDED)


def request(**changes) -> AttentionCall:
    """A call on a GPU, built from the original's parameters."""
    call = AttentionParams(qkv_layout="bshd_bshd_bshd", softcap=CAP, **changes).request()
    return replace(call, device_type="cuda", hardware=nvidia(9, 0))


def test_backends_without_softcap_support_name_it():
    reasons = {
        verdict.backend: verdict.reason or ""
        for verdict in choose.explain(request(attn_mask_type="causal"))
    }
    for name in ("torch_cudnn", "torch_flash", "torch_sdpa"):
        assert reasons[name] == "it does not support softcap", reasons[name]
    if "not installed" not in reasons["cudnn"]:
        assert (
            "cudnn" in reasons["cudnn"]
            or "softcap with attn_mask_type='causal'" in reasons["cudnn"]
        )
    assert "softcap" not in reasons["flex"] and "softcap" not in reasons["triton"]


def test_fp8_kernels_name_the_softcap_and_emulation_computes_it(device):
    q, k, v, _ = tensors(device, size_kv=5, width=16, width_v=16)
    layer = te.DotProductAttention(2, 16, qkv_format="bshd", softcap=CAP)
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
        explained = te.explain(layer, q, k, v)
        got = layer(q, k, v)
    assert "it does not support softcap" in str(explained) and "emulated" in str(explained)
    expected = layer(q, k, v)
    assert (got - expected).abs().max() < 0.25 * expected.abs().max() and not torch.equal(
        got, expected
    )


@pytest.mark.any_device
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_attention_equals_the_eager_one(dynamic, device):
    layer = te.DotProductAttention(
        2, 4, qkv_format="bshd", attn_mask_type="causal_bottom_right", softcap=CAP
    )
    leaves = [x.requires_grad_() for x in tensors(device)[:3]]
    torch._dynamo.reset()

    def call(q, k, v, limit):
        return layer(q, k, v) + layer(q, k, v, softcap=0.3) + layer(q, k, v, softcap=limit)

    results = []
    for function in (
        call,
        torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic),
    ):
        for limit in (0.5, 2.5):
            out = function(*leaves, limit)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for eager, traced in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(traced, eager, atol=1e-6, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding_causal", "window", "thd"])
@pytest.mark.parametrize(
    "backend", ["flash4", "cudnn", "flash3", "triton", "flash2", "flex", "reference"]
)
def test_every_backend_computes_the_softcap_on_a_gpu(backend, mask, dtype):
    torch.manual_seed(0)
    lengths = (256, 130)
    options = {
        "attn_mask_type": "causal"
        if mask == "window"
        else "padding_causal"
        if mask == "thd"
        else mask
    }
    if mask == "window":
        options["window_size"] = (60, 0)
    for cap in (1.5, 30.0):  # two caps, so that a library's kernel cache must tell them apart
        layer = te.DotProductAttention(
            8, 64, 2, qkv_format="thd" if mask == "thd" else "bshd", softcap=cap, **options
        )
        leaves = [3.0 * torch.randn(2, 256, heads, 64, device="cuda") for heads in (8, 2, 2)]
        leaves = [x.to(dtype) for x in leaves]
        grad = torch.randn(2, 256, 512, device="cuda").to(dtype)
        arguments = {}
        if "padding" in options["attn_mask_type"]:
            bounds = cumulative(list(lengths), "cuda")
            arguments = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
            for b, n in enumerate(lengths):
                grad[b, n:] = 0
        if mask == "thd":
            leaves = [torch.cat([x[b, :n] for b, n in enumerate(lengths)]) for x in leaves]
            grad = torch.cat([grad[b, :n] for b, n in enumerate(lengths)])
            arguments |= {"max_seqlen_q": 256, "max_seqlen_kv": 256}
        results = []
        for name, wide in ((backend, False), ("reference", True), ("reference", False)):
            inputs = [(x.double() if wide else x).detach().requires_grad_() for x in leaves]
            with use_backend(attention=name):
                try:
                    out = layer(*inputs, **arguments)
                except ValueError as unsupported:
                    assert name == backend != "triton", unsupported
                    pytest.skip(str(unsupported))
                results.append((out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))))
        for got, exact, plain in zip(*results, strict=True):
            error = (got.double() - exact).norm()
            # Libraries approximate tanh with relative error 2^-11.
            allowed = 2.0 * (plain.double() - exact).norm() + 2.0**-9 * exact.norm()
            assert error <= allowed, (cap, float(error / exact.norm()))
