"""Rotary embedding rotates each feature pair by position * frequency, in every layout and split."""

from __future__ import annotations

import math

import pytest
import torch

from tests.attention.attention_oracle import cumulative
from transformer_engine.pytorch.attention import RotaryPositionEmbedding, apply_rotary_pos_emb
from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb


def rotate_pairs(x, position, base=10000.0, interleaved=False, rotated=None):
    """Rotate x [d] pair by pair with Python floats."""
    values = [float(value) for value in x]
    width = len(values) if rotated is None else rotated
    out = list(values)
    for pair in range(width // 2):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + width // 2)
        angle = position * base ** (-2.0 * pair / width)
        out[first] = values[first] * math.cos(angle) - values[second] * math.sin(angle)
        out[second] = values[second] * math.cos(angle) + values[first] * math.sin(angle)
    return torch.tensor(out)


def loop(x_bshd, positions, **options):
    """Rotate every token of x [b, s, h, d] by positions[b][s]."""
    out = torch.empty_like(x_bshd)
    for b in range(x_bshd.shape[0]):
        for s in range(x_bshd.shape[1]):
            for h in range(x_bshd.shape[2]):
                out[b, s, h] = rotate_pairs(x_bshd[b, s, h], positions[b][s], **options)
    return out


def sample(device, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def angles(device, dim, length=32, **options):
    return RotaryPositionEmbedding(dim, **options)(length).to(device)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
def test_rotation_equals_the_loop(tensor_format, rotated, interleaved, device):
    x = sample(device, 2, 5, 3, 8)
    layout = x.transpose(0, 1) if tensor_format == "sbhd" else x
    freqs = angles(device, rotated, interleaved=interleaved)
    got = apply_rotary_pos_emb(layout, freqs, tensor_format, interleaved=interleaved)
    got = got.transpose(0, 1) if tensor_format == "sbhd" else got
    expected = loop(x.cpu(), [range(5)] * 2, interleaved=interleaved, rotated=rotated)
    torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
def test_start_positions_offset_each_sequence(tensor_format, device):
    x = sample(device, 2, 5, 3, 8)
    layout = x.transpose(0, 1) if tensor_format == "sbhd" else x
    start = torch.tensor([3, 20], dtype=torch.int32, device=device)
    got = apply_rotary_pos_emb(layout, angles(device, 8), tensor_format, start_positions=start)
    got = got.transpose(0, 1) if tensor_format == "sbhd" else got
    expected = loop(x.cpu(), [range(3, 8), range(20, 25)])
    torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("start", [None, [2, 0, 7]])
def test_packed_sequences_begin_at_their_own_start_position(start, device):
    lengths = [2, 4, 3]
    x = sample(device, 9, 2, 8)
    argument = None if start is None else torch.tensor(start, dtype=torch.int32, device=device)
    got = apply_rotary_pos_emb(
        x,
        angles(device, 8),
        "thd",
        start_positions=argument,
        cu_seqlens=cumulative(lengths, device),
    )
    positions = [s + i for s, n in zip(start or [0, 0, 0], lengths, strict=True) for i in range(n)]
    torch.testing.assert_close(got.cpu(), loop(x.cpu()[None], [positions])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("cp_size", [2, 3])
def test_context_parallel_ranks_hold_a_chunk_from_each_end(cp_size, tensor_format, device):
    lengths = [4 * cp_size, 2 * cp_size] if tensor_format == "thd" else [4 * cp_size] * 2
    full = [sample(device, n, 3, 8) for n in lengths]
    freqs = angles(device, 8)
    for rank in range(cp_size):
        actual, expected = [], []
        for x in full:
            chunks = torch.arange(len(x)).chunk(2 * cp_size)
            rows = torch.cat((chunks[rank], chunks[2 * cp_size - 1 - rank])).to(device)
            actual.append(x[rows])
            expected.append(apply_rotary_pos_emb(x[None], freqs, "bshd")[0][rows])
        if tensor_format == "thd":
            options = {"cu_seqlens": cumulative(lengths, device)}
            got = apply_rotary_pos_emb(
                torch.cat(actual), freqs, "thd", cp_size=cp_size, cp_rank=rank, **options
            )
            torch.testing.assert_close(got, torch.cat(expected), rtol=1e-6, atol=1e-6)
            continue
        axis = 1 if tensor_format == "sbhd" else 0
        got = apply_rotary_pos_emb(
            torch.stack(actual, axis), freqs, tensor_format, cp_size=cp_size, cp_rank=rank
        )
        torch.testing.assert_close(got, torch.stack(expected, axis), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_is_the_transposed_rotation(interleaved, device):
    freqs = torch.rand(5, 1, 1, 6, generator=torch.Generator().manual_seed(1)).to(device)
    x = sample(device, 5, 2, 3, 8)
    grad = sample(device, 5, 2, 3, 8).flip(0)

    def literal(x):
        angle = freqs
        part, rest = x[..., :6], x[..., 6:]
        if interleaved:
            pair = torch.stack((-part[..., 1::2], part[..., 0::2]), -1).flatten(-2)
        else:
            pair = torch.cat((-part[..., 3:], part[..., :3]), -1)
        return torch.cat((part * torch.cos(angle) + pair * torch.sin(angle), rest), -1)

    leaves = [x.clone().requires_grad_() for _ in range(2)]
    (expected,) = torch.autograd.grad(literal(leaves[0]), leaves[0], grad)
    (got,) = torch.autograd.grad(
        apply_rotary_pos_emb(leaves[1], freqs, interleaved=interleaved), leaves[1], grad
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype, device):
    x = sample(device, 5, 2, 3, 8).to(dtype)
    freqs = angles(device, 8)
    got = apply_rotary_pos_emb(x, freqs)
    torch.testing.assert_close(
        got, apply_rotary_pos_emb(x.float(), freqs).to(dtype), rtol=0, atol=0
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
def test_packed_qkv_rotation_covers_queries_and_keys_in_each_group(
    tensor_format, interleaved, device
):
    shape = (7, 3, 16) if tensor_format == "thd" else (5, 2, 3, 16)
    qkv = sample(device, *shape).requires_grad_()
    freqs = angles(device, 4), 0.5 * angles(device, 4)
    batch = 5 if tensor_format == "bshd" else 2
    options = {
        "start_positions": torch.arange(batch, dtype=torch.int32, device=device) * 3,
        "interleaved": interleaved,
        "cu_seqlens": cumulative([3, 4], device) if tensor_format == "thd" else None,
    }
    got = apply_fused_qkv_rotary_pos_emb(qkv, *freqs, [8, 4, 4], tensor_format, **options)
    q, k, v = qkv.split([8, 4, 4], dim=-1)
    q = q.reshape(*q.shape[:-2], 6, 4)
    expected = [
        apply_rotary_pos_emb(x, angle, tensor_format, **options)
        for x, angle in zip((q, k), freqs, strict=True)
    ]
    grads = []
    for results in (got, (*expected, v)):
        weights = [sample(device, *x.shape, seed=i) for i, x in enumerate(results)]
        grads.append(torch.autograd.grad(results, qkv, weights, retain_graph=True)[0])
    for ours, reference in zip(got, (*expected, v), strict=True):
        torch.testing.assert_close(ours, reference)
    torch.testing.assert_close(*grads)


def test_angles_are_float32_positions_times_frequencies():
    embedding = RotaryPositionEmbedding(8, rotary_base=100.0)
    table = embedding(6, offset=2)
    assert table.shape == (6, 1, 1, 8) and table.dtype == torch.float32
    expected = [(2 + 3) * 100.0 ** (-2 * i / 8) for i in range(4)] * 2
    torch.testing.assert_close(table[3, 0, 0].cpu(), torch.tensor(expected))
    assert list(embedding.state_dict()) == ["inv_freq"]


def test_interpolation_scales_positions_down():
    plain = RotaryPositionEmbedding(8)
    squeezed = RotaryPositionEmbedding(8, seq_len_interpolation_factor=4)
    torch.testing.assert_close(squeezed(16), plain(16) / 4)
    trained = RotaryPositionEmbedding(
        8, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=8
    )
    torch.testing.assert_close(trained(16), plain(16) / 2)
    torch.testing.assert_close(trained(32), plain(32) * 8 / 32)
    assert RotaryPositionEmbedding(8, rotary_percent=0.5)(4).shape[-1] == 4


def test_wrong_arguments_are_rejected_with_the_limit(device):
    x, freqs = sample(device, 5, 2, 3, 8), angles(device, 8, length=4)
    with pytest.raises(ValueError, match=r"sequence length 5 > 4 positions"):
        apply_rotary_pos_emb(x, freqs)
    with pytest.raises(ValueError, match="tensor_format='bhsd'"):
        apply_rotary_pos_emb(x, freqs, "bhsd")
    with pytest.raises(ValueError, match="needs 3 axes, the tensor has 4"):
        apply_rotary_pos_emb(x, freqs, "thd")
    with pytest.raises(ValueError, match="needs cu_seqlens"):
        apply_rotary_pos_emb(x[0], freqs, "thd")
    with pytest.raises(ValueError, match="rotate 16 features, the head has 8"):
        apply_rotary_pos_emb(x, angles(device, 16))
    with pytest.raises(ValueError, match=r"cp_rank=2 is outside 0\.\.1"):
        apply_rotary_pos_emb(x, freqs, cp_size=2, cp_rank=2)
    with pytest.raises(ValueError, match="length 5 is odd"):
        apply_rotary_pos_emb(x, angles(device, 8), cp_size=2)
    with pytest.raises(
        ValueError, match=r"start_positions is torch.float32 \[2\]; give integers \[2\]"
    ):
        apply_rotary_pos_emb(x[:4], freqs, start_positions=torch.zeros(2, device=device))
    with pytest.raises(
        ValueError, match=r"start_positions is torch.int64 \[5\]; give integers \[2\]"
    ):
        apply_rotary_pos_emb(x[:4], freqs, start_positions=torch.arange(5, device=device))
    with pytest.raises(ValueError, match="is odd"):
        RotaryPositionEmbedding(7)
    with pytest.raises(ValueError, match="does not add up to 8"):
        apply_fused_qkv_rotary_pos_emb(x, freqs, freqs, [4, 2, 4])
    with pytest.raises(ValueError, match="not a multiple of the key part 3"):
        apply_fused_qkv_rotary_pos_emb(x, freqs, freqs, [4, 3, 1])
