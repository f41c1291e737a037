"""NVFP4 quantization steps from shards, against the full-weight quantizer and float64."""

from __future__ import annotations

import itertools

import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from tests.tensor.quantizer_cases import same_payload

SHAPES = [(48, 64), (16, 16), (80, 96), (128, 32)]


def whole(weight: torch.Tensor) -> te.NVFP4Tensor:
    return te.NVFP4Quantizer(with_2d_quantization=True)(weight)


def tile_counts(weight: torch.Tensor) -> tuple[int, int]:
    return -(-weight.shape[0] // 16), -(-weight.shape[1] // 16)


@pytest.mark.parametrize("shards", [1, 3])
def test_steps_over_shards_give_the_codes_and_scales_of_whole_weights(shards, device):
    weights = [
        torch.randn(shape, device=device).bfloat16() * 3**i for i, shape in enumerate(SHAPES)
    ]
    quantized = [whole(weight) for weight in weights]
    amaxes = [torch.zeros(tile_counts(w), device=device) for w in weights]
    maxima = [torch.zeros(1, device=device) for _ in weights]
    heights, widths = [w.shape[0] for w in weights], [w.shape[1] for w in weights]
    bounds = [[w.numel() * i // shards // 2 * 2 for i in range(shards + 1)] for w in weights]
    for i in range(shards):
        parts = [w.view(-1)[b[i] : b[i + 1]] for w, b in zip(weights, bounds, strict=True)]
        local, largest = (
            [torch.full_like(a, 7) for a in amaxes],
            [torch.full_like(m, 7) for m in maxima],
        )
        starts = [b[i] for b in bounds]
        tex.nvfp4_multi_tensor_compute_partial_amax(parts, local, largest, heights, widths, starts)
        for total, part in zip((*amaxes, *maxima), (*local, *largest), strict=True):
            torch.maximum(total, part, out=total)
    assert [m.item() for m in maxima] == [w.abs().max().item() for w in weights]
    scales = [torch.empty_like(a) for a in amaxes]
    targets = [torch.full_like(q._rowwise_scale_inv, 7) for q in quantized]
    copies = [torch.empty_like(m) for m in maxima]
    counts = [list(numbers) for numbers in zip(*map(tile_counts, weights), strict=True)]
    padded = [target.shape[0] for target in targets]
    tex.nvfp4_multi_tensor_fused_scale(amaxes, maxima, scales, targets, copies, *counts, padded)
    global_scales = [torch.empty_like(m) for m in maxima]
    for amax, scale in zip(maxima, global_scales, strict=True):
        tex.nvfp4_compute_global_scale(amax, scale)
    codes = [torch.empty(w.numel() // 2, dtype=torch.uint8, device=device) for w in weights]
    for i in range(shards):
        tex.nvfp4_multi_tensor_2d_partial_cast(
            [w.view(-1)[b[i] : b[i + 1]] for w, b in zip(weights, bounds, strict=True)],
            [c[b[i] // 2 : b[i + 1] // 2] for c, b in zip(codes, bounds, strict=True)],
            scales,
            global_scales,
            heights,
            widths,
            [b[i] for b in bounds],
        )
    for weight, target, copy, code, q in zip(
        weights, targets, copies, codes, quantized, strict=True
    ):
        rows = weight.shape[0]
        assert torch.equal(
            target[:rows, : weight.shape[1] // 16],
            q._rowwise_scale_inv[:rows, : weight.shape[1] // 16],
        )
        assert torch.equal(copy, q._amax_rowwise) and torch.equal(
            code.view(rows, -1), q._rowwise_data
        )
        assert not target[-(-rows // 16) * 16 :].any()
    codes_t = [torch.empty_like(q._columnwise_data) for q in quantized]
    scales_t = [torch.full_like(q._columnwise_scale_inv, 7) for q in quantized]
    tex.nvfp4_2d_multi_tensor_transpose(codes, codes_t, targets, scales_t, heights, widths)
    for weight, code, scale, q in zip(weights, codes_t, scales_t, quantized, strict=True):
        m, k = tile_counts(weight)
        assert torch.equal(code, q._columnwise_data)
        assert torch.equal(scale[: 16 * k, :m], q._columnwise_scale_inv[: 16 * k, :m])
        assert not scale[16 * k :].any() and not scale[:, m:].any()


def test_scales_equal_float64(device):
    amax = torch.tensor([[3.0, 0.5], [0.0, 6.0]], device=device)
    largest, scale, blocks = (
        torch.tensor([6.0], device=device),
        torch.empty(1, device=device),
        torch.empty_like(amax),
    )
    tex.nvfp4_compute_global_scale(largest, scale)
    assert scale.item() == 448.0
    tex.nvfp4_compute_per_block_scale(amax, blocks, largest)
    torch.testing.assert_close(blocks.double(), amax.double() / 6 * 448, rtol=1e-6, atol=0)
    out = torch.full((35, 4), 9, dtype=torch.uint8, device=device)
    tex.nvfp4_expand_scale_to_fp8(blocks, out, 2, 2, 35)
    values = out.view(torch.float8_e4m3fn).float()
    assert torch.equal(
        values[:32, :2], blocks.to(torch.float8_e4m3fn).float().repeat_interleave(16, 0)
    )
    assert not values[32:].any() and not values[:, 2:].any()
    zero = torch.zeros(1, device=device)
    tex.nvfp4_compute_global_scale(zero, scale)
    assert scale.item() == 1.0
    tex.nvfp4_compute_global_scale(torch.full((1,), 1e-38, device=device), scale)
    assert scale.item() == torch.finfo(torch.float32).max


def test_lists_of_other_lengths_are_rejected_before_a_write(device):
    weight, amax = torch.ones(16, 16, device=device), torch.full((1, 1), 7.0, device=device)
    with pytest.raises(ValueError, match=r"h_list has 2.*one entry per weight"):
        tex.nvfp4_multi_tensor_compute_partial_amax(
            [weight], [amax], [amax[0]], [16, 16], [16], [0]
        )
    assert amax.item() == 7.0
    with pytest.raises(
        ValueError, match=r"output is \[16, 1\]; give a matrix of at least \[17, 1\]"
    ):
        tex.nvfp4_2d_scale_transpose(
            torch.ones(16, 2, dtype=torch.uint8), torch.ones(16, 1, dtype=torch.uint8), 1, 2
        )


@pytest.mark.parametrize(
    "options", [{}, {"with_rht": True, "with_post_rht_amax": True}, {"with_2d_quantization": True}]
)
@pytest.mark.parametrize("rows", [None, [32, 0, 16]])
def test_groups_with_given_maxima_have_the_codes_of_their_matrices(options, rows, device):
    x = torch.randn(48, 64, device=device).bfloat16()
    cast = te.NVFP4Quantizer(**options)
    pieces = x.split(rows or [16] * 3)
    local = [cast(piece) for piece in pieces]
    maxima = [
        torch.cat([getattr(q, name) for q in local])
        for name in ("_amax_rowwise", "_amax_columnwise")
    ]
    first_dims = None if rows is None else torch.tensor(rows, device=device)
    group = tex.nvfp4_group_quantize_with_amax(x, cast, 3, first_dims, None, *maxima)
    assert group.first_dims is first_dims and group.num_tensors == 3
    for member, expected in zip(group.split_into_quantized_tensors(), local, strict=True):
        assert same_payload(member, expected)
    doubled = tex.nvfp4_group_quantize_with_amax(
        x, cast, 3, first_dims, None, 2 * maxima[0], maxima[1]
    )
    assert torch.equal(doubled.amax, 2 * maxima[0])
    one = cast.with_2d_quantization  # both directions have one maximum
    assert torch.equal(doubled.columnwise_amax, doubled.amax if one else maxima[1])
    with pytest.raises(ValueError, match="rowwise_amax has 2 maxima for num_tensors=3"):
        tex.nvfp4_group_quantize_with_amax(x, cast, 3, first_dims, None, maxima[0][:2])


def test_valid_tokens_of_padded_sequences_are_copied(device):
    lengths, padded = [3, 0, 4], [4, 4, 8]
    starts = [0, *itertools.accumulate(padded)]
    out = torch.zeros(20, 2, 3, device=device)
    inp = torch.randn(20, 2, 3, device=device)
    ends = (starts, [0, *itertools.accumulate(lengths)])
    bounds = [torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ends]
    tex.thd_copy_valid_tokens_from_per_split_to_rank_local(out, inp, *bounds)
    expected = torch.zeros_like(out)
    for start, length in zip(starts, lengths, strict=False):
        expected[start : start + length] = inp[start : start + length]
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="give tensors of one shape and dtype"):
        tex.thd_copy_valid_tokens_from_per_split_to_rank_local(out, inp[:4], *bounds)


def test_scaling_modes_have_the_numbers_of_the_original():
    assert [mode.value for mode in tex.NVTEScalingMode] == [0, 1, 2, 3, 4, 100]
    assert tex.NVTEScalingMode.NVTE_NVFP4_1D_SCALING == 4


def test_every_function_is_exported():
    from transformer_engine.pytorch import cpp_extensions

    assert (
        {"group_requantize_inplace", "nvfp4_fused_scale"}
        <= set(tex.__all__)
        <= set(cpp_extensions.__all__)
    )
    assert len(tex.__all__) == len(set(tex.__all__))
