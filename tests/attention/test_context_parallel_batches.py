"""Batches for context parallelism: sequences are padded, split into per-rank chunks, and joined again."""

from __future__ import annotations

import pytest
import torch

import transformer_engine_torch as tex
from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
    generate_positional_ids_for_cp,
    get_batch_on_this_cp_rank,
    get_cu_seqlens_on_cp_rank,
    pad_thd_sequences_for_cp,
)

LENGTHS = [5, 8, 1, 0, 13]


def bounds(lengths, device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@pytest.mark.parametrize("leading", [(), (1,)])
@pytest.mark.parametrize("multiple", [1, 4, 6])
def test_every_sequence_is_padded_at_its_end_to_a_multiple(multiple, leading, device):
    ids = torch.arange(100, 100 + sum(LENGTHS), device=device).reshape(*leading, -1)
    padded, labels, cu = pad_thd_sequences_for_cp(
        ids, -ids, bounds(LENGTHS, device), multiple, 7, -100
    )
    want_ids, want_labels, at = [], [], 100
    for length in LENGTHS:
        filler = round_up(length, multiple) - length
        want_ids += [*range(at, at + length), *[7] * filler]
        want_labels += [*(-i for i in range(at, at + length)), *[-100] * filler]
        at += length
    # The result is flat for both input shapes.
    assert padded.shape == labels.shape == (len(want_ids),)
    assert padded.tolist() == want_ids and labels.tolist() == want_labels
    assert cu.dtype == torch.int32 and cu.device == ids.device
    assert cu.tolist() == bounds([round_up(n, multiple) for n in LENGTHS], "cpu").tolist()


def test_positions_restart_in_every_padded_sequence(device):
    result = generate_positional_ids_for_cp(bounds(LENGTHS, device), 4)
    assert result.tolist() == [i for n in LENGTHS for i in range(round_up(n, 4))]
    assert result.dtype == torch.long and result.device.type == device.type


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_gets_two_chunks_per_sequence(size, device, monkeypatch):
    group = object()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: size)
    multiple = 2 * size
    ids = torch.arange(sum(LENGTHS), device=device)[None]
    padded, labels, cu = pad_thd_sequences_for_cp(
        ids, ids + 1000, bounds(LENGTHS, device), multiple
    )
    padded, labels = padded[None], labels[None]
    positions = generate_positional_ids_for_cp(bounds(LENGTHS, device), multiple)[None]
    for rank in range(size):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        parts = get_batch_on_this_cp_rank(cu, padded, labels, positions, cp_group=group)
        named = get_batch_on_this_cp_rank(
            cu, padded, labels, positions, cp_group=group, cp_rank=rank
        )
        assert all(torch.equal(a, b) for a, b in zip(parts, named, strict=True))
        for full, part in zip((padded, labels, positions), parts, strict=True):
            expected = []
            for sequence in full[0].split([round_up(n, multiple) for n in LENGTHS]):
                chunks = sequence.chunk(multiple) if len(sequence) else [sequence] * multiple
                expected += [chunks[rank], chunks[multiple - 1 - rank]]
            assert torch.equal(part[0], torch.cat(expected))


def test_one_rank_has_the_whole_batch(device, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    ids = torch.arange(8, device=device)
    assert get_batch_on_this_cp_rank(bounds([8], device), ids, ids, ids)[0] is ids


def test_size_and_rank_come_from_the_default_group_unless_given(device, monkeypatch):
    queries = []
    monkeypatch.setattr(
        torch.distributed, "get_world_size", lambda group: queries.append(group) or 2
    )
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: queries.append(group) or 1)
    ids = torch.arange(8, device=device)
    part, none, rows = get_batch_on_this_cp_rank(bounds([8], device), ids, None, ids[:, None])
    assert queries == [None, None] and none is None
    assert part.tolist() == [2, 3, 4, 5] and rows.tolist() == [[2], [3], [4], [5]]
    with pytest.raises(
        ValueError, match=r"input_ids_padded is \[7\], cu_seqlens_padded bounds 8 tokens"
    ):
        get_batch_on_this_cp_rank(bounds([8], device), ids[1:], ids, ids)


def test_other_formats_and_wrong_sizes_are_rejected(device):
    ids, cu = torch.arange(8, device=device), bounds([8], device)
    with pytest.raises(ValueError, match="qvk_format='bshd'"):
        get_batch_on_this_cp_rank(cu, ids, ids, ids, qvk_format="bshd")
    with pytest.raises(ValueError, match=r"labels is \[7\], cu_seqlens bounds 8 tokens"):
        pad_thd_sequences_for_cp(ids, ids[1:], cu, 4)
    with pytest.raises(ValueError, match="divisibility_factor=0"):
        generate_positional_ids_for_cp(cu, 0)


@pytest.mark.parametrize("halves", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_bounds_on_a_rank_count_its_real_tokens(size, halves, device):
    padded = [round_up(n, 2 * size) for n in LENGTHS]
    real = bounds(LENGTHS, device)
    for rank in range(size):
        result = get_cu_seqlens_on_cp_rank(
            real, bounds([n // size for n in padded], device), size, rank, *halves
        )
        counts = []
        for length, extent in zip(LENGTHS, padded, strict=True):
            tokens = torch.arange(extent) < length
            chunks = tokens.chunk(2 * size) if extent else [tokens] * (2 * size)
            contents = [chunks[rank], chunks[2 * size - 1 - rank]]
            counts.append(
                sum(int(c.sum()) for c, counted in zip(contents, halves, strict=True) if counted)
            )
        assert result.tolist() == bounds(counts, "cpu").tolist() and result.dtype == torch.int32
    with pytest.raises(ValueError, match=f"rank={size} is outside"):
        get_cu_seqlens_on_cp_rank(real, real, size, size, *halves)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rank_order_concatenates_the_ranks_parts_and_is_reversible(size, device):
    lengths = [12, 24, 0, 36]
    x = torch.randn(sum(lengths), 3, device=device)
    cu = bounds(lengths, device)
    ordered = tex.thd_sequence_order_to_cp_rank_order(x, cu, size)
    parts = [
        x[tex.thd_get_partitioned_indices(cu, len(x), size, rank).long()] for rank in range(size)
    ]
    assert torch.equal(ordered, torch.cat(parts))
    assert torch.equal(tex.thd_cp_rank_order_to_sequence_order(ordered, cu, size), x)
