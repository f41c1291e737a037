"""Forward and backward passes of attention: key blocks merged by log-sum-exp equal the full attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from transformer_engine.pytorch.functions.attention.autograd import attention_backward
from transformer_engine.pytorch.primitives.attention.call import (
    Attended,
    AttentionCall,
    AttentionInputs,
)
from transformer_engine.pytorch.primitives.attention.choose import choose_passes
from transformer_engine.pytorch.primitives.attention.mask import resolve

BATCH, QUERIES, HEADS, GROUPS, SIZE = 2, 6, 4, 2, 8
BLOCKS = (3, 7)
KEYS = sum(BLOCKS)


def block_call(device, keys, form):
    return AttentionCall.on(
        device.type,
        False,
        dtype=torch.float32,
        batch=BATCH,
        heads=HEADS,
        groups=GROUPS,
        seqlen_q=QUERIES,
        seqlen_kv=keys,
        head_dim_qk=SIZE,
        head_dim_v=SIZE,
        q_format=form,
        kv_format=form,
        mask=resolve("no_mask", window_size=None, bottom_right_diagonal=None),
        scale=SIZE**-0.5,
    )


def tensors(device, form, *sizes):
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, BATCH) if form == "sbhd" else (BATCH, tokens) for tokens, _ in sizes]
    return [
        torch.randn(*shape, heads, SIZE, generator=generator).to(device)
        for shape, (_, heads) in zip(shapes, sizes, strict=True)
    ]


def rows(lse, form):
    """lse [b, h, s] as a factor for an output [.., h, d]."""
    return lse.permute(2, 0, 1)[..., None] if form == "sbhd" else lse.transpose(1, 2)[..., None]


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_merged_key_blocks_equal_full_attention_with_gradients(form, device):
    q, k, v, grad = tensors(
        device, form, (QUERIES, HEADS), (KEYS, GROUPS), (KEYS, GROUPS), (QUERIES, HEADS)
    )
    full = block_call(device, KEYS, form)
    passes, inputs = choose_passes(full), AttentionInputs(q, k, v)
    expected = passes.forward(full, inputs)
    reference = attention_backward(passes, full, inputs, expected, grad)

    axis = 0 if form == "sbhd" else 1
    parts = [
        (replace(full, seqlen_kv=size), AttentionInputs(q, k_part, v_part))
        for size, k_part, v_part in zip(
            BLOCKS, k.split(BLOCKS, axis), v.split(BLOCKS, axis), strict=True
        )
    ]
    done = [choose_passes(call).forward(call, inputs) for call, inputs in parts]
    lse = torch.stack([attended.lse for attended in done])
    assert lse.dtype == torch.float32 and lse.shape[1:] == (BATCH, HEADS, QUERIES)
    merged_lse = torch.logsumexp(lse, 0)
    output = sum(
        attended.output * rows((local - merged_lse).exp(), form)
        for attended, local in zip(done, lse, strict=True)
    )
    assert expected.lse is not None
    torch.testing.assert_close(merged_lse, expected.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output, expected.output, rtol=1e-5, atol=1e-5)

    merged = Attended(output, merged_lse)
    results = [
        attention_backward(choose_passes(call), call, inputs, merged, grad)
        for call, inputs in parts
    ]
    torch.testing.assert_close(sum(part.q for part in results), reference.q, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.cat([part.k for part in results], axis), reference.k, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        torch.cat([part.v for part in results], axis), reference.v, rtol=1e-4, atol=1e-5
    )


def test_a_flat_gradient_is_accepted(device):
    q, k, v, grad = tensors(
        device, "bshd", (QUERIES, HEADS), (KEYS, GROUPS), (KEYS, GROUPS), (QUERIES, HEADS)
    )
    call = block_call(device, KEYS, "bshd")
    passes, inputs = choose_passes(call), AttentionInputs(q, k, v)
    arguments = (passes, call, inputs, passes.forward(call, inputs))
    for one, other in zip(
        attention_backward(*arguments, grad),
        attention_backward(*arguments, grad.flatten(-2)),
        strict=True,
    ):
        assert one is other is None or torch.equal(one, other)
