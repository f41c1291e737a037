"""group_quantize: codes, attributes and offsets for groups whose row counts stay on the device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine_torch as tex
from tests.tensor.quantizer_cases import create_quantizer, payload, same_payload
from transformer_engine.pytorch.tensor import NVFP4Quantizer

MULTIPLES = {"mxfp8": 32, "mxfp8_2d": 32, "nvfp4": 16, "nvfp4_rht": 16, "nvfp4_4over6": 16}
VARIANTS = {
    "nvfp4_rht": lambda device, **usage: NVFP4Quantizer(
        with_rht=True, with_post_rht_amax=True, **usage
    ),
    "nvfp4_4over6": lambda device, **usage: NVFP4Quantizer(
        nvfp4_use_4over6=True, nvfp4_e4m3_max=256, **usage
    ),
}
GROUPED = (
    "delayed",
    "state",
    "current",
    "mxfp8",
    "mxfp8_2d",
    "block_1d",
    "block_2d",
    "nvfp4",
    *VARIANTS,
)


def quantizer(name: str, device: torch.device, **usage: bool) -> Any:
    return (
        VARIANTS[name](device, **usage)
        if name in VARIANTS
        else create_quantizer(name, device, **usage)
    )


class NoHostCopies(TorchDispatchMode):
    """Raises where an operation reads tensor values on the host."""

    READS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.equal.default,
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in self.READS, f"{func} reads values on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sampled
def test_random_groups_have_the_codes_and_scales_of_their_matrices(name, seed, device):
    choose = random.Random(1000 * GROUPED.index(name) + seed)
    multiple = MULTIPLES.get(name, 1)
    rows = [
        choose.choice([0, 16, 33, 64, 128, 160, 256]) // multiple * multiple
        for _ in range(choose.randint(1, 5))
    ]
    columns, unused = choose.choice([32, 64, 160, 256]), choose.choice([0, 32])
    rowwise, columnwise = choose.choice([(True, True), (True, False), (False, True)])
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(rows) + unused, columns, generator=generator).to(device, torch.bfloat16)
    first_dims = torch.tensor(rows, device=device)
    usage = {"rowwise": rowwise, "columnwise": columnwise}
    group = tex.group_quantize(x, quantizer(name, device, **usage), len(rows), first_dims)
    assert group.first_dims is first_dims and group.last_dims is None and group.offsets is None
    ends = [columns * sum(rows[:i]) for i in range(len(rows) + 1)]
    assert group.tensor_offsets.dtype == torch.int64 and group.tensor_offsets.tolist() == ends
    assert group.logical_shape == group.shape == x.shape and group.num_tensors == len(rows)
    assert not group.all_same_first_dim() and group.get_common_last_dim() == columns
    members = group.split_into_quantized_tensors()
    for member, piece in zip(members, x[: sum(rows)].split(rows), strict=True):
        assert same_payload(member, quantizer(name, device, **usage)(piece))
    assert group.offsets == ends  # known once the shapes are read
    for buffer in ("rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv"):
        contents = getattr(group, buffer)
        assert contents is None or (contents.dim() == 1 and contents.is_contiguous())
    values = group.dequantize()
    assert torch.equal(values[: sum(rows)], torch.cat([member.dequantize() for member in members]))


@pytest.mark.parametrize("name", GROUPED)
def test_no_value_is_read_on_the_host(name):
    device = torch.device("cpu")
    x, first_dims = torch.randn(256, 64), torch.tensor([64, 0, 192])
    cast = quantizer(name, device)
    before = [
        payload(m)
        for m in tex.group_quantize(x, cast, 3, first_dims).split_into_quantized_tensors()
    ]
    from transformer_engine.pytorch.tensor.grouped_rows import quantize_rows

    with NoHostCopies():
        group = quantize_rows(x, cast, first_dims)
    after = [payload(m) for m in group.split_into_quantized_tensors()]
    for a, b in zip(after, before, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_maxima_and_scales_are_attributes(device):
    x = torch.randn(64, 32, device=device)
    pieces = x.split([16, 48])
    maxima = torch.stack([piece.abs().amax() for piece in pieces])
    group = tex.group_quantize(
        x, quantizer("current", device), 2, torch.tensor([16, 48], device=device)
    )
    assert torch.equal(group.amax, maxima) and torch.equal(
        group.scale, (448 / maxima.double()).float()
    )
    assert group.scale_inv is group.columnwise_scale_inv and group.scale_inv.shape == (2,)
    equal = tex.group_quantize(x, quantizer("current", device), 2, None)
    assert equal.first_dims is None and equal.tensor_offsets is None and equal.shape == (2, 32, 32)
    assert equal.offsets == [0, 1024, 2048] and equal.amax.shape == equal.scale.shape == (2,)
    delayed = tex.group_quantize(
        x, quantizer("delayed", device), 2, torch.tensor([16, 48], device=device)
    )
    assert torch.equal(delayed.amax, maxima) and delayed.scale_inv.tolist() == [0.25, 0.25]
    half = tex.group_quantize(
        x, quantizer("nvfp4", device), 2, torch.tensor([16, 48], device=device)
    )
    assert torch.equal(half.amax, maxima) and half.rowwise_data.numel() == x.numel() // 2
    assert (
        half.nvfp4_e4m3_max == 448
        and half.row_scaled_nvfp4 is half._with_gemm_swizzled_scales is False
    )
    mxfp8 = tex.group_quantize(x, quantizer("mxfp8", device), 2, None)
    assert mxfp8.amax is None and mxfp8.scale_inv_offsets == [0, 512, 1024]
    assert mxfp8.columnwise_scale_inv_offsets == [0, 512, 1024]


def test_equal_first_dims_stay_varying(device):
    x = torch.randn(64, 32, device=device)
    group = tex.group_quantize(x, quantizer("mxfp8", device), 2, [32, 32], tensor_offsets=None)
    assert group.first_dims.tolist() == [32, 32] and group.shape == (64, 32)
    assert group.split_into_quantized_tensors()[1].shape == (32, 32)
    offsets = torch.tensor([0, 1024, 2048], device=device)
    argument = tex.group_quantize(
        x, quantizer("mxfp8", device), 2, group.first_dims, tensor_offsets=offsets
    )
    assert argument.tensor_offsets is offsets


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4_2d"])
def test_varying_columns_and_other_variants_read_the_shapes(name, device):
    x = torch.randn(32, 96, device=device)
    lasts = torch.tensor([32, 64], device=device)
    cast = quantizer(name, device)
    group = tex.group_quantize(x, cast, 2, None, lasts)
    assert group.last_dims is lasts and group.first_dims is None and group.logical_shape == (32, 96)
    flat = x.flatten()
    for member, piece in zip(
        group.split_into_quantized_tensors(),
        (flat[:1024].view(32, 32), flat[1024:].view(32, 64)),
        strict=True,
    ):
        assert same_payload(member, cast(piece))
    assert (cast.groups_unsupported_reason() is None) == (name != "nvfp4_2d")
    rows = tex.group_quantize(
        x, quantizer("nvfp4_2d", device), 2, torch.tensor([16, 16], device=device)
    )
    assert rows.first_dims.tolist() == [16, 16] and rows.tensor_offsets.tolist() == [0, 1536, 3072]


def test_arguments_that_do_not_fit_are_rejected(device):
    x, cast = torch.randn(64, 32, device=device), quantizer("mxfp8", device)
    with pytest.raises(ValueError, match=r"first_dims is torch.int64 \[3\] for num_tensors=2"):
        tex.group_quantize(x, cast, 2, torch.tensor([32, 32, 0], device=device))
    group = tex.group_quantize(x, cast, 2, None)
    with pytest.raises(ValueError, match="output receives matrices of equal shapes only"):
        tex.group_quantize(x, cast, 2, torch.tensor([32, 32], device=device), output=group)
    with pytest.raises(ValueError, match="output has 2 matrices"):
        tex.group_quantize(x, cast, 4, None, output=group)
    with pytest.raises(ValueError, match="sums of different lengths"):
        tex.bgrad_group_quantize(x, cast, 2, None, torch.tensor([32, 32], device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GROUPED)
def test_a_captured_graph_follows_the_rows_of_each_replay(name):
    device = torch.device("cuda")
    x, first_dims = (
        torch.randn(512, 128, device=device),
        torch.tensor([128, 256, 128], device=device),
    )
    cast = quantizer(name, device)
    tex.group_quantize(x, cast, 3, first_dims)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group = tex.group_quantize(x, cast, 3, first_dims)
        if name != "state":
            sums, _ = tex.bgrad_group_quantize(x, cast, 3, first_dims)
        with pytest.raises(ValueError, match="cannot be read during graph capture"):
            group.copy().split_into_quantized_tensors()
    for rows in ([128, 256, 128], [0, 384, 128], [512, 0, 0]):
        x.normal_()
        first_dims.copy_(torch.tensor(rows))
        graph.replay()
        for member, piece in zip(
            group.copy().split_into_quantized_tensors(), x.split(rows), strict=True
        ):
            assert same_payload(member, quantizer(name, device)(piece))
        if name != "state":
            torch.testing.assert_close(sums, torch.stack([piece.sum(0) for piece in x.split(rows)]))
