"""Groups, partial casts, scaled activations and unavailable functions in transformer_engine_torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage
from transformer_engine_torch import unavailable

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
QUANTIZERS = {
    "current": lambda: te.Float8CurrentScalingQuantizer(E4M3, "cpu"),
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
    "nvfp4": lambda: te.NVFP4Quantizer(),
}
ROWS = [32, 64, 32]


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("rows", [ROWS, None])
def test_a_group_has_the_codes_of_its_matrices(name, rows):
    used = [32] * 4 if rows is None else rows
    x = torch.randn(128 if rows is None else 160, 64, dtype=torch.bfloat16)
    dims = None if rows is None else torch.tensor(rows)
    quantizer = QUANTIZERS[name]()
    group = tex.group_quantize(x, quantizer, len(used), dims)
    pieces = x[: sum(used)].split(used)
    for member, piece in zip(group.split_into_quantized_tensors(), pieces, strict=True):
        assert torch.equal(member.dequantize(), quantizer(piece).dequantize())
    values = tex.group_dequantize(group, torch.float32)
    expected = torch.cat([quantizer(piece).dequantize(dtype=torch.float32) for piece in pieces])
    assert torch.equal(torch.cat([m.reshape(-1, 64) for m in values.members()]), expected)
    sums, repeated = tex.bgrad_group_quantize(x, quantizer, len(used), dims)
    assert torch.equal(
        sums, torch.stack([p.sum(0, dtype=torch.float32).bfloat16() for p in pieces])
    )
    assert torch.equal(repeated.rowwise_data, group.rowwise_data)


def test_a_group_is_written_in_place_unless_the_flag_is_set():
    x = torch.randn(64, 32)
    quantizer = QUANTIZERS["current"]()
    group = tex.group_quantize(torch.zeros(64, 32), quantizer, 2, None)
    before = group.rowwise_data.clone()
    assert tex.group_quantize(x, quantizer, 2, None, noop_flag=torch.ones(1), output=group) is group
    assert torch.equal(group.rowwise_data, before)
    tex.group_quantize(x, quantizer, 2, None, noop_flag=torch.zeros(1), output=group)
    assert torch.equal(group.rowwise_data, tex.group_quantize(x, quantizer, 2, None).rowwise_data)
    with pytest.raises(ValueError, match="output"):
        tex.group_quantize(x, quantizer, 2, None, noop_flag=torch.ones(1))
    with pytest.raises(ValueError, match="num_tensors=2"):
        tex.group_quantize(x, quantizer, 2, torch.tensor([64, 32]))


def test_offsets_and_allocations():
    splits = torch.tensor([2, 0, 3])
    assert tex.splits_to_offsets(splits, 8).tolist() == [0, 16, 16, 40]
    for bulk in (True, False):
        sizes, tables = tex.splits_to_offsets_multi(
            splits.int(),
            "cpu",
            strides=[8, 1],
            include_leading_zero=[True, False],
            dtypes=[torch.int64, torch.int32],
            bulk_allocate=bulk,
        )
        assert torch.equal(sizes, splits) and sizes.dtype == torch.int64
        assert [t.tolist() for t in tables] == [[0, 16, 16, 40], [2, 2, 5]]
        assert [t.dtype for t in tables] == [torch.int64, torch.int32]
    a, b = tex.bulk_allocate([(3,), (2, 2)], [torch.uint8, torch.float32], "cpu", [1, 64])
    assert (a.shape, b.shape, b.dtype) == ((3,), (2, 2), torch.float32)
    assert (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and b.storage_offset() * 4 == 64
    )
    addresses = tex.copy_data_ptrs_to_device([a, b], "cpu")
    assert addresses.tolist() == [a.data_ptr(), b.data_ptr()]


def test_fp4_codes_are_transposed():
    codes = torch.randint(0, 16, (6, 10), dtype=torch.uint8)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    transposed = codes.t()
    expected = transposed[:, 0::2] | (transposed[:, 1::2] << 4)
    assert torch.equal(tex.nvfp4_data_transpose(packed), expected)
    out = torch.empty_like(expected)
    assert tex.nvfp4_data_transpose(packed, out) is out and torch.equal(out, expected)


def test_scales_are_swizzled_in_place_and_products_read_them():
    x, w = torch.randn(32, 64), torch.randn(32, 64)
    q = te.MXFP8Quantizer(E4M3)
    qx, qw = q(x), q(w)
    before, scale = general_gemm(qw, qx, torch.float32)[0], qx._rowwise_scale_inv
    tex.swizzle_scales_for_gemm_(qx)
    tex.multi_tensor_swizzle_scales_for_gemm_([qw], True, True)
    assert qx._with_gemm_swizzled_scales is qw._with_gemm_swizzled_scales is True
    assert torch.equal(qx._rowwise_scale_inv.flatten(), tile_scales(scale))
    after = general_gemm(qw, qx, torch.float32)[0]
    assert torch.equal(before, after)
    group = tex.group_quantize(torch.cat((x, w)), q, 2, None)
    values, buffer = group.dequantize(), group.scale_inv.clone()
    tex.grouped_swizzle_for_gemm(group)
    assert group._with_gemm_swizzled_scales is True and not torch.equal(group.scale_inv, buffer)
    assert torch.equal(group.dequantize(), values)
    tex.grouped_swizzle_for_gemm(group)  # again: the same order
    assert torch.equal(group.dequantize(), values)
    torch.testing.assert_close(after, qx.dequantize() @ qw.dequantize().t())
    with pytest.raises(TypeError, match="block scales"):
        tex.swizzle_scales_for_gemm_(x)


def tile_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales [128 r, 4 c] in matrix-instruction order, flat."""
    rows, columns = scale.shape
    return scale.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).flatten()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_groups_of_swizzled_scales_have_the_values_of_their_members(name):
    quantizer = te.MXFP8Quantizer(E4M3) if name == "mxfp8" else te.NVFP4Quantizer()
    shapes = [(128, 160), (256, 64)]
    members = [quantizer(torch.randn(shape)) for shape in shapes]
    codes, scales, codes_t, scales_t = [], [], [], []
    for member in members:
        codes.append(member._rowwise_data.flatten())
        scales.append(tile_scales(member._rowwise_scale_inv))
        if name == "mxfp8":  # the tiles belong to the transpose
            codes_t.append(member._columnwise_data.flatten())
            scales_t.append(tile_scales(member._columnwise_scale_inv.t()))
        else:
            codes_t.append(member._columnwise_data.flatten())
            scales_t.append(tile_scales(member._columnwise_scale_inv))
    lists = {
        "data": codes,
        "scale_inv": scales,
        "columnwise_data": codes_t,
        "columnwise_scale_inv": scales_t,
    }
    buffers: dict[str, Any] = {key: torch.cat(parts) for key, parts in lists.items()}
    if name == "nvfp4":
        buffers["amax"] = torch.cat([member._amax_rowwise for member in members])
        buffers["columnwise_amax"] = torch.cat([member._amax_columnwise for member in members])
    swizzled = buffers["scale_inv"].clone()
    group = GroupedTensorStorage(
        dtype=torch.float32,
        num_tensors=2,
        shapes=shapes,
        quantizer=quantizer,
        with_gemm_swizzled_scales=True,
        **buffers,
    )
    assert torch.equal(buffers["scale_inv"], swizzled) and group.scale_inv is buffers["scale_inv"]
    assert group._with_gemm_swizzled_scales is True
    for member, expected in zip(group.members(), members, strict=True):
        assert torch.equal(member.dequantize(), expected.dequantize())
        for part in (member, expected):
            part.update_usage(rowwise_usage=False, columnwise_usage=True)
        assert torch.equal(member.dequantize(), expected.dequantize())


def shards(w: torch.Tensor, even: bool = False) -> list[tuple[int, torch.Tensor]]:
    """Slices from a flattened weight that begin and end within rows and blocks."""
    bounds = [0, 100, 1250, w.numel()] if even else [0, 101, 1255, w.numel()]
    return [(a, w.view(-1)[a:b]) for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_block_scaled_shards_equal_the_full_quantized_weight(dtype):
    h, w, block = 40, 50, 16
    weight = torch.randn(h, w)
    tiles = (3, 4)
    amax = torch.zeros(tiles)
    for start, shard in shards(weight):
        part = torch.full(tiles, 7.0)
        tex.fp8_block_scaling_compute_partial_amax(shard, part, h, w, start, block)
        amax = torch.maximum(amax, part)
    padded = torch.nn.functional.pad(weight, (0, 14, 0, 8))
    assert torch.equal(amax, padded.view(3, 16, 4, 16).abs().amax((1, 3)))
    largest = 448.0 if dtype == E4M3 else 57344.0
    scale = largest / amax
    codes = torch.empty(h * w, dtype=torch.uint8)
    for start, shard in shards(weight):
        out = codes[start : start + shard.numel()]
        tex.fp8_block_scaling_partial_cast(shard, out, scale, h, w, start, block, dtype)
    kind = torch.float8_e4m3fn if dtype == E4M3 else torch.float8_e5m2
    spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:h, :w]
    expected = (weight * spread).clamp(-largest, largest).to(kind).view(torch.uint8)
    assert torch.equal(codes.view(h, w), expected)
    with pytest.raises(ValueError, match="outside"):
        tex.fp8_block_scaling_compute_partial_amax(weight, amax, h, w, 1, block)


def test_mxfp8_shards_are_the_codes_of_the_quantizer():
    h, w = 64, 96
    weight = torch.randn(h, w, dtype=torch.bfloat16)
    full = te.MXFP8Quantizer(E4M3)(weight)
    amaxes = (
        torch.zeros(h, w // 32, dtype=torch.bfloat16),
        torch.zeros(h // 32, w, dtype=torch.bfloat16),
    )
    for start, shard in shards(weight):
        parts = [torch.empty_like(amax) for amax in amaxes]
        tex.mxfp8_scaling_compute_partial_amax(shard, *parts, h, w, start)
        for amax, part in zip(amaxes, parts, strict=True):
            torch.maximum(amax, part, out=amax)
    exponents = [torch.empty(amax.shape, dtype=torch.uint8) for amax in amaxes]
    tex.multi_tensor_compute_scale_inv_e8m0(65536, None, [list(amaxes), exponents])
    rowwise, columnwise = (
        torch.empty(h * w, dtype=torch.uint8),
        torch.empty(h * w, dtype=torch.uint8),
    )
    for start, shard in shards(weight):
        where = slice(start, start + shard.numel())
        tex.mxfp8_scaling_partial_cast(
            shard, rowwise[where], columnwise[where], *exponents, h, w, start
        )
    assert torch.equal(exponents[0], full._rowwise_scale_inv[:h, : w // 32])
    assert torch.equal(rowwise.view(h, w), full._rowwise_data)
    assert torch.equal(columnwise.view(h, w), full._columnwise_data)


def test_nvfp4_shards_are_the_codes_of_the_quantizer():
    h, w = 48, 64
    weight = torch.randn(h, w, dtype=torch.bfloat16)
    full = te.NVFP4Quantizer(with_2d_quantization=True)(weight)
    amax = torch.zeros(3, 4)
    for start, shard in shards(weight, even=True):
        part = torch.empty_like(amax)
        tex.nvfp4_2d_compute_partial_amax(shard, part, h, w, start)
        amax = torch.maximum(amax, part)
    assert torch.equal(amax, weight.float().view(3, 16, 4, 16).abs().amax((1, 3)))
    scales = full._rowwise_scale_inv.view(torch.float8_e4m3fn).float()[:h:16, :4]
    global_scale = torch.div(torch.full((1,), 448.0 * 6.0), full._amax_rowwise)
    packed = torch.empty(h * w // 2, dtype=torch.uint8)
    for start, shard in shards(weight, even=True):
        out = packed[start // 2 : (start + shard.numel()) // 2]
        tex.nvfp4_2d_partial_cast(shard, out, scales, global_scale, h, w, start)
    assert torch.equal(packed.view(h, w // 2), full._rowwise_data)
    with pytest.raises(ValueError, match="cuts a byte"):
        tex.nvfp4_2d_partial_cast(
            weight.view(-1)[1:3], packed[:1], scales, full._amax_rowwise, h, w, 1
        )


SCALED = {
    "swiglu": (lambda a, b: torch.nn.functional.silu(a) * b, ()),
    "situglu": (
        lambda a, b: 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25),
        (),
    ),
    "clamped_swiglu": (
        lambda a, b: a.clamp(max=2) * torch.sigmoid(1.5 * a.clamp(max=2)) * (b.clamp(-2, 2) + 0.5),
        (2.0, 1.5, 0.5),
    ),
    "srelu": (lambda x, _: torch.relu(x).square(), ()),
}


@pytest.mark.parametrize(
    ("name", "interleave"),
    [(name, size) for name in SCALED for size in (0, 2) if (name, size) != ("srelu", 2)],
)
def test_scaled_activations_equal_float64_and_autograd(name, interleave):
    formula, constants = SCALED[name]
    x, scales = torch.randn(3, 2, 8, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    x.requires_grad_()
    scales.requires_grad_()
    if name == "srelu":
        y = formula(x, None) * scales[..., None]
    else:
        halves = (
            x.unflatten(-1, (-1, 2, interleave)).transpose(-3, -2).flatten(-3) if interleave else x
        )
        y = formula(*halves.chunk(2, dim=-1)) * scales[..., None]
    dy = torch.randn_like(y)
    y.backward(dy)
    options = {"glu_interleave_size": interleave} if interleave else {}
    args = (x.detach().float(), scales.detach().float(), None, *constants)
    result = getattr(tex, f"scaled_{name}")(*args, **options)
    torch.testing.assert_close(result.double(), y.detach(), rtol=1e-5, atol=1e-5)
    prefix, _, kind = name.rpartition("_")
    backward = getattr(tex, "_".join(filter(None, ("scaled", prefix, f"d{kind}"))))
    dx, dscales = backward(dy.float(), *args, **options)
    torch.testing.assert_close(dx.double(), x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dscales.double(), scales.grad, rtol=1e-4, atol=1e-5)
    assert backward(dy.float(), *args, **options, compute_scale_grad=False)[1] is None
    with pytest.raises(TypeError, match="constants"):
        getattr(tex, f"scaled_{name}")(*args, nothing=1.0)


def test_situ_glu_and_a_quantized_result():
    x = torch.tensor([[2.0, 3.0]])
    torch.testing.assert_close(tex.situglu(x, None), torch.tensor([[4.8610666]]))
    wide = x.double().requires_grad_()
    SCALED["situglu"][0](*wide.chunk(2, dim=-1)).backward(torch.ones(1, 1, dtype=torch.float64))
    torch.testing.assert_close(
        tex.dsituglu(torch.ones(1, 1), x, None).double(), wide.grad, rtol=1e-5, atol=1e-6
    )
    for call in (
        lambda: tex.situglu(x[:, :1], None),
        lambda: tex.scaled_situglu(x[:, :1], torch.ones(1), None),
    ):
        with pytest.raises(ValueError, match="situglu halves the last axis"):
            call()
    inputs = torch.randn(16, 32), torch.rand(16)
    quantizer = QUANTIZERS["current"]()
    result = tex.scaled_swiglu(*inputs, quantizer)
    assert torch.equal(result._data, quantizer(tex.scaled_swiglu(*inputs, None))._data)


def test_margins_of_quantile_balancing():
    logits, bias = torch.randn(6, 5), torch.rand(5)
    histogram = torch.zeros(5, 4, dtype=torch.int32)
    bounds = torch.tensor([-1.0, 1.0])
    probs, routing, scores, cutoff, counted = tex.fused_topk_with_score_function_qb_fwd(
        logits, 2, 1.5, bias, 0, None, histogram, bounds, tex.NVTEQBHistogramMode.TWO_KERNEL
    )
    expected, chosen, _ = tex.fused_topk_with_score_function_fwd(
        logits, 2, False, None, None, 1.5, "sigmoid", bias
    )
    assert torch.equal(probs, expected) and torch.equal(routing, chosen) and counted is histogram
    torch.testing.assert_close(scores, torch.sigmoid(logits))
    ordered = (scores + bias).sort(dim=-1, descending=True).values
    torch.testing.assert_close(cutoff, ordered[:, 2])
    bins = ((cutoff[:, None] - scores + 1) * 2).floor().clamp(0, 3).long()
    assert torch.equal(counted, torch.nn.functional.one_hot(bins, 4).sum(0).int())


@pytest.mark.parametrize("name", [name for name in unavailable.__all__ if name[0].islower()])
def test_an_unavailable_function_names_its_replacement(name):
    with pytest.raises(
        NotImplementedError, match=rf"{name}: .*(torch\.distributed|te\.|transformer_engine)"
    ):
        getattr(tex, name)(1, group=None)


def test_build_queries_return_documented_values():
    assert tex.nvte_built_with_cublasmp() is False and tex.get_num_cublas_streams() == 1
    assert tex.get_grouped_gemm_setup_workspace_size(3) == 0
    assert (tex.get_cublasLt_version() > 0) in (True, torch.cuda.is_available())
    low, high = tex.get_stream_priority_range()
    assert low >= high
    assert (tex.CommOverlapType.RS, tex.CommOverlapType.AG) == (0, 1) and len(
        tex.CommOverlapAlgo
    ) == 9
    assert tex.Float8BlockScaleTensorFormat.COMPACT == 1
