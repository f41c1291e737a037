"""thd: attention over packed sequences equals attention per sequence, gaps between them included."""

from __future__ import annotations

import pytest
import torch

from tests.attention.attention_oracle import cumulative, padding_mask
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.attention import DotProductAttention

MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")
LENGTHS_Q, LENGTHS_KV = [3, 0, 5, 1], [4, 2, 6, 1]
SLOTS_Q, SLOTS_KV = [4, 1, 5, 3], [4, 4, 7, 1]


@pytest.fixture(params=("torch_sdpa", "reference"))
def backend(request):
    with use_backend(attention=request.param):
        yield request.param


def packed(slots, heads, width, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(slots), heads, width, generator=generator).to(device).requires_grad_()


def sequence(x, slots, lengths, index):
    start = sum(slots[:index])
    return x[start : start + lengths[index]][None]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_packed_sequences_equal_each_sequence_alone(mask, gaps, backend, device):
    slots_q, slots_kv = (SLOTS_Q, SLOTS_KV) if gaps else (LENGTHS_Q, LENGTHS_KV)
    q = packed(slots_q, 4, 8, device, 1)
    k, v = packed(slots_kv, 2, 8, device, 2), packed(slots_kv, 2, 6, device, 3)
    options = {"num_gqa_groups": 2, "attention_type": "cross"}
    module = DotProductAttention(4, (8, 6), qkv_format="thd", attn_mask_type=mask, **options)
    where = {
        "cu_seqlens_q": cumulative(LENGTHS_Q, device),
        "cu_seqlens_kv": cumulative(LENGTHS_KV, device),
    }
    if gaps:
        where["cu_seqlens_q_padded"] = cumulative(slots_q, device)
        where["cu_seqlens_kv_padded"] = cumulative(slots_kv, device)
    out = module(q, k, v, max_seqlen_q=5, max_seqlen_kv=6, **where)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(device)
    gradients = torch.autograd.grad(out, (q, k, v), grad)

    name = "no_mask" if mask == "padding" else mask.removeprefix("padding_")
    alone = DotProductAttention(4, (8, 6), qkv_format="bshd", attn_mask_type=name, **options)
    expected = torch.zeros_like(out)
    for index, length in enumerate(LENGTHS_Q):
        if length:
            keys = (slots_kv, LENGTHS_KV, index)
            parts = (sequence(q, slots_q, LENGTHS_Q, index), sequence(k, *keys), sequence(v, *keys))
            start = sum(slots_q[:index])
            expected[start : start + length] = alone(*parts)[0]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for ours, reference in zip(
        gradients, torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


def policies(device, *groups):
    return [
        {
            "sequence_ids": torch.tensor(ids, device=device),
            "mask_type": "padding_causal",
            "window_size": None,
        }
        for ids in groups
    ]


@pytest.mark.parametrize("dispatch", ["auto", "grouped"])
@pytest.mark.parametrize("groups", [None, ((0, 1, 2, 3),), ((1, 3), (0, 2))], ids=str)
def test_keys_in_self_attention_may_have_their_own_starts(groups, dispatch, backend, device):
    """cu_seqlens_kv_padded without cu_seqlens_kv: the queries' lengths at the keys' starts, with policies too."""
    slots_q, slots_kv = [4, 1, 5, 3], [5, 2, 5, 4]
    q = packed(slots_q, 2, 8, device, 1)
    k, v = packed(slots_kv, 2, 8, device, 2), packed(slots_kv, 2, 8, device, 3)
    lengths = cumulative(LENGTHS_Q, device)
    starts = {
        "cu_seqlens_q_padded": cumulative(slots_q, device),
        "cu_seqlens_kv_padded": cumulative(slots_kv, device),
        "max_seqlen_q": 5,
        "max_seqlen_kv": 5,
    }
    module = DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding_causal")
    expected = module(q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths.clone(), **starts)
    if groups is not None:
        starts["thd_attention_policies"] = policies(device, *groups)
        starts["thd_attention_policy_dispatch"] = dispatch
    got = module(q, k, v, cu_seqlens_q=lengths, **starts)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert got.any()


@pytest.mark.parametrize("groups", [None, ((0, 1),), ((0,), (1,))], ids=str)
def test_keys_in_cross_attention_need_lengths(groups, device):
    x, bounds = torch.randn(6, 2, 8, device=device), cumulative([2, 4], device)
    module = DotProductAttention(
        2, 8, qkv_format="thd", attn_mask_type="padding", attention_type="cross"
    )
    options = {} if groups is None else {"thd_attention_policies": policies(device, *groups)}
    with pytest.raises(ValueError, match=r"cu_seqlens_kv.*None"):
        module(x, x, x, cu_seqlens_q=bounds, cu_seqlens_kv_padded=bounds, **options)


def test_padding_masks_have_no_effect_if_lengths_are_given(device):
    """Also a pair of masks in different memory, with the keys' lengths left to their default."""
    x, bounds = torch.randn(2, 4, 2, 8, device=device), cumulative([2, 4], device)
    module = DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type="padding")
    pair = tuple(torch.ones(2, 1, 1, 4, dtype=torch.bool, device=device) for _ in range(2))
    assert torch.equal(
        module(x, x, x, cu_seqlens_q=bounds, attention_mask=pair),
        module(x, x, x, cu_seqlens_q=bounds),
    )
    with pytest.raises(ValueError, match=r"cu_seqlens_kv_padded is .* give both"):
        module(x, x, x, attention_mask=pair[0], cu_seqlens_kv_padded=bounds)


@pytest.mark.parametrize("mask", MASKS)
def test_packed_equals_padded(mask, backend, device):
    lengths, size = [3, 5], 5
    x = torch.randn(3, 2, size, 2, 4, generator=torch.Generator().manual_seed(0)).to(device)
    real = ~padding_mask(lengths, size, device)[:, 0, 0]
    module = DotProductAttention(2, 4, attn_mask_type=mask)
    bounds = cumulative(lengths, device)
    padded = module(*x, qkv_format="bshd", cu_seqlens_q=bounds)
    flat = module(
        *(part[real] for part in x),
        qkv_format="thd",
        cu_seqlens_q=bounds,
        max_seqlen_q=5,
        max_seqlen_kv=5,
    )
    torch.testing.assert_close(flat, padded[real], atol=1e-6, rtol=1e-6)
    assert not padded[~real].any()


def test_missing_longest_lengths_are_derived(device):
    lengths = [3, 70]
    x = torch.randn(3, 73, 2, 4, generator=torch.Generator().manual_seed(0)).to(device)
    module = DotProductAttention(2, 4, qkv_format="thd", attn_mask_type="padding_causal")
    bounds = cumulative(lengths, device)
    argument = module(
        *x, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=70, max_seqlen_kv=70
    )
    torch.testing.assert_close(
        module(*x, cu_seqlens_q=bounds, cu_seqlens_kv=bounds), argument, atol=1e-6, rtol=1e-6
    )


def test_packed_lengths_can_come_from_a_padding_mask(device):
    lengths = [3, 5]
    x = torch.randn(3, 8, 2, 4, generator=torch.Generator().manual_seed(0)).to(device)
    module = DotProductAttention(2, 4, qkv_format="thd", attn_mask_type="padding")
    by_mask = module(
        *x, attention_mask=padding_mask(lengths, 5, device), max_seqlen_q=5, max_seqlen_kv=5
    )
    by_lengths = module(
        *x, cu_seqlens_q=cumulative(lengths, device), max_seqlen_q=5, max_seqlen_kv=5
    )
    torch.testing.assert_close(by_mask, by_lengths, rtol=0, atol=0)


@pytest.mark.parametrize("mask", ["causal", "no_mask", "arbitrary"])
def test_packed_sequences_need_a_padding_mask(mask, device):
    x = torch.randn(8, 2, 4, device=device)
    with pytest.raises(ValueError, match="need a padding mask"):
        DotProductAttention(2, 4, qkv_format="thd", attn_mask_type=mask)(x, x, x)


def test_lengths_must_be_int32(device):
    x = torch.randn(8, 2, 4, device=device)
    bounds = cumulative([3, 5], device).long()
    with pytest.raises(ValueError, match=r"torch.int64; it must be torch.int32"):
        DotProductAttention(2, 4, qkv_format="thd", attn_mask_type="padding")(
            x, x, x, cu_seqlens_q=bounds
        )


def test_a_buffer_with_only_padding_is_zero_and_differentiable(device):
    layer = DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding_causal")
    leaves = [torch.randn(4, 2, 8, device=device).requires_grad_() for _ in range(3)]
    bounds = {
        "cu_seqlens_q": torch.tensor([0, 0, 0], dtype=torch.int32, device=device),
        "cu_seqlens_q_padded": torch.tensor([0, 2, 4], dtype=torch.int32, device=device),
    }
    out = layer(*leaves, **bounds)
    assert out.shape == (4, 16) and not out.any()
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), leaves))
