"""Quantizations in every format as specs, samples for them, and bitwise comparison."""

from __future__ import annotations

import torch

from transformer_engine.common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    MXFP8,
    NVFP4,
)
from transformer_engine.pytorch.primitives.quantize import Quantized, QuantizeSpec

# Both directions for each format and its variants.
SPECS = {
    "float8": QuantizeSpec(FLOAT8, E4M3, columnwise=True),
    "block1d": QuantizeSpec(BLOCK_1D, E4M3, columnwise=True, power_of_two=True),
    "block2d": QuantizeSpec(BLOCK_2D, E5M2, columnwise=True, power_of_two=True),
    "block2d-float32-scale": QuantizeSpec(BLOCK_2D, E4M3, columnwise=True),
    "mxfp8": QuantizeSpec(MXFP8, E4M3, columnwise=True),
    "mxfp8-2d": QuantizeSpec(MXFP8, E4M3, columnwise=True, two_dimensional=True),
    "nvfp4": QuantizeSpec(NVFP4, E2M1, columnwise=True),
    "nvfp4-hadamard": QuantizeSpec(NVFP4, E2M1, columnwise=True, hadamard=True),
    "nvfp4-2d": QuantizeSpec(NVFP4, E2M1, columnwise=True, two_dimensional=True),
    "nvfp4-stochastic": QuantizeSpec(NVFP4, E2M1, columnwise=True, hadamard=True, stochastic=True),
}


def sample(
    rows: int, depth: int, device: torch.device | str, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """x [rows, depth] ~ N(0, 1), the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, depth, generator=generator).to(device, dtype)


def uniform(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers for stochastic rounding of x and its transpose."""
    generator = torch.Generator().manual_seed(1)
    u = torch.rand(x.shape, generator=generator)
    return u.to(x.device), torch.rand(x.shape[::-1], generator=generator).to(x.device)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 view of a contiguous copy: contiguous() itself keeps the strides along an axis of size 1."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same(actual: Quantized, expected: Quantized) -> None:
    """The same fields, dtypes and bits."""
    for field, a, b in zip(Quantized._fields, actual, expected, strict=True):
        assert (a is None) == (b is None), field
        if a is not None and b is not None:
            assert a.dtype == b.dtype and torch.equal(raw(a), raw(b)), field
