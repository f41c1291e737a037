"""Every cast's launches on a simulated GPU, for sizes that are and are not multiples of the tiles.

Layers pass even sizes to most casts. Predicated accesses need more registers and address arithmetic than plain ones, so
that a kernel without stack on even sizes may spill on others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.support import quantized
from transformer_engine.common.formats import FLOAT8, MXFP8, NVFP4
from transformer_engine.pytorch.primitives import activation, column_sums, grouped_quantize, norm
from transformer_engine.pytorch.primitives.grouped_gemm import Matrices, make_groups
from transformer_engine.pytorch.primitives.quantize import Cast, QuantizeSpec, quantize

# Multiples of all tiles; of 8; an odd number of rows, whose codes are not stored in pairs; odd columns; of 16.
SHAPES = ((1024, 1024), (1000, 1000), (1001, 1000), (1000, 1001), (1008, 1008))
# Two codes of NVFP4 share a byte, and a Hadamard transform takes 16 rows.
PACKED, TRANSFORMED = ((1024, 1024), (1002, 1002), (1008, 1008)), ((1024, 1024), (1008, 1008))
DTYPES = (torch.bfloat16, torch.float32)
GROUPS = 4


def specs() -> list[QuantizeSpec]:
    """Every quantization in both directions and in rows alone, with scales in rows and in swizzled order."""
    both = list(quantized.SPECS.values())
    both += [replace(spec, tiled=True) for spec in both if spec.format in (MXFP8, NVFP4)]
    return both + [replace(spec, columnwise=False) for spec in both if not spec.hadamard]


def _input(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def _quantize(spec: QuantizeSpec, rows: int, depth: int, dtype: torch.dtype) -> None:
    x = _input(rows, depth, dtype=dtype)
    random = (torch.empty_like(x, dtype=torch.float32), _input(depth, rows, dtype=torch.float32))
    quantize(x, spec, random=random if spec.stochastic else None)


def _fused(spec: QuantizeSpec, rows: int, depth: int) -> None:
    """Casts within norm, activation and column-sum kernels."""
    x, pair, vector = _input(rows, depth), _input(rows, 2 * depth), _input(depth)
    scale = torch.ones(1, dtype=torch.float32, device="cuda")
    casts = [Cast(spec)]
    if spec.format == FLOAT8:
        casts.append(Cast(spec, scale, torch.zeros_like(scale)))
    for cast in casts:
        norm.rmsnorm_forward(x, vector, 1e-5, False, cast)
        activation.activation_forward("gelu", x, activation.DEFAULT_PARAMS, cast)
        activation.activation_forward("swiglu", pair, activation.DEFAULT_PARAMS, cast)
        activation.activation_backward("gelu", x, x, activation.DEFAULT_PARAMS, cast)
        activation.activation_backward("swiglu", x, pair, activation.DEFAULT_PARAMS, cast)
        column_sums.column_sums(x, torch.bfloat16, cast)


def _grouped(spec: QuantizeSpec, rows: int, depth: int) -> None:
    x = _input(GROUPS * rows, depth)
    if spec.format.name in ("float8", "block1d"):
        grouped_quantize.quantize_rows(
            x, make_groups([rows] * GROUPS, GROUPS * rows, x.device), spec
        )
    if spec.format.name in ("float8", "block2d", "mxfp8"):
        grouped_quantize.quantize_matrices(Matrices.of(list(x.split(rows))), spec)


def run() -> None:
    """Call every cast; the process's simulation records its launches."""
    for spec in specs():
        shapes = TRANSFORMED if spec.hadamard else PACKED if spec.format == NVFP4 else SHAPES
        for rows, depth in shapes:
            for dtype in DTYPES:
                _quantize(spec, rows, depth, dtype)
            if not spec.stochastic:
                _fused(spec, rows, depth)
            _grouped(spec, rows, depth)
