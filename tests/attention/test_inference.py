"""Decoding with a key-value cache equals attention over the whole sequences, whoever joins and leaves."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.attention import DotProductAttention, InferenceParams, MultiheadAttention
from transformer_engine.pytorch.attention.dot_product_attention.choose import TABLE
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

HEADS, GROUPS, WIDTH = 4, 2, 8
# Steps of {sequence: new tokens}: prefill, decode, "b" leaves and "d" takes its row, order changes, a chunk.
SCHEDULE = (
    {"a": 3, "b": 5},
    {"a": 1, "b": 1},
    {"a": 1, "b": 1, "c": 4},
    {"c": 1, "a": 1, "d": 2},
    {"d": 3, "c": 1, "a": 2},
    {"a": 1},
)


@pytest.fixture(params=TABLE.names())
def backend(request):
    with use_backend(attention=request.param):
        yield request.param


def params(**options):
    options = {"num_heads_kv": GROUPS, "head_dim_k": WIDTH, "dtype": torch.float32, **options}
    return InferenceParams(4, 16, **options)


def tokens(device, width):
    """{sequence: [16, width]} inputs of every sequence that occurs."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(16, width, generator=generator).to(device) for name in "abcd"}


def batch(parts, tensor_format):
    """Sequences [n, ..] of different n as one tensor, padded with nonsense behind the real tokens."""
    if tensor_format == "thd":
        return torch.cat(parts)
    size = max(len(part) for part in parts)
    padded = torch.stack([torch.cat((p, p.new_full((size - len(p), *p.shape[1:]), 9.0))) for p in parts])
    return padded.transpose(0, 1) if tensor_format == "sbhd" else padded


def unbatched(out, sizes, tensor_format):
    if tensor_format == "thd":
        return list(out.split(sizes))
    out = out.transpose(0, 1) if tensor_format == "sbhd" else out
    return [out[i, :n] for i, n in enumerate(sizes)]


def play(step, cache, data, tensor_format):
    """{sequence: outputs of its tokens in order} over the schedule; data go on where they stopped."""
    used, outputs = {}, {}
    for entry in SCHEDULE:
        cache.pre_step(OrderedDict(entry))
        parts = [data[name][used.get(name, 0) : used.get(name, 0) + n] for name, n in entry.items()]
        out = step(batch(parts, tensor_format))
        for (name, n), rows in zip(
            entry.items(), unbatched(out, list(entry.values()), tensor_format), strict=True
        ):
            used[name] = used.get(name, 0) + n
            outputs.setdefault(name, []).append(rows)
    return {name: torch.cat(rows) for name, rows in outputs.items()}


@pytest.mark.parametrize("tensor_format", ["bshd", "sbhd", "thd"])
@torch.no_grad()
def test_cached_attention_equals_attention_over_everything(tensor_format, backend, device):
    mask = "padding_causal" if tensor_format == "thd" else "causal"
    module = DotProductAttention(
        HEADS, WIDTH, num_gqa_groups=GROUPS, layer_number=1, qkv_format=tensor_format, attn_mask_type=mask
    )
    split = [HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH]
    data = tokens(device, sum(split))

    def qkv(x):
        return [part.unflatten(-1, (-1, WIDTH)) for part in x.split(split, dim=-1)]

    cache = params(qkv_format=tensor_format)
    limits = {"max_seqlen_q": 5} if tensor_format == "thd" else {}
    outputs = play(lambda x: module(*qkv(x), inference_params=cache, **limits), cache, data, tensor_format)
    whole = DotProductAttention(HEADS, WIDTH, num_gqa_groups=GROUPS, qkv_format="bshd")
    for name, got in outputs.items():
        want = whole(*qkv(data[name][None, : len(got)]))[0]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tensor_format", ["bshd", "sbhd"])
@torch.no_grad()
def test_a_cached_layer_with_rotary_positions_equals_the_whole_forward(tensor_format, interleaved, device):
    module = MultiheadAttention(
        32,
        HEADS,
        num_gqa_groups=GROUPS,
        attention_dropout=0.0,
        layer_number=3,
        qkv_format=tensor_format,
        rotary_pos_interleaved=interleaved,
        device=device,
    ).eval()
    angles = RotaryPositionEmbedding(WIDTH, interleaved=interleaved)(16).to(device)
    data = tokens(device, 32)
    cache = params()
    options = {"rotary_pos_emb": angles, "inference_params": cache}
    outputs = play(lambda x: module(x.contiguous(), **options), cache, data, tensor_format)
    for name, got in outputs.items():
        whole = batch([data[name][: len(got)]], tensor_format).contiguous()
        want = unbatched(module(whole, rotary_pos_emb=angles), [len(got)], tensor_format)[0]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_packed_layer_rotates_by_the_cached_lengths(device):
    module = MultiheadAttention(
        32,
        HEADS,
        num_gqa_groups=GROUPS,
        layer_number=1,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        device=device,
    ).eval()
    angles = RotaryPositionEmbedding(WIDTH)(16).to(device)
    data = tokens(device, 32)
    cache = params(qkv_format="thd")
    options = {"rotary_pos_emb": angles, "max_seqlen_q": 5}
    outputs = play(lambda x: module(x, inference_params=cache, **options), cache, data, "thd")
    for name, got in outputs.items():
        bounds = torch.tensor([0, len(got)], dtype=torch.int32, device=device)
        want = module(
            data[name][: len(got)],
            rotary_pos_emb=angles,
            cu_seqlens_q=bounds,
            max_seqlen_q=16,
            max_seqlen_kv=16,
        )
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_lengths_before_the_step_follow_the_batch_order(device):
    cache = params()
    for entry in SCHEDULE[:4]:
        cache.pre_step(OrderedDict(entry))
    assert cache.get_seqlens_pre_step().tolist() == [4, 5, 0]
    assert cache.cu_seqlens_kv.tolist() == [0, 5, 11, 13]
    assert cache.sequences == {"c": 5, "a": 6, "d": 2}


def test_reset_forgets_the_sequences(device):
    cache = params()
    cache.pre_step({"a": 3})
    cache.reset()
    assert not cache.sequences and cache.get_seqlens_pre_step().numel() == 0
    cache.pre_step({"a": 2})
    assert cache.get_seqlens_pre_step().tolist() == [0]


def test_padding_tokens_are_not_cached(device):
    cache = params()
    cache.allocate_memory(1)
    cache.pre_step({"a": 2, "b": 1})
    new = torch.ones(2, 3, GROUPS, WIDTH, device=cache.device)
    keys, *_ = cache.step(1, new, new, "bshd")
    assert keys[:, :, 0, 0].sum(dim=1).tolist() == [2.0, 1.0]
    assert cache.convert_paged_to_nonpaged(1)[0].shape == (2, 16, GROUPS, WIDTH)


def test_limits_are_checked_before_anything_changes(device):
    cache = params(max_ctx_len=10)
    cache.pre_step({"a": 9, "b": 1})
    with pytest.raises(ValueError, match=r"'a' would have 17 tokens > max_sequence_length=16"):
        cache.pre_step({"b": 1, "a": 8})
    with pytest.raises(ValueError, match=r"brings 11 tokens, allowed: 0\.\.max_ctx_len=10"):
        cache.pre_step({"c": 11})
    with pytest.raises(ValueError, match=r"5 sequences in a step > max_batch_size=4"):
        cache.pre_step(dict.fromkeys("vwxyz", 1))
    assert cache.sequences == {"a": 9, "b": 1}
    assert cache.get_seqlens_pre_step().tolist() == [0, 0]


def test_tensors_that_do_not_fit_the_step_are_refused_before_writing(device):
    cache = params()
    cache.allocate_memory(1)
    cache.pre_step({"a": 4})
    good = torch.ones(1, 4, GROUPS, WIDTH, device=cache.device)
    with pytest.raises(ValueError, match="the cache holds"):
        cache.step(1, good[..., :4], good, "bshd")
    with pytest.raises(ValueError, match="keys of 2 sequences, pre_step announced 1"):
        cache.step(1, good.expand(2, -1, -1, -1), good.expand(2, -1, -1, -1), "bshd")
    with pytest.raises(ValueError, match=r"keys have 3 tokens a sequence, this step needs 4\.\.16"):
        cache.step(1, good[:, :3], good[:, :3], "bshd")
    with pytest.raises(ValueError, match="qkv_format='hsbd'"):
        cache.step(1, good, good, "hsbd")
    assert not cache.convert_paged_to_nonpaged(1)[0].any()


def test_wrong_construction_is_refused(device):
    with pytest.raises(NotImplementedError, match="is_paged=True is not available"):
        params(is_paged=True)
    with pytest.raises(ValueError, match="qkv_format='hsbd'"):
        params(qkv_format="hsbd")
    cache = params()
    cache.pre_step({"a": 1})
    x = torch.ones(1, 1, HEADS, WIDTH, device=device)
    with pytest.raises(ValueError, match="needs layer_number"):
        DotProductAttention(HEADS, WIDTH, qkv_format="bshd")(x, x, x, inference_params=cache)


@torch.no_grad()
def test_decoding_with_a_cache_compiles(device):
    module = DotProductAttention(4, 8, qkv_format="bshd", layer_number=1)
    outputs = []
    torch._dynamo.reset()
    for run in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        cache = InferenceParams(2, 8, 4, 8, dtype=torch.float32)
        cache.allocate_memory(1)
        got = []
        for step, size in enumerate((3, 1, 1)):
            cache.pre_step({"a": size, "b": 1})
            x = torch.randn(3, 2, size, 4, 8, generator=torch.Generator().manual_seed(step)).to(device)
            got.append(run(*x, inference_params=cache))
        outputs.append(got)
    for eager, traced in zip(*outputs, strict=True):
        torch.testing.assert_close(traced, eager, atol=1e-6, rtol=1e-6)
