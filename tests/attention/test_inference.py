"""Decoding with a key-value cache equals attention over whole sequences, while sequences join and leave."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import pytest
import torch

from transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
)
from transformer_engine.pytorch.attention.kv_cache import NonPagedKVCacheManager
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

HEADS, GROUPS, WIDTH = 4, 2, 8
# {sequence: new tokens} per step: prefill, decode, "b" leaves and "d" takes its row, order changes, a chunk.
SCHEDULE = (
    {"a": 3, "b": 5},
    {"a": 1, "b": 1},
    {"a": 1, "b": 1, "c": 4},
    {"c": 1, "a": 1, "d": 2},
    {"d": 3, "c": 1, "a": 2},
    {"a": 1},
)


PAGED = pytest.mark.parametrize(
    "pages",
    [
        {},
        {"is_paged": True, "page_size": 4, "total_num_pages": 12},
        {"is_paged": True, "page_size": 1},
        {"is_paged": False, "page_size": 4, "total_num_pages": 1},
    ],
    ids=["contiguous", "paged", "page-of-one", "pages-not-asked-for"],
)


def params(**options):
    options = {"num_heads_kv": GROUPS, "head_dim_k": WIDTH, "dtype": torch.float32, **options}
    return InferenceParams(4, 16, **options)


def tokens(device, width):
    """{sequence: [16, width]} inputs for every sequence that occurs."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(16, width, generator=generator).to(device) for name in "abcd"}


def batch(parts, tensor_format):
    """Join sequences [n, ..] with different n in one tensor; padding after the real tokens is arbitrary."""
    if tensor_format == "thd":
        return torch.cat(parts)
    size = max(len(part) for part in parts)
    padded = torch.stack(
        [torch.cat((p, p.new_full((size - len(p), *p.shape[1:]), 9.0))) for p in parts]
    )
    return padded.transpose(0, 1) if tensor_format == "sbhd" else padded


def split_batch(out, sizes, tensor_format):
    if tensor_format == "thd":
        return list(out.split(sizes))
    out = out.transpose(0, 1) if tensor_format == "sbhd" else out
    return [out[i, :n] for i, n in enumerate(sizes)]


def play(step, cache, data, tensor_format):
    """Collect {sequence: its tokens' outputs in order} over the schedule; steps continue the sequences."""
    used, outputs = {}, {}
    for entry in SCHEDULE:
        cache.pre_step(OrderedDict(entry))
        parts = [data[name][used.get(name, 0) : used.get(name, 0) + n] for name, n in entry.items()]
        out = step(batch(parts, tensor_format))
        for (name, n), rows in zip(
            entry.items(), split_batch(out, list(entry.values()), tensor_format), strict=True
        ):
            used[name] = used.get(name, 0) + n
            outputs.setdefault(name, []).append(rows)
    return {name: torch.cat(rows) for name, rows in outputs.items()}


@PAGED
@pytest.mark.parametrize("tensor_format", ["bshd", "sbhd", "thd"])
@torch.no_grad()
def test_cached_attention_equals_attention_over_everything(tensor_format, pages, device):
    mask = "padding_causal" if tensor_format == "thd" else "causal"
    module = DotProductAttention(
        HEADS,
        WIDTH,
        num_gqa_groups=GROUPS,
        layer_number=1,
        qkv_format=tensor_format,
        attn_mask_type=mask,
    )
    split = [HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH]
    data = tokens(device, sum(split))

    def qkv(x):
        return [part.unflatten(-1, (-1, WIDTH)) for part in x.split(split, dim=-1)]

    cache = params(qkv_format=tensor_format, **pages)
    outputs = play(lambda x: module(*qkv(x), inference_params=cache), cache, data, tensor_format)
    full = DotProductAttention(HEADS, WIDTH, num_gqa_groups=GROUPS, qkv_format="bshd")
    for name, got in outputs.items():
        expected = full(*qkv(data[name][None, : len(got)]))[0]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@PAGED
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tensor_format", ["bshd", "sbhd"])
@torch.no_grad()
@pytest.mark.sampled
def test_a_cached_layer_with_rotary_positions_equals_the_whole_forward(
    tensor_format, interleaved, pages, device
):
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
    cache = params(**pages)
    options = {"rotary_pos_emb": angles, "inference_params": cache}
    outputs = play(lambda x: module(x.contiguous(), **options), cache, data, tensor_format)
    for name, got in outputs.items():
        whole = batch([data[name][: len(got)]], tensor_format).contiguous()
        want = split_batch(module(whole, rotary_pos_emb=angles), [len(got)], tensor_format)[0]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@PAGED
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("tensor_format", ["bshd", "sbhd"])
@pytest.mark.sampled
def test_a_cached_layer_reads_the_cache_whether_it_could_be_trained_or_not(
    tensor_format, grad, pages, device
):
    module = MultiheadAttention(
        32, HEADS, num_gqa_groups=GROUPS, layer_number=3, qkv_format=tensor_format, device=device
    ).eval()
    data = tokens(device, 32)
    cache = params(**pages)
    with torch.set_grad_enabled(grad):
        outputs = play(
            lambda x: module(x.contiguous(), inference_params=cache), cache, data, tensor_format
        )
    for name, got in outputs.items():
        whole = batch([data[name][: len(got)]], tensor_format).contiguous()
        want = split_batch(module(whole), [len(got)], tensor_format)[0]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("norm", ["L2Normalization", "RMSNorm", "LayerNorm"])
@torch.no_grad()
def test_a_cached_layer_with_norms_and_one_projection_equals_the_whole_forward(
    norm, before, device
):
    module = MultiheadAttention(
        32,
        HEADS,
        num_gqa_groups=GROUPS,
        layer_number=1,
        qkv_format="bshd",
        fuse_qkv_params=True,
        qk_norm_type=norm,
        qk_norm_before_rope=before,
        device=device,
    ).eval()
    angles = RotaryPositionEmbedding(WIDTH)(16).to(device)
    data = tokens(device, 32)
    cache = params(is_paged=True, page_size=4)
    outputs = play(
        lambda x: module(x, rotary_pos_emb=angles, inference_params=cache), cache, data, "bshd"
    )
    for name, got in outputs.items():
        want = module(data[name][None, : len(got)], rotary_pos_emb=angles)[0]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@PAGED
@torch.no_grad()
def test_a_packed_layer_rotates_by_the_cached_lengths(pages, device):
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
    cache = params(qkv_format="thd", **pages)
    options = {"rotary_pos_emb": angles, "inference_params": cache}
    outputs = play(lambda x: module(x, **options), cache, data, "thd")
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


@PAGED
def test_cached_lengths_follow_the_batch_order(pages, device):
    cache = params(**pages)
    for entry in SCHEDULE[:4]:
        cache.pre_step(OrderedDict(entry))
    assert cache.get_seqlens_pre_step().tolist() == [4, 5, 0]
    assert cache.cu_seqlens_kv.tolist() == [0, 5, 11, 13]
    assert cache.sequences == {"c": 5, "a": 6, "d": 2}
    assert list(cache.cache_manager.sequences) == ["c", "a", "d"]


@PAGED
def test_reset_forgets_the_sequences(pages, device):
    cache = params(**pages)
    cache.pre_step({"a": 3})
    cache.reset()
    assert not cache.sequences and cache.get_seqlens_pre_step().numel() == 0
    cache.pre_step({"a": 2})
    assert cache.get_seqlens_pre_step().tolist() == [0]


@PAGED
def test_an_empty_step_ends_every_sequence(pages, device):
    cache = params(**pages)
    cache.allocate_memory(1)
    cache.pre_step({"a": 3, "b": 5})
    cache.pre_step({})
    assert not cache.sequences and not cache.cache_manager.sequences
    assert cache.get_seqlens_pre_step().numel() == 0
    assert cache.cu_seqlens_q.tolist() == cache.cu_seqlens_kv.tolist() == [0]
    cache.pre_step({"a": 2})
    assert cache.get_seqlens_pre_step().tolist() == [0] and cache.cu_seqlens_kv.tolist() == [0, 2]
    if pages.get("is_paged") and "total_num_pages" in pages:
        assert cache.cache_manager.free_pages() == pages["total_num_pages"] - 1


@PAGED
def test_padding_tokens_are_not_cached(pages, device):
    cache = params(**pages)
    cache.allocate_memory(1)
    cache.pre_step({"a": 2, "b": 1})
    new = torch.ones(2, 3, GROUPS, WIDTH, device=cache.device)
    step = cache.step(1, new, new, "bshd")
    assert step.max_seqlen_kv == 16 and step.max_seqlen_q == 2
    assert step.lengths_q.tolist() == [2, 1] and step.lengths_kv.tolist() == [2, 1]
    keys, values = cache.convert_paged_to_nonpaged(1)
    assert keys.shape == values.shape == (2, 16, GROUPS, WIDTH)
    assert keys[0, :2, 0, 0].tolist() == [1.0, 1.0] and keys[1, 0, 0, 0] == 1
    written = cache.cache_manager.cache[1][0][..., 0, 0]
    assert written.sum() == 3


@PAGED
def test_rows_that_move_keep_their_keys(pages, device):
    cache = params(**pages)
    saved = {}
    for turn, entry in enumerate(SCHEDULE):
        cache.pre_step(entry)
        saved = {name: saved.get(name, []) for name in entry}
        new = torch.zeros(len(entry), max(entry.values()), GROUPS, WIDTH, device=device)
        for row, (name, count) in enumerate(entry.items()):
            for index in range(count):
                new[row, index] = 100 * turn + 10 * row + index
                saved[name].append(100.0 * turn + 10 * row + index)
        for layer in (1, 2):
            cache.step(layer, new * layer, -new, "bshd")
        for layer in (1, 2):
            keys, values = cache.convert_paged_to_nonpaged(layer)
            for row, name in enumerate(entry):
                numbers = torch.tensor(saved[name], device=device)
                torch.testing.assert_close(keys[row, : len(numbers), 1, 3], layer * numbers)
                torch.testing.assert_close(values[row, : len(numbers), 0, 0], -numbers)


def test_pages_return_when_a_sequence_ends(device):
    cache = params(is_paged=True, page_size=4, total_num_pages=5)
    manager = cache.cache_manager
    cache.pre_step({"a": 5, "b": 9})
    assert manager.free_pages() == 0
    assert sorted(manager.page_table[:2].flatten().tolist()) == [0, 0, 0, 0, 1, 2, 3, 4]
    cache.pre_step({"b": 1})
    assert manager.free_pages() == 2
    assert cache.sequences == {"b": 10}
    cache.pre_step({"b": 1, "c": 8})
    pages = manager.page_table[:2].tolist()
    assert len({*pages[0][:3], *pages[1][:2]}) == 5
    cache.reset()
    assert manager.free_pages() == 5


def test_running_out_of_pages_is_rejected_before_anything_changes(device):
    cache = params(is_paged=True, page_size=4, total_num_pages=3)
    cache.allocate_memory(1)
    cache.pre_step({"a": 4, "b": 5})
    table, lengths = cache.cache_manager.page_table.clone(), cache.get_seqlens_pre_step().clone()
    with pytest.raises(
        ValueError, match=r"2 sequences need 4 pages of 4 tokens > total_num_pages=3; end a"
    ):
        cache.pre_step({"a": 1, "b": 1})
    assert cache.sequences == cache.cache_manager.sequences == {"a": 4, "b": 5}
    assert torch.equal(cache.cache_manager.page_table, table)
    assert torch.equal(cache.get_seqlens_pre_step(), lengths)
    cache.pre_step({"a": 1})  # b leaves: there is room
    assert cache.sequences == {"a": 5}


def test_tensors_that_a_step_reads_keep_their_addresses(device):
    """A graph captured in one step is replayed in later ones."""
    cache = params(is_paged=True, page_size=2)
    addresses = set()
    for _ in range(5):
        cache.pre_step({"a": 1, "b": 1})
        new = torch.ones(2, 1, GROUPS, WIDTH, device=device)
        step = cache.step(1, new, new, "bshd")
        addresses.add(tuple(x.data_ptr() for x in step if isinstance(x, torch.Tensor)))
    assert len(addresses) == 1
    assert step.lengths_kv.tolist() == [5, 5]


def test_a_custom_manager_replaces_ours(device):
    class Doubling(NonPagedKVCacheManager):
        def step(self, layer_number, new_k, new_v, *rest):
            return super().step(layer_number, 2 * new_k, new_v, *rest)

    shape = (4, 16, GROUPS, WIDTH, torch.float32, WIDTH, device)
    cache = params(custom_cache_manager=Doubling(*shape))
    cache.pre_step({"a": 1})
    new = torch.ones(1, 1, GROUPS, WIDTH, device=device)
    key, value, *_ = cache.step(1, new, new, "bshd")
    assert key[0, 0, 0, 0] == 2 and value[0, 0, 0, 0] == 1


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


def test_tensors_that_do_not_fit_the_step_are_rejected_before_writing(device):
    cache = params()
    cache.allocate_memory(1)
    cache.pre_step({"a": 4})
    good = torch.ones(1, 4, GROUPS, WIDTH, device=cache.device)
    with pytest.raises(ValueError, match="the cache holds"):
        cache.step(1, good[..., :4], good, "bshd")
    with pytest.raises(ValueError, match="keys of 2 sequences, pre_step announced 1"):
        cache.step(1, good.expand(2, -1, -1, -1), good.expand(2, -1, -1, -1), "bshd")
    with pytest.raises(
        ValueError, match=r"keys have 3 tokens per sequence, this step needs 4\.\.16"
    ):
        cache.step(1, good[:, :3], good[:, :3], "bshd")
    with pytest.raises(ValueError, match="qkv_format='hsbd'"):
        cache.step(1, good, good, "hsbd")
    assert not cache.convert_paged_to_nonpaged(1)[0].any()


def test_wrong_construction_is_rejected(device):
    with pytest.raises(ValueError, match=r"page_size=0 is below 1"):
        params(is_paged=True, page_size=0)
    with pytest.raises(ValueError, match=r"total_num_pages=0 is below 1"):
        params(is_paged=True, page_size=4, total_num_pages=0)
    with pytest.raises(ValueError, match=r"page_size=0 is below 1"):
        params(is_paged=False, page_size=0)
    with pytest.raises(ValueError, match=r"max_batch_size=0 is below 1"):
        InferenceParams(0, 16)
    with pytest.raises(ValueError, match="qkv_format='hsbd'"):
        params(qkv_format="hsbd")
    cache = params()
    cache.pre_step({"a": 1})
    x = torch.ones(1, 1, HEADS, WIDTH, device=device)
    with pytest.raises(ValueError, match="needs layer_number"):
        DotProductAttention(HEADS, WIDTH, qkv_format="bshd")(x, x, x, inference_params=cache)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "pages", [{}, {"is_paged": True, "page_size": 4}], ids=["contiguous", "paged"]
)
@torch.no_grad()
def test_decoding_with_a_cache_compiles(pages, device):
    module = DotProductAttention(4, 8, qkv_format="bshd", layer_number=1)
    outputs = []
    torch._dynamo.reset()
    for run in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        cache = InferenceParams(2, 8, 4, 8, dtype=torch.float32, **pages)
        cache.allocate_memory(1)
        got = []
        for step, size in enumerate((3, 1, 1)):
            cache.pre_step({"a": size, "b": 1})
            x = torch.randn(3, 2, size, 4, 8, generator=torch.Generator().manual_seed(step)).to(
                device
            )
            got.append(run(*x, inference_params=cache))
        outputs.append(got)
    for eager, traced in zip(*outputs, strict=True):
        torch.testing.assert_close(traced, eager, atol=1e-6, rtol=1e-6)


def test_packed_keys_must_match_the_announced_token_count():
    cache = params(qkv_format="thd", device="cpu")
    cache.pre_step({"a": 3, "b": 2})
    short = torch.ones(4, GROUPS, WIDTH)
    with pytest.raises(ValueError, match="keys of 4 tokens, pre_step announced 5"):
        cache.step(1, short, short, "thd")
    assert not cache.cache_manager.cache
    cache.reset()
    cache.step(1, short[:0], short[:0], "thd")


def test_a_mask_tensor_over_a_cache_is_rejected_before_the_cache_is_written(device):
    module = DotProductAttention(
        HEADS, WIDTH, num_gqa_groups=GROUPS, layer_number=1, qkv_format="bshd"
    )
    cache = params(device=device)
    cache.pre_step({"a": 2})
    q, k = (
        torch.ones(1, 2, HEADS, WIDTH, device=device),
        torch.ones(1, 2, GROUPS, WIDTH, device=device),
    )
    options = {
        "attn_mask_type": "arbitrary",
        "attention_mask": torch.zeros(1, 1, 2, 2, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match="'arbitrary' with inference_params"):
        module(q, k, k, inference_params=cache, **options)
    assert not cache.cache_manager.cache


def test_a_cache_of_another_dtype_is_rejected_before_it_is_written(device):
    module = DotProductAttention(
        HEADS, WIDTH, num_gqa_groups=HEADS, layer_number=1, qkv_format="bshd"
    )
    cache = params(num_heads_kv=HEADS, dtype=torch.bfloat16, device=device)
    cache.pre_step({"a": 2})
    x = torch.ones(1, 2, HEADS, WIDTH, device=device)
    with pytest.raises(ValueError, match=r"dtype=torch\.bfloat16, query_layer is torch\.float32"):
        module(x, x, x, inference_params=cache)
    assert not cache.cache_manager.cache


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pages", [{}, {"is_paged": True, "page_size": 16}], ids=["contiguous", "paged"]
)
@torch.no_grad()
def test_a_captured_decoding_step_replays_as_sequences_grow(pages):
    module = MultiheadAttention(
        256,
        4,
        num_gqa_groups=2,
        layer_number=1,
        qkv_format="bshd",
        params_dtype=torch.bfloat16,
        device="cuda",
    ).eval()
    angles = RotaryPositionEmbedding(64)(64).cuda()
    prompt = torch.randn(2, 9, 256, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 1, 256, device="cuda", dtype=torch.bfloat16)
    outputs = []
    for captured in (False, True):
        cache = InferenceParams(2, 64, 2, 64, **pages)
        cache.pre_step({"a": 9, "b": 4})
        module(prompt, inference_params=cache, rotary_pos_emb=angles)

        def decode(cache=cache):
            return module(x, inference_params=cache, rotary_pos_emb=angles)

        graph, got = None, []
        for turn in range(40):
            cache.pre_step({"a": 1, "b": 1})
            if captured and turn == 1:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = decode()
            if graph is None:
                got.append(decode().clone())
            else:
                graph.replay()
                got.append(out.clone())
        outputs.append(torch.stack(got))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


@PAGED
@pytest.mark.parametrize(
    "modes",
    list(itertools.product([torch.inference_mode, torch.no_grad, torch.enable_grad], repeat=2)),
    ids=lambda modes: "-".join(mode.__name__ for mode in modes),
)
@pytest.mark.sampled
def test_a_cache_changes_between_gradient_and_inference_modes(modes, pages, device):
    """Tensors allocated in inference mode are written outside of it, including page tables and rows that move."""
    results = []
    for allocated in (modes[0], torch.no_grad):
        data, layer, outputs = tokens(device, HEADS * WIDTH), attention_layer(device), []
        with allocated():
            cache = params(device=device, **pages)
        for number, entry in enumerate(SCHEDULE):
            with modes[min(number, len(modes) - 1)]():
                cache.pre_step(OrderedDict(entry))
                parts = [data[name][:n] for name, n in entry.items()]
                outputs.append(
                    layer(
                        batch(parts, "bshd"),
                        inference_params=cache,
                        attn_mask_type="padding_causal",
                    )
                )
        with modes[-1]():
            cache.reset()
        results.append([out.detach().clone() for out in outputs])
    for changed, same in zip(*results, strict=True):
        assert torch.equal(changed, same)


def attention_layer(device):
    torch.manual_seed(0)
    return MultiheadAttention(
        HEADS * WIDTH,
        HEADS,
        num_gqa_groups=GROUPS,
        qkv_format="bshd",
        layer_number=1,
        device=device,
    ).eval()
