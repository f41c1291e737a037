"""Lengths, offsets and pages that do not fit raise errors: at once on a CPU, with TE_CHECK=2 on a GPU."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from tests.attention.attention_oracle import cumulative
from tests.support.sequences import int32, rejects
from transformer_engine.pytorch import DotProductAttention, InferenceParams
from transformer_engine.pytorch.attention.kv_cache import NonPagedKVCacheManager
from transformer_engine.pytorch.attention.kv_cache_paged import PagedKVCacheManager
from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_fwd
from transformer_engine.pytorch.primitives.kv_cache import append

HEADS, SIZE, TOKENS = 2, 8, 12


@pytest.fixture(autouse=True)
def _numbers_on_a_gpu_are_checked_too(monkeypatch):
    # Checked at once: with these numbers, kernels would read out of bounds, which ends a process on a GPU.
    monkeypatch.setenv("TE_CHECK", "2")


def attention(**options):
    return DotProductAttention(
        HEADS, SIZE, qkv_format="thd", attn_mask_type="padding_causal", **options
    )


def qkv(device, *shape):
    return torch.randn(3, *(shape or (TOKENS,)), HEADS, SIZE, device=device)


# cu_seqlens, padded offsets, max_seqlen -> message for 12 packed tokens.
PACKED = {
    "longest too short": (
        [0, 5, 12],
        None,
        6,
        r"sequence 1 7 tokens, more than max_seqlen=6; give the length of",
    ),
    "falls": (
        [0, 8, 5],
        None,
        8,
        r"cu_seqlens_q falls from 8 to 5 at sequence 1; cumulative lengths only grow",
    ),
    "not from 0": ([2, 8, 12], None, 8, r"cu_seqlens_q begins with 2; its first entry is 0"),
    "beyond the tensor": (
        [0, 8, 13],
        None,
        8,
        r"cu_seqlens_q ends with 13, the packed tensor has 12 tokens",
    ),
    "offsets overlap": (
        [0, 5, 9],
        [0, 4, 12],
        5,
        r"cu_seqlens_q_padded leaves sequence 0 4 tokens, cu_seqlens_q gives it 5; they would overlap",
    ),
    "offsets fall": ([0, 0, 4], [0, 6, 4], 4, r"cu_seqlens_q_padded falls from 6 to 4"),
    "offsets not from 0": ([0, 4, 8], [1, 6, 12], 4, r"cu_seqlens_q_padded begins with 1"),
    "offsets beyond the tensor": (
        [0, 4, 8],
        [0, 6, 14],
        4,
        r"cu_seqlens_q_padded ends with 14, the packed tensor has 12 tokens",
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_that_do_not_fit_are_rejected(name, device):
    lengths, offsets, longest, match = PACKED[name]
    options = {
        "cu_seqlens_q": int32(lengths, device),
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    if offsets is not None:
        options["cu_seqlens_q_padded"] = int32(offsets, device)
    rejects(match, lambda: attention()(*qkv(device), **options))


@pytest.mark.parametrize("name", [name for name in PACKED if "offsets" not in name])
def test_the_extensions_attention_rejects_the_same_packed_sequences(name, device):
    lengths, _, longest, match = PACKED[name]
    bounds = int32(lengths, device)

    def call():
        fused_attn_fwd(
            False,
            longest,
            longest,
            bounds,
            bounds,
            *qkv(device),
            torch.float32,
            FusedAttnBackend["F16_arbitrary_seqlen"],
            qkv_layout="thd_thd_thd",
        )

    rejects(match, call)


def test_keys_are_checked_against_their_own_lengths(device):
    module = attention(attention_type="cross")
    good = {"cu_seqlens_q": cumulative([5, 7], device), "max_seqlen_q": 7, "max_seqlen_kv": 7}
    rejects(
        "cu_seqlens_kv gives sequence 0 9 tokens, more than max_seqlen=7",
        lambda: module(*qkv(device), cu_seqlens_kv=cumulative([9, 3], device), **good),
    )
    rejects(
        "cu_seqlens_kv ends with 14",
        lambda: module(*qkv(device), cu_seqlens_kv=cumulative([7, 7], device), **good),
    )


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
def test_padded_sequences_longer_than_the_tensor_are_rejected(tensor_format, device):
    module = DotProductAttention(HEADS, SIZE, qkv_format=tensor_format, attn_mask_type="padding")
    shape = (TOKENS, 2) if tensor_format == "sbhd" else (2, TOKENS)
    rejects(
        "cu_seqlens_q gives sequence 1 13 tokens, more than the 12 that the tensor has",
        lambda: module(*qkv(device, *shape), cu_seqlens_q=cumulative([3, 13], device)),
    )


@pytest.mark.parametrize(
    "options, match",
    [
        ({"max_seqlen_q": 7.5}, "max_seqlen_q=7.5 is not a whole number"),
        ({"max_seqlen_q": -1}, "max_seqlen_q=-1 is below 0"),
        ({"cu_seqlens_q": [0, 5, 12]}, "cu_seqlens_q is a list; give an int32 tensor"),
        (
            {"cu_seqlens_q": torch.zeros(2, 2, dtype=torch.int32)},
            r"cu_seqlens_q is \[2, 2\]; give \[b \+ 1\]",
        ),
        (
            {"cu_seqlens_q": torch.zeros(1, dtype=torch.int32)},
            r"cu_seqlens_q is \[1\], which describes no sequence",
        ),
        (
            {"cu_seqlens_q_padded": torch.zeros(4, dtype=torch.int32)},
            r"cu_seqlens_q_padded is \[4\], cu_seqlens_q \[3\]; give both, equally long",
        ),
    ],
    ids=["fraction", "negative", "list", "axes", "no sequence", "offsets of others"],
)
def test_arguments_of_a_wrong_type_are_rejected(options, match, device):
    options = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }
    kwargs = {
        "cu_seqlens_q": cumulative([5, 7], device),
        "max_seqlen_q": 7,
        "max_seqlen_kv": 7,
        **options,
    }
    rejects(match, lambda: attention()(*qkv(device), **kwargs))


def test_valid_lengths_are_accepted_with_or_without_a_maximum_and_with_gaps(device):
    x, module = qkv(device), attention()
    bounds = cumulative([5, 4], device)
    expected = module(*x, cu_seqlens_q=bounds, max_seqlen_q=5, max_seqlen_kv=5)
    for options in ({}, {"max_seqlen_q": 64, "max_seqlen_kv": 64}):
        torch.testing.assert_close(module(*x, cu_seqlens_q=bounds, **options), expected)
    te.check()
    assert not expected[9:].any()


def test_gpu_values_are_checked_only_on_request_and_never_while_tracing(device, monkeypatch):
    monkeypatch.delenv("TE_CHECK")
    x, module = qkv(device), attention()

    def run(q, k, v, bounds):
        return module(q, k, v, cu_seqlens_q=bounds, max_seqlen_q=7, max_seqlen_kv=7)

    good = cumulative([5, 7], device)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*x, good), run(*x, good))


STEPS = {
    "fraction": ({0: 1.5}, "sequence 0 brings 1.5 tokens, which is not a whole number"),
    "negative": ({0: -1}, "sequence 0 brings -1 tokens, allowed: 0.."),
    "too long": ({0: 17}, "sequence 0"),
    "too many": (dict.fromkeys(range(5), 1), "5 sequences in a step > max_batch_size=4"),
    "no dictionary": ([3, 4], "a step is a list; give a dictionary"),
    "text": ({0: "3"}, "sequence 0 brings '3' tokens, which is not a whole number"),
}


def managers(device):
    return (
        NonPagedKVCacheManager(4, 16, HEADS, SIZE, torch.float32, device=device),
        PagedKVCacheManager(16, 4, HEADS, SIZE, torch.float32, 4, 16, device=device),
        InferenceParams(4, 16, HEADS, SIZE, torch.float32, device=device),
        InferenceParams(
            4, 16, HEADS, SIZE, torch.float32, is_paged=True, page_size=4, device=device
        ),
    )


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_do_not_fit_are_rejected_and_discarded(name, device):
    step, match = STEPS[name]
    for manager in managers(device):
        manager.pre_step({"a": 3, "b": 2})
        before = dict(manager.sequences)
        with pytest.raises(ValueError, match=match):
            manager.pre_step(step)
        assert dict(manager.sequences) == before
        manager.pre_step({"a": 1, "b": torch.tensor(2)})
        assert dict(manager.sequences) == {"a": 4, "b": 4}


@pytest.mark.parametrize("index", [0, 1], ids=["contiguous", "paged"])
def test_managers_reject_layers_and_sequences_that_they_do_not_know(index, device):
    manager = managers(device)[index]
    new = torch.ones(2, 3, HEADS, SIZE, device=device)
    manager.pre_step({"a": 3, "b": 2})
    lengths = cumulative([3, 2], device)
    with pytest.raises(
        ValueError, match=r"layer_number=1 has no cache, there are \[\]; call allocate_memory"
    ):
        manager.step(1, new, new, lengths, lengths, "bshd")
    manager.allocate_memory(1)
    three = torch.ones(3, 3, HEADS, SIZE, device=device)
    more = cumulative([3, 2, 1], device)
    with pytest.raises(ValueError, match="lengths of 3 sequences, pre_step announced 2"):
        manager.step(1, three, three, more, more, "bshd")
    rejects(
        "sequence 0 brings 4 new tokens > 3",
        lambda: manager.step(
            1, new, new, cumulative([4, 2], device), cumulative([4, 2], device), "bshd"
        ),
    )
    manager.step(1, new, new, lengths, lengths, "bshd")
    te.check()


def test_the_state_of_a_manager_can_be_printed_and_queried(capsys, device):
    contiguous, paged, *_ = managers(device)
    for manager in (contiguous, paged):
        manager.allocate_memory(2)
        manager.pre_step({"a": 6, "b": 2})
        manager.print_cache()
    said = capsys.readouterr().out
    assert "NonPagedKVCacheManager: layers [2], 2 sequences" in said
    assert "row 0: sequence 'a', 6 tokens" in said
    assert (
        "row 0: sequence 'a', 6 tokens, pages [0, 1]" in said and "13 of 16 pages are free" in said
    )
    assert (
        paged.get_page_list("a") == [0, 1]
        and paged.get_free_page_count() == 13
        and paged.has_free_page()
    )
    assert paged.get_page_table(["b", "a"]).tolist() == [[2, 0, 0, 0], [0, 1, 0, 0]]
    with pytest.raises(
        ValueError, match=r"sequence 'c' is not in the batch, which has \['a', 'b'\]"
    ):
        paged.get_page_list("c")
    assert paged.cache[2][0].shape == (16, 4, HEADS, SIZE) and contiguous.cache[2][1].shape == (
        4,
        16,
        HEADS,
        SIZE,
    )


# New lengths, cached lengths, page table for 2 sequences -> message.
APPENDS = {
    "page below zero": (
        [2, 1],
        [6, 1],
        [[0, -1], [2, 3]],
        r"sends sequence 0 to page -1, outside of 0\.\.4",
    ),
    "page past the end": (
        [2, 1],
        [6, 1],
        [[0, 5], [2, 3]],
        r"sequence 0 to page 5, outside of 0\.\.4",
    ),
    "beyond the pages": (
        [2, 1],
        [9, 1],
        [[0, 1], [2, 3]],
        r"sequence 0 has 9 tokens > 8, its place in the cache",
    ),
    "fewer than new": (
        [3, 1],
        [2, 1],
        [[0, 1], [2, 3]],
        r"sequence 0 has 2 cached tokens, fewer than its 3 new",
    ),
    "longer than announced": (
        [4, 1],
        [4, 1],
        [[0, 1], [2, 3]],
        r"sequence 0 brings 4 new tokens > 3",
    ),
}


@pytest.mark.parametrize("name", APPENDS)
def test_invalid_cache_positions_raise_before_anything_is_written(name, device):
    new, cached, table, match = APPENDS[name]
    keys, values = torch.zeros(2, 5, 4, HEADS, SIZE, device=device)
    tokens = torch.ones(2, 4, HEADS, SIZE, device=device)

    def call():
        lengths = (cumulative(new, device), cumulative(cached, device))
        bshd = tex.NVTE_QKV_Format.NVTE_BSHD
        tex.copy_to_kv_cache(
            tokens, tokens, keys, values, int32(table, device), *lengths, bshd, 2, 3, 8, 2, False
        )

    rejects(match, call)
    if device.type == "cpu":
        assert not keys.any() and not values.any()


@pytest.mark.parametrize("page", [-1, -5, 5, 99])
def test_an_unchecked_page_that_does_not_exist_is_not_written_to(page, device):
    keys, values = torch.zeros(2, 5, 4, HEADS, SIZE, device=device)
    tokens = torch.ones(2, 2, HEADS, SIZE, device=device)
    lengths = cumulative([2, 1], device)
    append(tokens, tokens, keys, values, int32([[page], [3]], device), lengths, lengths, "bshd", 2)
    assert keys[3, 0].all() and values[3, 0].all()
    keys[3, 0] = values[3, 0] = 0
    assert not keys.any() and not values.any()


def test_reading_pages_that_do_not_exist_is_rejected(device):
    pages = torch.randn(2, 5, 4, HEADS, SIZE, device=device)
    q = torch.randn(2, 3, HEADS, SIZE, device=device)

    def call(table):
        fused_attn_fwd(
            False,
            3,
            8,
            cumulative([3, 3], device),
            cumulative([6, 3], device),
            q,
            *pages,
            torch.float32,
            FusedAttnBackend["F16_arbitrary_seqlen"],
            page_table_k=int32(table, device),
            page_table_v=int32(table, device),
            qkv_layout="paged_kv_bshd_bshd_bshd",
            attn_mask_type="padding",
        )

    call([[0, 1], [2, -1]])  # sequence 1 does not use the second page
    te.check()
    rejects(
        r"page_table has page -1 for sequence 0, outside of 0\.\.4", lambda: call([[0, -1], [2, 3]])
    )
