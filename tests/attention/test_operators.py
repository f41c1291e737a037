"""A backend that a compiler cannot trace runs inside two operators, bitwise equal to eager code."""

from __future__ import annotations

import pytest
import torch

from tests.attention.attention_oracle import cumulative
from transformer_engine.common.dispatch import Backend
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionParams
from transformer_engine.pytorch.primitives.attention import reference
from transformer_engine.pytorch.primitives.attention.call import Feature
from transformer_engine.pytorch.primitives.attention.choose import TABLE
from transformer_engine.pytorch.primitives.attention.operators import as_text, from_text
from transformer_engine.pytorch.primitives.attention.passes import Passes


@pytest.fixture
def opaque(monkeypatch):
    """The reference, declared as untraceable, which counts its calls."""
    calls = []

    def forward(request, inputs):
        assert not torch.compiler.is_compiling()
        calls.append("forward")
        return reference.forward(request, inputs)

    def backward(request, inputs, attended, grad_output):
        assert grad_output.is_contiguous()
        calls.append("backward")
        return reference.backward(request, inputs, attended, grad_output)

    passes = Passes("opaque", forward, backward)
    row = Backend("opaque", takes=frozenset(Feature), bind=lambda request: passes, opaque=True)
    monkeypatch.setattr(TABLE, "backends", (*TABLE.backends, row))
    monkeypatch.setattr(TABLE, "order", lambda request: ("opaque",))
    return calls


def sample(device, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


CASES = {
    "sink, largest logit, bias": (
        {"qkv_format": "sbhd", "softmax_type": "learnable", "return_max_logit": True},
        {"core_attention_bias_type": "post_scale_bias"},
    ),
    "causal": ({"qkv_format": "bshd"}, {}),
    "sink, largest logit": (
        {"qkv_format": "sbhd", "softmax_type": "learnable", "return_max_logit": True},
        {},
    ),
    "packed": (
        {"qkv_format": "thd", "attn_mask_type": "padding_causal"},
        {"max_seqlen_q": 6, "max_seqlen_kv": 6},
    ),
    "bias": ({"qkv_format": "bshd"}, {"core_attention_bias_type": "post_scale_bias"}),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=() if case in ("sink, largest logit, bias", "packed") else pytest.mark.slow
        )
        for case in CASES
    ],
)
def test_an_untraceable_backend_compiles(case, opaque, device):
    construction, call = CASES[case]
    module = DotProductAttention(4, 8, num_gqa_groups=2, **construction)
    shape = {"thd": (10,), "bshd": (2, 6), "sbhd": (6, 2)}[construction["qkv_format"]]
    leaves = [sample(device, *shape, heads, 8, seed=heads) for heads in (4, 2, 2)]
    if construction["qkv_format"] == "thd":
        call = {**call, "cu_seqlens_q": cumulative([4, 6], device)}
    if "core_attention_bias_type" in call:
        leaves.append(sample(device, 1, 4, 6, 6))

    def run(q, k, v, bias=None):
        return module(q, k, v, core_attention_bias=bias, **call)

    torch._dynamo.reset()
    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        inputs = [x.clone().requires_grad_() for x in leaves]
        out = function(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        extra = list(module.parameters())
        results.append((*out, *torch.autograd.grad(out[0].square().sum(), [*inputs, *extra])))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    assert opaque.count("forward") == opaque.count("backward") == 2


def test_the_backward_pass_receives_a_contiguous_gradient(opaque, device):
    attention = DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type="no_mask")
    q, k, v = (sample(device, 2, 6, 2, 8, seed=seed).requires_grad_() for seed in range(3))
    out = attention(q, k, v)
    full = sample(device, *out.shape, seed=4)
    transposed = full.transpose(0, 2).contiguous().transpose(0, 2)
    expanded = torch.ones((), device=device).expand(out.shape)
    for strided, copy in ((transposed, full), (expanded, torch.ones_like(out))):
        assert strided.stride(-1) != 1
        actual = torch.autograd.grad(out, (q, k, v), strided, retain_graph=True)
        expected = torch.autograd.grad(out, (q, k, v), copy, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert opaque.count("backward") == 4


def test_a_request_survives_as_text():
    for options in (
        {},
        {"core_attention_bias_type": "alibi", "window_size": (3, 0), "attn_mask_type": "causal"},
    ):
        request = AttentionParams(**options).request()
        assert from_text(as_text(request)) == request
