"""torch.compile(fullgraph=True) on attention equals eager execution at changing lengths."""

from __future__ import annotations

import pytest
import torch

from tests.attention.attention_oracle import cumulative
from tests.attention.test_compile import compiled, sample
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.attention import DotProductAttention, MultiheadAttention
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

pytestmark = pytest.mark.any_device


def compare_lengths(lengths, eager, function, inputs_of):
    """Compare outputs and gradients at each length; one compiled function serves all lengths."""
    for length in lengths:
        leaves = [x.requires_grad_() for x in inputs_of(length)]
        results = [f(*leaves) for f in (eager, function)]
        gradients = [torch.autograd.grad(out.float().square().sum(), leaves) for out in results]
        for plain, traced in zip(
            (results[0], *gradients[0]), (results[1], *gradients[1]), strict=True
        ):
            torch.testing.assert_close(traced, plain, atol=1e-6, rtol=1e-6)


def test_two_attentions_compile_at_changing_lengths(device):
    """Dynamo makes sizes symbols when they change, and head counts too when modules differ in them."""
    modules = [
        DotProductAttention(4, 8, qkv_format="bshd", num_gqa_groups=groups) for groups in (4, 2)
    ]
    torch._dynamo.reset()
    functions = [torch.compile(m, fullgraph=True, backend="aot_eager") for m in modules]
    for length in (6, 10):
        for groups, eager, function in zip((4, 2), modules, functions, strict=True):
            compare_lengths(
                [length],
                eager,
                function,
                lambda s, g=groups: [sample(device, 2, s, heads, 8, seed=s) for heads in (4, g, g)],
            )


@pytest.mark.parametrize("case", ["bias", "alibi", "arbitrary"])
@pytest.mark.sampled(1)
def test_alibi_bias_and_masks_compile_at_changing_lengths(case, device):
    module = DotProductAttention(4, 8, qkv_format="bshd")

    def attend(q, k, v):
        length = q.shape[1]
        if case == "alibi":
            return module(q, k, v, core_attention_bias_type="alibi")
        square = torch.ones(1, 1, length, length, device=q.device).tril()
        if case == "bias":
            return module(
                q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=square
            )
        return module(q, k, v, attn_mask_type="arbitrary", attention_mask=square == 0)

    function = compiled(attend)
    compare_lengths(
        (5, 8),
        attend,
        function,
        lambda s: [sample(device, 2, s, 4, 8, seed=s + i) for i in range(3)],
    )


@pytest.mark.parametrize("backend", ["reference", "torch_sdpa"])
def test_packed_sequences_share_a_graph_for_any_token_count(backend, device):
    module = DotProductAttention(4, 8, qkv_format="thd", attn_mask_type="padding_causal")
    starts = torch.zeros(3, dtype=torch.int32, device=device)

    def attend(q, k, v):
        return module(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=16, max_seqlen_kv=16
        )

    graphs = []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    function = torch.compile(attend, fullgraph=True, backend=counting)
    with use_backend(attention=backend), torch.no_grad():
        for lengths in ([5, 3], [7, 9], [2, 16], [11, 4]):
            starts.copy_(cumulative(lengths, device))
            q, k, v = (sample(device, sum(lengths), 4, 8, seed=i) for i in range(3))
            torch.testing.assert_close(function(q, k, v), attend(q, k, v), atol=1e-6, rtol=1e-6)
    assert len(graphs) <= 2  # with the first token count, and with a symbol for it


@pytest.mark.slow
def test_a_multihead_attention_compiles_at_changing_lengths(device):
    module = MultiheadAttention(
        32, 4, num_gqa_groups=2, attention_dropout=0.0, fuse_qkv_params=True, device=device
    )
    angles = RotaryPositionEmbedding(8)(max_seq_len=32).to(device)

    def attend(x):
        return module(x, rotary_pos_emb=angles[: x.shape[0]])

    compare_lengths(
        (8, 16, 24), attend, compiled(attend), lambda s: [sample(device, s, 2, 32, seed=s)]
    )
