"""Buffers of random groups, decoded in float64 by the format definitions, without this package's code."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor import GroupedTensor, GroupedTensorStorage

E4M3 = te.DType.kFloat8E4M3
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
RECIPES = {
    "current": (lambda: te.Float8CurrentScalingQuantizer(E4M3, "cpu"), 1),
    "delayed": (lambda: te.Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), E4M3), 1),
    "mxfp8": (lambda: te.MXFP8Quantizer(E4M3), 32),
    "block_1d": (lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1), 1),
    "block_2d": (lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=2), 1),
    "nvfp4": (lambda: te.NVFP4Quantizer(), 16),
}


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Decode E4M3 codes: sign, 4 exponent bits with bias 7, 3 mantissa bits."""
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    return np.where(sign, -1.0, 1.0) * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


class Reader:
    """Reads consecutive matrices' parts from a flat buffer."""

    def __init__(self, buffer: Any) -> None:
        assert buffer is not None and buffer.dim() == 1 and buffer.is_contiguous()
        self.values, self.begin = buffer.cpu().numpy(), 0

    def take(self, *shape: int) -> np.ndarray:
        end = self.begin + int(np.prod(shape))
        part = self.values[self.begin : end].reshape(shape)
        self.begin = end
        return part


def decode_matrices(
    name: str, group: Any, shapes: list[tuple[int, int]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(row-wise values, column-wise values) [M, K] per matrix, in float64."""
    rows, columns = Reader(group.rowwise_data), Reader(group.columnwise_data)
    scales, scales_t = Reader(group.scale_inv), Reader(group.columnwise_scale_inv)
    results = []
    for index, (m, k) in enumerate(shapes):
        if name in ("current", "delayed"):
            scale, scale_t = scales.take(1).astype(float), scales_t.take(1).astype(float)
            results.append((e4m3(rows.take(m, k)) * scale, e4m3(columns.take(k, m)).T * scale_t))
        elif name == "mxfp8":
            scale = scales.take(up(m, 128), up(k // 32, 4))[:m, : k // 32]
            scale_t = scales_t.take(up(m // 32, 4), up(k, 128))[: m // 32, :k]
            by_row = np.repeat(2.0 ** (scale.astype(int) - 127), 32, axis=1)
            by_column = np.repeat(2.0 ** (scale_t.astype(int) - 127), 32, axis=0)
            results.append((e4m3(rows.take(m, k)) * by_row, e4m3(columns.take(m, k)) * by_column))
        elif name == "nvfp4":
            halves = [rows.take(m, k // 2), columns.take(k, m // 2)]
            scale = [scales.take(up(m, 128), up(k // 16, 4))[:m, : k // 16]]
            scale.append(scales_t.take(up(k, 128), up(m // 16, 4))[:k, : m // 16])
            maxima = (group.amax[index], group.columnwise_amax[index])
            values = []
            for packed, factors, amax in zip(halves, scale, maxima, strict=True):
                shape = (packed.shape[0], 2 * packed.shape[1])
                codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(shape)
                values.append(
                    FP4[codes] * np.repeat(e4m3(factors), 16, axis=1) * float(amax) / (6 * 448)
                )
            results.append((values[0], values[1].T))
        elif name == "block_1d":
            scale = scales.take(up(k, 128) // 128, up(m, 4))[:, :m].astype(float)
            scale_t = scales_t.take(up(m, 128) // 128, up(k, 4))[:, :k].astype(float)
            by_row = np.repeat(scale.T, 128, axis=1)[:, :k]
            by_column = np.repeat(scale_t, 128, axis=0)[:m]
            results.append((e4m3(rows.take(m, k)) * by_row, e4m3(columns.take(k, m)).T * by_column))
        else:
            tiles, tiles_t = up(m, 128) // 128, up(k, 128) // 128
            scale = scales.take(tiles, up(tiles_t, 4))[:, :tiles_t].astype(float)
            scale_t = scales_t.take(tiles_t, up(tiles, 4))[:, :tiles].astype(float)
            spread = [np.repeat(np.repeat(s, 128, axis=0), 128, axis=1) for s in (scale, scale_t)]
            results.append(
                (
                    e4m3(rows.take(m, k)) * spread[0][:m, :k],
                    (e4m3(columns.take(k, m)) * spread[1][:k, :m]).T,
                )
            )
    return results


def tolerance(name: str, x: np.ndarray) -> np.ndarray:
    """Largest error per element: half an element step in its block's scale."""
    # the largest step, from 4 to 6, in the largest block; and its scale's rounding
    if name == "nvfp4":
        return np.full(x.shape, np.abs(x).max(initial=0.0) * (1 / 6 + 1 / 16))
    least = np.abs(x).max(initial=0.0) * 2.0**-9 if name != "delayed" else 2.0**-10 / 4
    return np.maximum(np.abs(x) / 16, least) * (1 + 1e-6)


def random_matrices(name: str, kind: str, seed: int) -> list[torch.Tensor]:
    """Matrices whose first, last or both extents vary."""
    choose = random.Random(100 * list(RECIPES).index(name) + seed)
    multiple, count = RECIPES[name][1], choose.randint(1, 5)
    rows = [choose.choice([0, 16, 33, 64, 128, 160]) // multiple * multiple for _ in range(count)]
    columns = [choose.choice([32, 64, 160, 256]) for _ in range(count)]
    if kind in ("equal", "last"):
        rows = [choose.choice([32, 64, 160])] * count
    if kind in ("equal", "first"):
        columns = columns[:1] * count
    generator, factor = torch.Generator().manual_seed(seed), choose.choice([1e-3, 1.0, 30.0])
    return [
        factor * torch.randn(m, k, generator=generator) for m, k in zip(rows, columns, strict=True)
    ]


def check_group(name: str, group: Any, matrices: list[torch.Tensor]) -> None:
    """Compare a group's decoded buffers, offsets and members with its values."""
    shapes = [tuple(matrix.shape) for matrix in matrices]
    for (by_row, by_column), values in zip(
        decode_matrices(name, group, shapes), matrices, strict=True
    ):
        matrix = values.double().numpy()
        assert (
            matrix.size == 0
            or name == "delayed"
            or np.abs(by_row).max() > 0.8 * np.abs(matrix).max()
        )
        if name == "delayed":
            matrix = np.clip(matrix, -448 / 4, 448 / 4)  # the scale comes from earlier steps
        for result in (by_row, by_column):
            assert np.all(np.abs(result - matrix) <= tolerance(name, matrix)), name
    assert group.num_tensors == len(matrices)
    for member, matrix in zip(group.split_into_quantized_tensors(), matrices, strict=True):
        assert torch.equal(member.dequantize(), RECIPES[name][0]()(matrix).dequantize())
    assert [tuple(shape) for shape in group.tensor_shapes] == shapes
    ends = [sum(m * k for m, k in shapes[:i]) for i in range(len(shapes) + 1)]
    assert group.offsets == ends
    assert group.tensor_offsets is None or group.tensor_offsets.tolist() == ends


KINDS = ("equal", "first", "last", "both")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.sampled
def test_buffers_of_random_groups_decode_to_the_values(name, seed, kind):
    matrices = random_matrices(name, kind, seed)
    extents = [torch.tensor([matrix.shape[axis] for matrix in matrices]) for axis in (0, 1)]
    flat = torch.cat([matrix.flatten() for matrix in matrices])
    logical = {
        "equal": (-1, matrices[0].shape[1]),
        "first": (int(extents[0].sum()), matrices[0].shape[1]),
        "last": (matrices[0].shape[0], int(extents[1].sum())),
        "both": (1, flat.numel()),
    }
    first_dims = extents[0] if kind in ("first", "both") else None
    last_dims = extents[1] if kind in ("last", "both") else None
    x = flat.view(logical[kind])
    group = tex.group_quantize(x, RECIPES[name][0](), len(matrices), first_dims, last_dims)
    check_group(name, group, matrices)
    assert group.logical_shape == x.shape
    assert (group.first_dims is None, group.last_dims is None) == (
        first_dims is None,
        last_dims is None,
    )


def flat_buffers(members: list[Any]) -> dict[str, torch.Tensor]:
    """Flat buffers with the parts of these tensors, in row-major order, by the constructor's keywords."""
    parts = {"data": "_rowwise_data", "scale_inv": "_rowwise_scale_inv"}
    parts |= {
        "columnwise_data": "_columnwise_data",
        "columnwise_scale_inv": "_columnwise_scale_inv",
    }
    if isinstance(members[0], te.Float8Tensor):
        parts = {"data": "_data", "columnwise_data": "_transpose"}
        parts |= dict.fromkeys(("scale_inv", "columnwise_scale_inv"), "_scale_inv")
    if isinstance(members[0], te.NVFP4Tensor):
        parts |= {"amax": "_amax_rowwise", "columnwise_amax": "_amax_columnwise"}
    return {
        key: torch.cat([getattr(m, part).flatten() for m in members]) for key, part in parts.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sampled
def test_created_and_adopted_buffers_are_row_major(name, seed, kind):
    matrices = random_matrices(name, kind, seed)
    shapes = [tuple(matrix.shape) for matrix in matrices]
    make = RECIPES[name][0]
    created = GroupedTensor.make_grouped_tensor_with_shapes(
        len(shapes), shapes, make(), "cpu", torch.float32
    )
    created.quantize(matrices)
    check_group(name, created, matrices)
    check_group(name, copy.deepcopy(created), matrices)
    buffers = flat_buffers([make()(matrix) for matrix in matrices])
    adopted = GroupedTensorStorage(
        created.logical_shape,
        torch.float32,
        num_tensors=len(shapes),
        shapes=shapes,
        quantizer=make(),
        **buffers,
    )
    check_group(name, adopted, matrices)
    halves = [matrix / 2 for matrix in matrices]
    adopted.quantize(halves)
    check_group(name, adopted, halves)
    if matrices[0].numel():
        assert adopted.rowwise_data.data_ptr() == buffers["data"].data_ptr()
