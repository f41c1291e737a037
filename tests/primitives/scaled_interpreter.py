"""Run the kernels of block-scaled products in Triton's interpreter, compare with float64, print {case: error} as JSON.

Errors are multiples of the sum of the products' magnitudes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.kernels import dot_scaled, interpreter
from transformer_engine.common import formats
from transformer_engine.common.kernels import grouped_scaled, launch, swizzled_scales
from transformer_engine.pytorch.primitives.activation import activation_backward, activation_forward
from transformer_engine.pytorch.primitives.gemm import Epilogue, triton
from transformer_engine.pytorch.primitives.gemm.swizzle import swizzled_scale
from transformer_engine.pytorch.primitives.grouped_gemm import (
    GroupedColumns,
    GroupedMatrices,
    GroupedRows,
    Matrices,
    groups_of,
    reference,
)
from transformer_engine.pytorch.primitives.grouped_gemm.request import GroupedProduct
from transformer_engine.pytorch.primitives.grouped_quantize import quantize_matrices, quantize_rows
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, dequantize, quantize
from transformer_engine.pytorch.primitives.scale_order import swizzled

MXFP8 = QuantizeSpec(formats.MXFP8, formats.E4M3)
GRADIENT = QuantizeSpec(formats.MXFP8, formats.E5M2)
NVFP4 = QuantizeSpec(formats.NVFP4, formats.E2M1)
NVFP4_ROWS = QuantizeSpec(formats.NVFP4_ROWS, formats.E2M1)
BLOCK_1D = QuantizeSpec(formats.BLOCK_1D, formats.E4M3)
BLOCK_1D_GRADIENT = QuantizeSpec(formats.BLOCK_1D, formats.E5M2)
BLOCK_2D = QuantizeSpec(formats.BLOCK_2D, formats.E4M3)
POWERS_1D, GRADIENT_POWERS, POWERS_2D = (
    dataclasses.replace(spec, power_of_two=True) for spec in (BLOCK_1D, BLOCK_1D_GRADIENT, BLOCK_2D)
)
# name: specs of both operands, M, N, K
CASES = {
    "mxfp8": (MXFP8, MXFP8, 130, 144, 256),
    "mxfp8 tails": (MXFP8, MXFP8, 131, 77, 160),
    "mxfp8 swapped": (MXFP8, MXFP8, 5, 200, 96),
    "mxfp8 few columns": (MXFP8, MXFP8, 200, 33, 128),
    "mxfp8 e5m2": (GRADIENT, MXFP8, 65, 130, 384),
    "nvfp4": (NVFP4, NVFP4, 128, 128, 256),
    "nvfp4 tails": (NVFP4, NVFP4, 131, 80, 352),
    "nvfp4 swapped": (NVFP4, NVFP4, 20, 144, 64),
    "nvfp4 rows": (NVFP4_ROWS, NVFP4, 140, 144, 64),
    "nvfp4 rows swapped": (NVFP4_ROWS, NVFP4, 20, 144, 64),
    "block 1d x 2d": (BLOCK_1D, BLOCK_2D, 130, 140, 256),
    "block 1d x 1d": (BLOCK_1D, BLOCK_1D, 129, 130, 300),
    "block 2d x 1d": (BLOCK_2D, BLOCK_1D_GRADIENT, 150, 64, 256),
    "block 2d x 2d": (BLOCK_2D, BLOCK_2D, 200, 150, 130),
    "block swapped": (BLOCK_1D, BLOCK_2D, 3, 140, 256),
    "decoded 1d x 2d": (BLOCK_1D, BLOCK_2D, 130, 140, 300),
    "decoded 1d x 1d": (BLOCK_1D_GRADIENT, BLOCK_1D, 129, 64, 256),
    "decoded swapped": (BLOCK_1D, BLOCK_2D, 3, 140, 256),
    "exponents 1d x 2d": (POWERS_1D, POWERS_2D, 130, 140, 256),
    "exponents 1d x 1d": (POWERS_1D, POWERS_1D, 129, 130, 300),
    "exponents 2d x 1d": (POWERS_2D, GRADIENT_POWERS, 150, 64, 256),
    "exponents 2d x 2d": (POWERS_2D, POWERS_2D, 200, 150, 130),
    "exponents swapped": (POWERS_1D, POWERS_2D, 3, 140, 256),
}  # fmt: skip


def operand(spec: QuantizeSpec, rows: int, depth: int) -> Operand:
    values = torch.randn(rows, depth) * torch.exp2(torch.randint(-6, 6, (rows, 1)).float())
    q = quantize(values.bfloat16(), spec)
    assert q.codes is not None
    return Operand(q.codes, q.scale, spec.operand_format, q.amax, torch.bfloat16)


def error(out: torch.Tensor, a: Operand, b: Operand, added: torch.Tensor | float) -> float:
    left, right = (dequantize(x._replace(dtype=torch.float32)).double() for x in (a, b))
    bound = left.abs() @ right.abs().t() + 1.0
    return float(((out.double() - left @ right.t() - added).abs() / bound).max())


def products(
    name: str, spec_a: QuantizeSpec, spec_b: QuantizeSpec, m: int, n: int, k: int
) -> dict[str, float]:
    a, b = operand(spec_a, m, k), operand(spec_b, n, k)
    special = {"block": triton.run_blocks, "exponents": triton.run_exponents, "decoded": triton.run_decoded}
    run: Callable[..., torch.Tensor] = special.get(name.partition(" ")[0], triton.run_scaled)
    bias = torch.randn(n).bfloat16()
    results = {name: error(run(a, b, Epilogue(torch.float32, bias)), a, b, bias.double())}
    wide = torch.full((m, n + 3), 2.0)
    out = wide[:, :n]
    run(a, b, Epilogue(torch.float32, out=out, accumulate=True))
    results[f"{name}, added"] = error(out, a, b, 2.0)
    results[f"{name}, behind"] = float((wide[:, n:] != 2.0).sum())
    if name.startswith("decoded"):
        return results
    # GELU of the rounded product, which is kept, and its gradient at another matrix.
    narrow, kept, x = (
        Epilogue(torch.bfloat16, bias),
        torch.empty(m, n).bfloat16(),
        torch.randn(m, n).bfloat16(),
    )
    y = run(a, b, narrow, triton.Activation("gelu", None, kept))
    dx = run(a, b, narrow, triton.Activation("gelu_gradient", x))
    results[f"{name}, kept"] = float((kept != run(a, b, narrow)).sum())
    expected = activation_forward("gelu", kept), activation_backward("gelu", kept, x)
    for found, exact in zip((y, dx), expected, strict=True):
        difference = (found.float() - exact.float()).abs() - 2.0**-7 * exact.float().abs() - 1e-6
        results[f"{name}, kept"] += float((difference > 0).sum())
    return results


def orders() -> dict[str, float]:
    """Differences of swizzled scales and of their reverse from the functions on a CPU."""
    found = {}
    for rows, columns in ((128, 4), (300, 18), (1, 1), (129, 40)):
        scale = torch.randint(1, 256, (columns, rows), dtype=torch.uint8).t()
        result = torch.full((swizzled_scales.swizzled_bytes(rows, columns),), 7, dtype=torch.uint8)
        launch.start(
            swizzled_scales.swizzle(rows, columns, (scale.stride(0), scale.stride(1))), (scale, result), -1
        )
        found[f"order {rows} x {columns}"] = float((result != swizzled(scale).flatten()).sum())
        back = torch.zeros(rows * columns, dtype=torch.uint8)
        launch.start(swizzled_scales.swizzle(rows, columns, (columns, 1), True), (result, back), -1)
        found[f"order back {rows} x {columns}"] = float((back.view(rows, columns) != scale).sum())
    for spec, rows, depth in ((POWERS_1D, 130, 300), (POWERS_2D, 300, 160)):
        x = operand(spec, rows, depth)
        assert x.scale is not None and x.format is not None and x.format.block is not None
        x.scale.view(-1)[0] = 2.0**-127
        expected = swizzled_scale(x)
        record = swizzled_scales.swizzle_exponents(rows, -(-depth // 32), x.scale.stride(), x.format.block[0])  # pyright: ignore
        result = torch.full((expected.numel(),), 7, dtype=torch.uint8)
        launch.start(record, (x.scale, result), -1)
        found[f"order of exponents {x.format.name}"] = float((result != expected.flatten()).sum())
    return found


def grouped() -> dict[str, float]:
    """Errors of grouped products of MXFP8 codes, as multiples of the sum of the products' magnitudes."""
    splits, n, k = (32, 160, 0, 96, 288), 160, 224
    groups = groups_of(splits, sum(splits), torch.device("cpu"))
    x, dy = torch.randn(sum(splits), k).bfloat16(), torch.randn(sum(splits), n).bfloat16()
    weights = Matrices.of([torch.randn(n, k).bfloat16() for _ in splits])
    sides = [
        quantize_rows(values, groups, dataclasses.replace(spec, columnwise=True))
        for values, spec in ((x, MXFP8), (dy, GRADIENT))
    ]
    matrices = quantize_matrices(weights, dataclasses.replace(MXFP8, columnwise=True))
    rows = [GroupedRows(side.codes, side.scale, formats.MXFP8) for side in sides]  # pyright: ignore
    columns = [GroupedColumns(side.codes_t, side.scale_t, formats.MXFP8) for side in sides]  # pyright: ignore
    of_rows = GroupedMatrices(None, False, matrices.codes, matrices.scale, formats.MXFP8)
    of_columns = GroupedMatrices(None, False, matrices.codes_t, matrices.scale_t, formats.MXFP8)
    bias = torch.randn(len(splits), n)
    y, dx = torch.full((sum(splits), n), 7.0), torch.full((sum(splits), k), 7.0)
    dw, members = torch.full((len(splits), n, k), 7.0), [torch.ones(n, k) for _ in splits]
    count, shape = len(splits), (sum(splits), n, k, len(splits))
    inputs = [(part.codes, part.scale) for part in (*rows, *columns, of_rows, of_columns)]
    a, grads, a_t, grads_t, b, b_t = inputs
    address = torch.tensor([member.data_ptr() for member in members])
    start = launch.start
    start(
        grouped_scaled.product_of_rows(*shape, ("e4m3", "e4m3")),
        (a[0], b[0], groups.layout, a[1], b[1], bias, y),
        -1,
    )
    start(
        grouped_scaled.product_of_rows(shape[0], k, n, count, ("e5m2", "e4m3")),
        (grads[0], b_t[0], groups.layout, grads[1], b_t[1], None, dx),
        -1,
    )
    kinds = ("e5m2", "e4m3")
    ends = (grads_t[0], a_t[0], grads_t[1], a_t[1], groups.layout)
    start(grouped_scaled.product_of_columns(*shape, kinds), (*ends, None, dw), -1)
    added = grouped_scaled.product_of_columns(*shape, kinds, accumulates=True, by_address=True)
    start(added, (*ends, address, members[0]), -1)
    products = {
        "y": (y, rows[0], of_rows, (n, k), bias),
        "dx": (dx, rows[1], of_columns, (k, n), None),
        "dw": (dw, columns[1], columns[0], (n, k), None),
        "dw added": (torch.stack(members) - 1, columns[1], columns[0], (n, k), None),
    }
    found = {}
    for name, (out, left, right, extents, added_bias) in products.items():
        expected = torch.empty_like(out)
        reference.run(GroupedProduct(left, right, groups, extents, expected, added_bias))
        found[f"grouped {name}"] = float(((out - expected).abs() / (1.0 + expected.abs())).max())
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    interpreter.repair()
    dot_scaled.install()
    results = orders() | grouped()
    for name, case in CASES.items():
        results |= products(name, *case)
    print(json.dumps(results))
