"""Buffers of random groups, decoded in float64 after the definitions of the formats, without this package's code."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex

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
    """Values of E4M3 codes: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    return np.where(sign, -1.0, 1.0) * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


class Reader:
    """Reads the parts of consecutive matrices from a flat buffer."""

    def __init__(self, buffer: Any) -> None:
        assert buffer is not None and buffer.dim() == 1 and buffer.is_contiguous()
        self.values, self.begin = buffer.cpu().numpy(), 0

    def take(self, *shape: int) -> np.ndarray:
        end = self.begin + int(np.prod(shape))
        part = self.values[self.begin : end].reshape(shape)
        self.begin = end
        return part


def decoded(name: str, group: Any, shapes: list[tuple[int, int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(row-wise values, column-wise values) [M, K] of each matrix, in float64."""
    rows, columns = Reader(group.rowwise_data), Reader(group.columnwise_data)
    scales, scales_t = Reader(group.scale_inv), Reader(group.columnwise_scale_inv)
    found = []
    for index, (m, k) in enumerate(shapes):
        if name in ("current", "delayed"):
            scale, scale_t = scales.take(1).astype(float), scales_t.take(1).astype(float)
            found.append((e4m3(rows.take(m, k)) * scale, e4m3(columns.take(k, m)).T * scale_t))
        elif name == "mxfp8":
            scale = scales.take(up(m, 128), up(k // 32, 4))[:m, : k // 32]
            scale_t = scales_t.take(up(m // 32, 4), up(k, 128))[: m // 32, :k]
            by_row = np.repeat(2.0 ** (scale.astype(int) - 127), 32, axis=1)
            by_column = np.repeat(2.0 ** (scale_t.astype(int) - 127), 32, axis=0)
            found.append((e4m3(rows.take(m, k)) * by_row, e4m3(columns.take(m, k)) * by_column))
        elif name == "nvfp4":
            halves = [rows.take(m, k // 2), columns.take(k, m // 2)]
            scale = [scales.take(up(m, 128), up(k // 16, 4))[:m, : k // 16]]
            scale.append(scales_t.take(up(k, 128), up(m // 16, 4))[:k, : m // 16])
            maxima = (group.amax[index], group.columnwise_amax[index])
            values = []
            for packed, factors, amax in zip(halves, scale, maxima, strict=True):
                shape = (packed.shape[0], 2 * packed.shape[1])
                codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(shape)
                values.append(FP4[codes] * np.repeat(e4m3(factors), 16, axis=1) * float(amax) / (6 * 448))
            found.append((values[0], values[1].T))
        elif name == "block_1d":
            scale = scales.take(up(k, 128) // 128, up(m, 4))[:, :m].astype(float)
            scale_t = scales_t.take(up(m, 128) // 128, up(k, 4))[:, :k].astype(float)
            by_row = np.repeat(scale.T, 128, axis=1)[:, :k]
            by_column = np.repeat(scale_t, 128, axis=0)[:m]
            found.append((e4m3(rows.take(m, k)) * by_row, e4m3(columns.take(k, m)).T * by_column))
        else:
            tiles, tiles_t = up(m, 128) // 128, up(k, 128) // 128
            scale = scales.take(tiles, up(tiles_t, 4))[:, :tiles_t].astype(float)
            scale_t = scales_t.take(tiles_t, up(tiles, 4))[:, :tiles].astype(float)
            spread = [np.repeat(np.repeat(s, 128, axis=0), 128, axis=1) for s in (scale, scale_t)]
            found.append(
                (e4m3(rows.take(m, k)) * spread[0][:m, :k], (e4m3(columns.take(k, m)) * spread[1][:k, :m]).T)
            )
    return found


def tolerance(name: str, x: np.ndarray) -> np.ndarray:
    """Largest error of each element: half a step of the element in its block's scale."""
    if name == "nvfp4":  # the largest step, from 4 to 6, of the largest block; and the rounding of its scale
        return np.full(x.shape, np.abs(x).max(initial=0.0) * (1 / 6 + 1 / 16))
    least = np.abs(x).max(initial=0.0) * 2.0**-9 if name != "delayed" else 2.0**-10 / 4
    return np.maximum(np.abs(x) / 16, least) * (1 + 1e-6)


@pytest.mark.parametrize("varying", [True, False])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.sampled
def test_buffers_of_random_groups_decode_to_the_values(name, seed, varying):
    choose = random.Random(100 * list(RECIPES).index(name) + seed)
    make, multiple = RECIPES[name]
    count, k = choose.randint(1, 5), choose.choice([32, 64, 160, 256])
    if varying:
        sizes = [choose.choice([0, 16, 33, 64, 128, 160]) // multiple * multiple for _ in range(count)]
    else:
        sizes = [choose.choice([32, 64, 160])] * count
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), k, generator=generator) * choose.choice([1e-3, 1.0, 30.0])
    group = tex.group_quantize(x, make(), count, torch.tensor(sizes) if varying else None)
    matrices = [part.double().numpy() for part in x.split(sizes)]
    for (by_row, by_column), matrix in zip(
        decoded(name, group, [(m, k) for m in sizes]), matrices, strict=True
    ):
        assert matrix.size == 0 or name == "delayed" or np.abs(by_row).max() > 0.8 * np.abs(matrix).max()
        if name == "delayed":
            matrix = np.clip(matrix, -448 / 4, 448 / 4)  # the scale is that of earlier steps
        for values in (by_row, by_column):
            assert np.all(np.abs(values - matrix) <= tolerance(name, matrix)), name
    assert group.num_tensors == count and group.logical_shape == (sum(sizes), k)
