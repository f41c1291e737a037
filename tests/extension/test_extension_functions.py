"""Caches, conversions, rotary embedding and softmaxes under the extension's names, against plain formulas."""

from __future__ import annotations

import pytest
import torch

import transformer_engine_torch as tex
from tests.attention.attention_oracle import cumulative
from transformer_engine.pytorch.attention import RotaryPositionEmbedding, apply_rotary_pos_emb

SBHD, BSHD, THD = (tex.NVTE_QKV_Format[f"NVTE_{name}"] for name in ("SBHD", "BSHD", "THD"))


def sample(device, *shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("form", [SBHD, BSHD, THD])
def test_new_keys_follow_the_cached_ones_in_their_pages(form, device):
    new_lens, cached = [2, 1], [5, 1]  # the cached lengths count the new tokens
    k = sample(device, 3, 2, 4) if form == THD else sample(device, 2, 3, 2, 4)
    v = -k
    args = [x.transpose(0, 1).contiguous() if form == SBHD else x for x in (k, v)]
    pages = torch.tensor([[4, 2], [0, 1]], dtype=torch.int32, device=device)
    caches = [torch.zeros(5, 4, 2, 4, device=device) for _ in range(2)]
    tex.copy_to_kv_cache(
        *args,
        *caches,
        pages,
        cumulative(new_lens, device),
        cumulative(cached, device),
        form,
        2,
        3,
        8,
        2,
        False,
    )
    first = k[:2] if form == THD else k[0, :2]
    second = k[2] if form == THD else k[1, 0]
    expected = torch.zeros(5, 4, 2, 4, device=device)
    expected[4, 3], expected[2, 0], expected[0, 0] = first[0], first[1], second
    torch.testing.assert_close(caches[0], expected, rtol=0, atol=0)
    torch.testing.assert_close(caches[1], -expected, rtol=0, atol=0)


def test_a_contiguous_cache_follows_the_batch_order(device):
    caches = [sample(device, 3, 4, 1, 2, seed=seed) for seed in (1, 2)]
    before = [cache.clone() for cache in caches]
    new = sample(device, 2, 1, 1, 2)
    rows = torch.tensor([2, 0], dtype=torch.int32, device=device)
    ones, cached = cumulative([1, 1], device), cumulative([3, 1], device)
    tex.copy_to_kv_cache(new, new, *caches, rows, ones, cached, BSHD, 2, 1, 4, 1, True)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[0, :2], old[2, :2]) and torch.equal(cache[0, 2], new[0, 0])
        assert torch.equal(cache[1, 0], new[1, 0]) and torch.equal(cache[1, 1:], old[0, 1:])
        assert torch.equal(cache[2], old[2])


def test_a_paged_cache_without_a_table_is_rejected(device):
    x, lens = sample(device, 1, 1, 1, 2), cumulative([1], device)
    with pytest.raises(ValueError, match="a paged cache needs page_table"):
        tex.copy_to_kv_cache(x, x, x, x, None, lens, lens, BSHD, 1, 1, 1, 1, False)
    with pytest.raises(ValueError, match="convert it to one of sbhd, bshd, thd"):
        tex.copy_to_kv_cache(
            x, x, x, x, None, lens, lens, tex.NVTE_QKV_Format.NVTE_BHSD, 1, 1, 1, 1, True
        )


def test_tensors_that_do_not_fit_the_cache_are_rejected(device):
    cache, lens = sample(device, 2, 4, 3, 2), cumulative([1], device)
    new = sample(device, 1, 1, 3, 4)
    with pytest.raises(
        ValueError, match=r"new_k \[1, 1, 3, 4\] does not fit k_cache \[2, 4, 3, 2\]"
    ):
        tex.copy_to_kv_cache(new, new, cache, cache, None, lens, lens, BSHD, 1, 1, 4, 1, True)
    wide = sample(device, 2, 4, 3, 4)[..., :2]
    with pytest.raises(ValueError, match="does not fit v_cache"):
        tex.copy_to_kv_cache(
            new[..., :2], new[..., :2], cache, wide, None, lens, lens, BSHD, 1, 1, 4, 1, True
        )


def test_packed_and_padded_sequences_convert_into_each_other(device):
    lengths = [2, 0, 4]
    packed, bounds = sample(device, 6, 3, 2), cumulative(lengths, device)
    padded = tex.convert_thd_to_bshd(packed, bounds, 3, 5)
    assert padded.shape == (3, 5, 3, 2)
    for row, part in zip(padded, packed.split(lengths), strict=True):
        assert torch.equal(row[: len(part)], part) and not row[len(part) :].any()
    assert torch.equal(tex.convert_bshd_to_thd(padded, bounds, 6), packed)


def test_filling_takes_a_value_or_the_first_row_to_clear(device):
    x = sample(device, 5, 2)
    saved = x[:3].clone()
    tex.mha_fill(x, torch.tensor([3], device=device))
    assert torch.equal(x[:3], saved) and not x[3:].any()
    tex.mha_fill(x, 2.5)
    assert bool((x == 2.5).all())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", [SBHD, BSHD, THD])
def test_rotation_and_its_gradient_are_those_of_the_module(form, interleaved, device):
    name = form.name.removeprefix("NVTE_").lower()
    x = sample(device, 6, 2, 8) if form == THD else sample(device, 4, 3, 2, 8)
    bounds = cumulative([4, 2], device) if form == THD else None
    freqs = RotaryPositionEmbedding(8, interleaved=interleaved)(8).to(device)
    leaf = x.clone().requires_grad_()
    expected = apply_rotary_pos_emb(leaf, freqs, name, interleaved=interleaved, cu_seqlens=bounds)
    grad = sample(device, *x.shape, seed=1)
    where = (None, form, interleaved, bounds, 1, 0)
    torch.testing.assert_close(tex.fused_rope_forward(x, freqs, *where), expected.detach())
    (want_grad,) = torch.autograd.grad(expected, leaf, grad)
    torch.testing.assert_close(tex.fused_rope_backward(grad, freqs, *where), want_grad)


def test_rotation_of_packed_projections_and_its_gradient(device):
    sizes = [16, 8, 8]
    qkv = sample(device, 4, 2, 3, sum(sizes)).requires_grad_()
    freqs = [RotaryPositionEmbedding(8, rotary_base=base)(8).to(device) for base in (100.0, 1000.0)]
    start = torch.tensor([0, 3], dtype=torch.int32, device=device)
    q, k, v = tex.fused_qkv_rope_forward(qkv.detach(), *freqs, start, sizes, SBHD, False, 1, 0)
    parts = qkv.split(sizes, dim=-1)
    want_q = apply_rotary_pos_emb(parts[0].reshape(4, 2, 6, 8), freqs[0], start_positions=start)
    want_k = apply_rotary_pos_emb(parts[1], freqs[1], start_positions=start)
    for got, expected in zip((q, k, v), (want_q, want_k, parts[2]), strict=True):
        torch.testing.assert_close(got, expected.detach())
    grads = [sample(device, *x.shape, seed=seed) for seed, x in enumerate((q, k, v))]
    (expected,) = torch.autograd.grad([want_q, want_k, parts[2]], qkv, grads)
    got = tex.fused_qkv_rope_backward(
        *grads, *freqs, sizes, SBHD, False, 1, 0, start_positions=start
    )
    torch.testing.assert_close(got, expected)


def hidden(name, device):
    """[.., q, k] bool, True where a key is hidden."""
    if name == "scaled_masked_softmax":
        return sample(device, 2, 1, 4, 6) > 0.5
    if name == "scaled_upper_triang_masked_softmax":
        return torch.ones(6, 6, dtype=torch.bool, device=device).triu(1)
    if name == "scaled_aligned_causal_masked_softmax":
        return torch.ones(4, 6, dtype=torch.bool, device=device).triu(3)
    return torch.zeros(4, 6, dtype=torch.bool, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        "scaled_softmax",
        "scaled_masked_softmax",
        "scaled_upper_triang_masked_softmax",
        "scaled_aligned_causal_masked_softmax",
    ],
)
def test_softmaxes_and_their_gradients(name, dtype, device):
    mask = hidden(name, device)
    shape = (6, 6, 6) if "triang" in name else (2, 3, 4, 6)
    x = sample(device, *shape, seed=1, dtype=dtype)
    wide = x.double().requires_grad_()
    expected = torch.softmax((0.7 * wide).masked_fill(mask, -torch.inf), dim=-1).nan_to_num()
    extra = [mask] if name == "scaled_masked_softmax" else []
    got = getattr(tex, name + "_forward")(x, *extra, 0.7)
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 8e-3}
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected.detach(), **close)
    grad = sample(device, *shape, seed=2, dtype=dtype)
    (want_grad,) = torch.autograd.grad(expected, wide, grad.double())
    got = getattr(tex, name + "_backward")(grad, got, 0.7)
    torch.testing.assert_close(got.double(), want_grad, **{**close, "atol": 4 * close["atol"]})
