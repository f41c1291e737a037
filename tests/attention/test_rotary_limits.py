"""Too short a rotary angle table raises an error with its length; starts and ranks are independent."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from tests.attention.attention_oracle import cumulative
from tests.support.sequences import int32, rejects
from transformer_engine.pytorch import InferenceParams, MultiheadAttention, RotaryPositionEmbedding
from transformer_engine.pytorch.attention import apply_rotary_pos_emb
from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb
from transformer_engine.pytorch.primitives.rope import (
    Positions,
    RopeSpec,
    rope_backward,
    rope_forward,
)


@pytest.fixture(autouse=True)
def _numbers_on_a_gpu_are_checked_too(monkeypatch):
    monkeypatch.setenv("TE_CHECK", "1")


def angles(device, length, dim=8):
    return RotaryPositionEmbedding(dim)(length).to(device)


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
def test_starts_past_the_table_or_below_zero_are_rejected(tensor_format, device):
    x = torch.randn(2, 2, 3, 8, device=device)
    for start, match in (
        (
            [0, 15],
            r"start_positions up to 15 and 2 tokens need 17 positions, freqs has 16; make it longer",
        ),
        ([0, -1], r"start_positions has -1; positions count from 0"),
    ):
        argument = int32(start, device)
        rejects(
            match,
            lambda value=argument: apply_rotary_pos_emb(
                x, angles(device, 16), tensor_format, value
            ),
        )
    apply_rotary_pos_emb(x, angles(device, 16), tensor_format, int32([0, 14], device))
    te.check()


def test_packed_sequences_longer_than_the_table_are_rejected(device):
    x, freqs = torch.randn(9, 2, 8, device=device), angles(device, 4)
    for lengths, start, match in (
        ([2, 5, 2], None, r"sequence 1 needs 5 positions, freqs has 4; make it longer"),
        ([2, 3, 4], [0, 2, 0], r"sequence 1 needs 5 positions, freqs has 4"),
        ([2, 3, 4], [0, -2, 0], r"start_positions has -2"),
        ([4, 4, 4], None, r"cu_seqlens ends with 12, the tensor has 9 tokens"),
    ):
        options = {
            "start_positions": None if start is None else int32(start, device),
            "cu_seqlens": cumulative(lengths, device),
        }
        rejects(match, lambda options=options: apply_rotary_pos_emb(x, freqs, "thd", **options))
    rejects(
        "cu_seqlens falls from 4 to 2 at sequence 1",
        lambda: apply_rotary_pos_emb(x, freqs, "thd", cu_seqlens=int32([0, 4, 2], device)),
    )
    rejects(
        "cu_seqlens begins with 1",
        lambda: apply_rotary_pos_emb(x, freqs, "thd", cu_seqlens=int32([1, 4], device)),
    )


def test_packed_sequences_on_several_ranks_need_the_full_table(device):
    x = torch.randn(8, 2, 8, device=device)
    options = {"cu_seqlens": cumulative([4, 12], device), "cp_size": 2, "cp_rank": 1}
    rejects(
        r"sequence 1 needs 12 positions, freqs has 8",
        lambda: apply_rotary_pos_emb(x, angles(device, 8), "thd", **options),
    )
    options["cu_seqlens"] = cumulative([6, 10], device)
    rejects(
        r"sequence 0 of 6 tokens is not a multiple of 2 \* cp_size = 4; pad it",
        lambda: apply_rotary_pos_emb(x, angles(device, 16), "thd", **options),
    )


def test_the_fused_and_the_extensions_functions_reject_the_same(device):
    qkv, freqs = torch.randn(5, 2, 2, 24, device=device), angles(device, 6)
    start = int32([0, 2], device)
    expected = "start_positions up to 2 and 5 tokens need 7 positions, freqs has 6"
    x = qkv[..., :8].contiguous()
    sbhd = tex.NVTE_QKV_Format.NVTE_SBHD
    rejects(
        expected,
        lambda: apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [8, 8, 8], start_positions=start),
    )
    rejects(expected, lambda: tex.fused_rope_forward(x, freqs, start, sbhd, False, None, 1, 0))
    rejects(expected, lambda: tex.fused_rope_backward(x, freqs, start, sbhd, False, None, 1, 0))
    rejects(
        expected,
        lambda: tex.fused_qkv_rope_forward(qkv, freqs, freqs, start, [8, 8, 8], sbhd, False, 1, 0),
    )
    short = angles(device, 4)
    rejects(
        "sequence length 5 > 4 positions",
        lambda: tex.fused_rope_forward(x, short, None, sbhd, False, None, 1, 0),
    )


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
def test_an_unchecked_position_without_an_angle_gives_nan_in_both_directions(tensor_format, device):
    shape = {"sbhd": (4, 2), "bshd": (2, 4), "thd": (8,)}[tensor_format]
    x = torch.randn(*shape, 3, 8, device=device)
    bounds = cumulative([4, 4], device) if tensor_format == "thd" else None
    positions = Positions(int32([0, 3], device), bounds)
    table = angles(device, 5).flatten(1)
    for function in (rope_forward, rope_backward):
        y = function(x, table, positions, RopeSpec(tensor_format))
        first, second = (
            (y[:4], y[4:]) if tensor_format == "thd" else y.unbind(int(tensor_format == "sbhd"))
        )
        assert first.isfinite().all()
        assert second[:2].isfinite().all() and second[2:].isnan().all()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
def test_a_cache_that_outgrows_the_table_is_rejected_and_padding_is_not(
    tensor_format, paged, device
):
    layer = MultiheadAttention(
        16, 2, attention_dropout=0.0, layer_number=1, qkv_format=tensor_format, device=device
    ).eval()
    cache = InferenceParams(2, 32, 2, 8, torch.float32, is_paged=paged, qkv_format=tensor_format)
    freqs = angles(device, 8)

    def step(lengths):
        cache.pre_step(dict(enumerate(lengths)))
        size = (
            (sum(lengths),)
            if tensor_format == "thd"
            else (max(lengths), 2)
            if tensor_format == "sbhd"
            else (2, 5)
        )
        if tensor_format == "bshd":
            size = (2, max(lengths))
        x = torch.randn(*size, 16, device=device)
        return layer(x, inference_params=cache, rotary_pos_emb=freqs)

    with torch.no_grad():
        step([7, 3])
        # Sequence 0 has 1 new token, padded to the 5 of sequence 1: rows 8 to 11 of its padding have no angles.
        assert step([1, 5]).isfinite().all()
        with pytest.raises(
            ValueError, match=r"has 9 tokens, cached ones included, > 8 positions of rotary_pos_emb"
        ):
            step([1, 0] if tensor_format == "thd" else [1, 1])


def test_padding_may_exceed_the_table_and_sequences_may_not(device):
    layer = MultiheadAttention(
        16,
        2,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        device=device,
    )
    x = torch.randn(12, 16, device=device, requires_grad=True)
    options = {
        "cu_seqlens_q": cumulative([3, 2], device),
        "cu_seqlens_q_padded": cumulative([4, 8], device),
        "max_seqlen_q": 3,
        "max_seqlen_kv": 3,
        "pad_between_seqs": True,
    }
    out = layer(x, rotary_pos_emb=angles(device, 4), **options)
    out.sum().backward()
    te.check()
    assert out.isfinite().all() and x.grad is not None and x.grad.isfinite().all()
    rejects(
        "sequence 0 has 3 tokens > 2 positions of freqs",
        lambda: layer(x, rotary_pos_emb=angles(device, 2), **options),
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("cp_size", [2, 3])
def test_starts_with_ranks_equal_the_ranks_part_of_the_full_rotation(
    cp_size, tensor_format, fused, device
):
    """A rank's result is its two chunks from the full sequences, rotated from their starts."""
    lengths = [4 * cp_size, 2 * cp_size] if tensor_format == "thd" else [4 * cp_size] * 2
    starts, freqs = [3, 17], angles(device, 17 + 4 * cp_size)
    full = [torch.randn(n, 3, 8, device=device) for n in lengths]
    argument = int32(starts, device)
    for rank in range(cp_size):
        actual, reference = [], []
        for x, start in zip(full, starts, strict=True):
            chunks = torch.arange(len(x)).chunk(2 * cp_size)
            rows = torch.cat((chunks[rank], chunks[2 * cp_size - 1 - rank])).to(device)
            actual.append(x[rows])
            reference.append(apply_rotary_pos_emb(x[None], freqs[start:], "bshd")[0][rows])
        if tensor_format == "thd":
            local, expected = torch.cat(actual), torch.cat(reference)
            options = {"cu_seqlens": cumulative(lengths, device)}
        else:
            axis = int(tensor_format == "sbhd")
            local, expected = torch.stack(actual, axis), torch.stack(reference, axis)
            options = {}
        options |= {"start_positions": argument, "cp_size": cp_size, "cp_rank": rank}
        if fused:
            joint = torch.cat((local, local, local), dim=-1)
            got, key, value = apply_fused_qkv_rotary_pos_emb(
                joint, freqs, freqs, [8, 8, 8], tensor_format, **options
            )
            torch.testing.assert_close(key, expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(value, local)
        else:
            got = apply_rotary_pos_emb(local, freqs, tensor_format, **options)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    te.check()


def test_starts_with_ranks_need_a_table_for_the_full_sequence(device):
    x = torch.randn(4, 2, 3, 8, device=device)
    rejects(
        "start_positions up to 9 and 8 tokens need 17 positions, freqs has 16",
        lambda: apply_rotary_pos_emb(
            x, angles(device, 16), start_positions=int32([0, 9], device), cp_size=2
        ),
    )
