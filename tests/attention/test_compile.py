"""torch.compile(fullgraph=True) on attention equals eager execution in outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.attention.attention_oracle import cumulative, padding_mask
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.attention import DotProductAttention, MultiheadAttention
from transformer_engine.pytorch.attention.rope import (
    RotaryPositionEmbedding,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
)

pytestmark = pytest.mark.any_device


def compiled(function, dynamic=None):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)


def assert_same_as_eager(function, leaves, parameters=(), dynamic=None):
    """Compare function(*leaves) with its gradients, eager and compiled."""
    results = []
    for run in (function, compiled(function, dynamic)):
        inputs = [x.detach().clone().requires_grad_() for x in leaves]
        out = run(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        gradients = torch.autograd.grad(out[0].square().sum(), [*inputs, *parameters])
        results.append((*out, *gradients))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager, atol=1e-6, rtol=1e-6)


def sample(device, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


CASES = {
    "all together": (
        {
            "num_gqa_groups": 2,
            "window_size": (2, 0),
            "attn_mask_type": "causal_bottom_right",
            "softmax_type": "learnable",
            "return_max_logit": True,
        },
        {"core_attention_bias_type": "alibi"},
    ),
    "recompute": ({"softmax_type": "off-by-one"}, {"checkpoint_core_attention": True}),
    "causal, grouped": ({"num_gqa_groups": 2}, {}),
    "window": ({"window_size": (2, 1), "attn_mask_type": "no_mask"}, {}),
    "bottom right, sink": (
        {
            "attn_mask_type": "causal_bottom_right",
            "softmax_type": "learnable",
            "return_max_logit": True,
        },
        {},
    ),
    "alibi": ({}, {"core_attention_bias_type": "alibi"}),
}
# tests/attention/test_compiled_lengths.py always compiles plain causal attention, with and without groups.
ONE_BY_ONE = ("causal, grouped", "bottom right, sink", "alibi")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in ONE_BY_ONE else ()) for case in CASES],
)
def test_attention_compiles(case, device):
    construction, call = CASES[case]
    module = DotProductAttention(4, 8, qkv_format="bshd", **construction)
    groups = construction.get("num_gqa_groups", 4)
    leaves = [sample(device, 2, 6, heads, 8, seed=heads) for heads in (4, groups, groups)]
    assert_same_as_eager(lambda q, k, v: module(q, k, v, **call), leaves, list(module.parameters()))


@pytest.mark.parametrize(
    "argument",
    ["lengths and bias", "lengths", "mask", pytest.param("bias", marks=pytest.mark.slow)],
)
def test_padding_and_bias_compile(argument, device):
    padding = argument != "bias"
    module = DotProductAttention(
        4, 8, qkv_format="sbhd", attn_mask_type="padding_causal" if padding else "causal"
    )
    leaves = [sample(device, 6, 2, 4, 8, seed=i) for i in range(3)]
    call: dict[str, Any] = {}
    if "lengths" in argument:
        call["cu_seqlens_q"] = cumulative([4, 6], device)
    if "mask" in argument:
        call["attention_mask"] = padding_mask([4, 6], 6, device)
    if "bias" in argument:
        call["core_attention_bias_type"] = "post_scale_bias"
        leaves.append(sample(device, 1, 4, 6, 6))
    assert_same_as_eager(
        lambda q, k, v, bias=None: module(q, k, v, core_attention_bias=bias, **call), leaves
    )


# tests/attention/test_compiled_lengths.py always compiles packed sequences with both backends, and torch
# computes torch_sdpa's gradient.
@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("torch_sdpa", marks=pytest.mark.slow)]
)
def test_packed_sequences_compile_with_an_explicit_longest_length(backend, device):
    module = DotProductAttention(4, 8, qkv_format="thd", attn_mask_type="padding_causal")
    bounds = cumulative([4, 6], device)
    leaves = [sample(device, 10, 4, 8, seed=i) for i in range(3)]
    call = {"cu_seqlens_q": bounds, "max_seqlen_q": 6, "max_seqlen_kv": 6}
    with use_backend(attention=backend):
        assert_same_as_eager(lambda q, k, v: module(q, k, v, **call), leaves)


def test_compiled_packed_sequences_require_the_longest_length(device):
    module = DotProductAttention(4, 8, qkv_format="thd", attn_mask_type="padding")
    x = sample(device, 10, 4, 8)
    with pytest.raises(Exception, match=r"max_seqlen_q is needed under torch\.compile"):
        compiled(module)(x, x, x, cu_seqlens_q=cumulative([4, 6], device))


def test_dropout_compiles(device):
    module = DotProductAttention(
        4, 8, qkv_format="bshd", attention_dropout=0.5, softmax_type="off-by-one"
    )
    q, k, v = (sample(device, 2, 6, 4, 8, seed=i).requires_grad_() for i in range(3))
    out = compiled(module)(q, k, v)
    out.sum().backward()
    without = module.eval()(q, k, v)
    assert not torch.allclose(out, without) and q.grad.isfinite().all()
    torch.testing.assert_close(compiled(module)(q, k, v), without)


@pytest.mark.parametrize("tensor_format", ["sbhd", "thd"])
def test_rotary_embedding_compiles(tensor_format, device):
    angles = RotaryPositionEmbedding(8)(6).to(device)
    shape = (10, 4, 8) if tensor_format == "thd" else (6, 2, 4, 8)
    bounds = cumulative([4, 6], device) if tensor_format == "thd" else None
    rotate = lambda x: apply_rotary_pos_emb(x, angles, tensor_format, cu_seqlens=bounds)  # noqa: E731
    assert_same_as_eager(rotate, [sample(device, *shape)])


def test_packed_rotary_embedding_compiles(device):
    angles = RotaryPositionEmbedding(8)(6).to(device)
    rotate = lambda x: apply_fused_qkv_rotary_pos_emb(x, angles, angles, [16, 8, 8])  # noqa: E731
    assert_same_as_eager(rotate, [sample(device, 6, 2, 2, 32)])


def test_multihead_attention_compiles(device):
    module = MultiheadAttention(
        32,
        4,
        num_gqa_groups=2,
        attention_dropout=0.0,
        input_layernorm=True,
        attention_type="cross",
        qk_norm_type="RMSNorm",
        device=device,
    )
    angles = RotaryPositionEmbedding(8)(6).to(device)
    leaves = [sample(device, 6, 2, 32), sample(device, 4, 2, 32, seed=1)]

    def run(x, encoder):
        return module(x, encoder_output=encoder, rotary_pos_emb=angles)

    assert_same_as_eager(run, leaves, list(module.parameters()))


def cap_biased_score(graph, score, tensors):
    bias = graph.add(score, tensors["bias"])
    return graph.mul(graph.tanh(bias), tensors["cap"])


def softcap_with_bias(score, b, h, i, j, bias, cap):
    return cap * torch.tanh(score + bias[0, h, i, j])


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="torch 2.11 does not trace the objects"
)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("score_mod", [softcap_with_bias, cap_biased_score])
@pytest.mark.sampled
def test_score_mod_compiles_with_gradients_for_its_tensors(score_mod, dynamic, device):
    module = DotProductAttention(2, 16, attn_mask_type="no_mask", qkv_format="bshd")

    def attend(q, k, v, bias, cap):
        return module(q, k, v, score_mod=score_mod, score_mod_tensors={"bias": bias, "cap": cap})

    leaves = [sample(device, 1, 5, 2, 16, seed=seed) for seed in range(3)]
    leaves += [sample(device, 1, 2, 5, 5), sample(device, 1)]
    assert_same_as_eager(attend, leaves, dynamic=dynamic)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="torch 2.11 does not trace the objects"
)
def test_a_score_mod_that_the_compiled_function_defines_compiles(device):
    module = DotProductAttention(2, 16, qkv_format="bshd")

    def attend(q, k, v, slope):
        of_indices = module(q, k, v, score_mod=lambda score, b, h, i, j: score + slope * (i - j))
        of_graph = module(q, k, v, score_mod=lambda graph, score, tensors: graph.mul(score, slope))
        return torch.cat([of_indices, of_graph])

    leaves = [sample(device, 1, 5, 2, 16, seed=seed) for seed in range(3)]
    assert_same_as_eager(attend, [*leaves, sample(device, 1)])
