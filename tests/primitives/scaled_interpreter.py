"""Run block-scaled product kernels in Triton's interpreter, compare with float64, print {case: error} as JSON.

Errors are in units of the products' summed magnitudes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.kernels import dot_scaled, interpreter
from transformer_engine.common import formats
from transformer_engine.common.kernels import grouped_scaled, launch, swizzled_scales
from transformer_engine.pytorch.primitives.activation import activation_backward, activation_forward
from transformer_engine.pytorch.primitives.gemm import Epilogue, triton
from transformer_engine.pytorch.primitives.gemm.swizzle import swizzle_operand_scale
from transformer_engine.pytorch.primitives.grouped_gemm import (
    GroupedColumns,
    GroupedMatrices,
    GroupedRows,
    Matrices,
    make_groups,
)
from transformer_engine.pytorch.primitives.grouped_gemm.pieces import iterate_operands
from transformer_engine.pytorch.primitives.grouped_gemm.request import GroupedProduct
from transformer_engine.pytorch.primitives.grouped_quantize import (
    GroupedQuantized,
    quantize_matrices,
    quantize_matrices_separately,
    quantize_rows,
    quantize_rows_separately,
)
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
# name: specs for both operands, M, N, K
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
    special = {
        "block": triton.run_blocks,
        "exponents": triton.run_exponents,
        "decoded": triton.run_decoded,
    }
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
    # GELU on the rounded product, which is saved, and its gradient at another matrix.
    narrow, saved, x = (
        Epilogue(torch.bfloat16, bias),
        torch.empty(m, n).bfloat16(),
        torch.randn(m, n).bfloat16(),
    )
    y = run(a, b, narrow, triton.Activation("gelu", None, saved))
    dx = run(a, b, narrow, triton.Activation("gelu_gradient", x))
    results[f"{name}, kept"] = float((saved != run(a, b, narrow)).sum())
    expected = activation_forward("gelu", saved), activation_backward("gelu", saved, x)
    for actual, exact in zip((y, dx), expected, strict=True):
        difference = (actual.float() - exact.float()).abs() - 2.0**-7 * exact.float().abs() - 1e-6
        results[f"{name}, kept"] += float((difference > 0).sum())
    return results


def compare_tma(
    name: str, spec_a: QuantizeSpec, spec_b: QuantizeSpec, m: int, n: int, k: int
) -> dict[str, float]:
    """Elements in which results by TMA differ from results through pointers, for each epilogue."""
    a, b = operand(spec_a, m, k), operand(spec_b, n, k)
    bias, x = torch.randn(n).bfloat16(), torch.randn(m, n).bfloat16()
    collected = {}
    for ending in ("bias", "added", "gelu", "gelu_gradient"):
        results = []
        kernels.clear()
        for tma in (False, True):
            wide, saved = torch.full((m, n + 16), 2.0), torch.full((m, n), 2.0).bfloat16()
            if ending == "added":
                triton.run_scaled(
                    a, b, Epilogue(torch.float32, out=wide[:, :n], accumulate=True), tma=tma
                )
            else:
                activation = {
                    "gelu": triton.Activation("gelu", None, saved),
                    "gelu_gradient": triton.Activation("gelu_gradient", x),
                }.get(ending, triton.NO_ACTIVATION)
                dtype = torch.float32 if ending == "bias" else torch.bfloat16
                result = triton.run_scaled(a, b, Epilogue(dtype, bias), activation, tma=tma)
                results.append(result.float())
            results += [wide, saved.float()]
        half = len(results) // 2
        different = sum((x != y).sum() for x, y in zip(results[:half], results[half:], strict=True))
        collected[f"copied {name}, {ending}"] = float(different)
        collected[f"copied {name}, {ending} kernels"] = float(
            kernels != ["product_kernel", "tma_product_kernel"]
        )
    return collected


# M, N and K for TMA products; the last one has result rows that it does not store.
COPIED = {
    "mxfp8": (MXFP8, MXFP8, 140, 144, 256),
    "mxfp8 tails": (GRADIENT, MXFP8, 131, 136, 160),
    "mxfp8 swapped": (MXFP8, MXFP8, 5, 200, 96),
    "nvfp4": (NVFP4, NVFP4, 130, 144, 256),
    "nvfp4 tails": (NVFP4_ROWS, NVFP4, 131, 80, 352),
    "nvfp4 swapped": (NVFP4, NVFP4, 20, 144, 64),
    "mxfp8 odd": (MXFP8, MXFP8, 67, 77, 160),
}
kernels: list[str] = []  # names of the launched products


def record_kernels() -> None:
    """Append the names of launched products to `kernels`."""
    start = launch.start

    def start_recorded(record: Any, *rest: Any) -> Any:
        if "product" in record.kernel.fn.__name__:
            kernels.append(record.kernel.fn.__name__)
        return start(record, *rest)

    launch.start = start_recorded


def orders() -> dict[str, float]:
    """Differences between swizzled scales, in both directions, and the CPU functions."""
    results = {}
    for rows, columns in ((128, 4), (300, 18), (1, 1), (129, 40)):
        scale = torch.randint(1, 256, (columns, rows), dtype=torch.uint8).t()
        result = torch.full((swizzled_scales.swizzled_size(rows, columns),), 7, dtype=torch.uint8)
        launch.start(
            swizzled_scales.swizzle(rows, columns, (scale.stride(0), scale.stride(1))),
            (scale, result),
            -1,
        )
        results[f"order {rows} x {columns}"] = float((result != swizzled(scale).flatten()).sum())
        back = torch.zeros(rows * columns, dtype=torch.uint8)
        launch.start(swizzled_scales.swizzle(rows, columns, (columns, 1), True), (result, back), -1)
        results[f"order back {rows} x {columns}"] = float((back.view(rows, columns) != scale).sum())
    for spec, rows, depth in ((POWERS_1D, 130, 300), (POWERS_2D, 300, 160)):
        x = operand(spec, rows, depth)
        assert x.scale is not None and x.format is not None and x.format.block is not None
        x.scale.view(-1)[0] = 2.0**-127
        expected = swizzle_operand_scale(x)
        record = swizzled_scales.swizzle_exponents(
            rows, -(-depth // 32), x.scale.stride(), x.format.block[0]
        )  # pyright: ignore
        result = torch.full((expected.numel(),), 7, dtype=torch.uint8)
        launch.start(record, (x.scale, result), -1)
        results[f"order of exponents {x.format.name}"] = float((result != expected.flatten()).sum())
    return results


def grouped(
    name: str, of_rows: QuantizeSpec, of_gradients: QuantizeSpec, splits: tuple[int, ...]
) -> dict[str, float]:
    """Product errors per group."""
    n, k, count, total = 160, 224, len(splits), sum(splits)
    groups = make_groups(splits, total, torch.device("cpu"))
    x, dy = torch.randn(total, k).bfloat16(), torch.randn(total, n).bfloat16()
    weights = Matrices.of([torch.randn(n, k).bfloat16() for _ in splits])
    levels = of_rows.format.levels is not None

    def quantized(values: Any, spec: QuantizeSpec) -> GroupedQuantized:
        spec = dataclasses.replace(spec, columnwise=True)
        if isinstance(values, Matrices):
            return (
                quantize_matrices_separately(values, spec, quantize)
                if levels
                else quantize_matrices(values, spec)
            )
        return (
            quantize_rows_separately(values, groups, spec, quantize)
            if levels
            else quantize_rows(values, groups, spec)
        )

    sides = [(quantized(values, spec), spec) for values, spec in ((x, of_rows), (dy, of_gradients))]
    form = of_rows.format.columnwise
    matrices = quantized(weights, of_gradients if levels else of_rows)
    rows = [GroupedRows(q.codes, q.scale, spec.format, q.amax) for q, spec in sides]  # pyright: ignore
    columns = [GroupedColumns(q.codes_t, q.scale_t, form, q.amax_t) for q, _ in sides]  # pyright: ignore
    b = GroupedMatrices(
        matrices=None,
        transposed=False,
        codes=matrices.codes,
        scale=matrices.scale,
        format=form,
        amax=matrices.amax,
    )
    b_t = GroupedMatrices(
        matrices=None,
        transposed=False,
        codes=matrices.codes_t,
        scale=matrices.scale_t,
        format=form,
        amax=matrices.amax_t,
    )
    bias = torch.randn(count, n)
    y, dx = torch.full((total, n), 7.0), torch.full((total, k), 7.0)
    dw, members = torch.full((count, n, k), 7.0), [torch.ones(n, k) for _ in splits]
    address = torch.tensor([member.data_ptr() for member in members])
    unit = form.unit_amax
    factor = None if unit is None else 1.0 / (unit * unit)

    def scales(left: GroupedRows | GroupedColumns, right: GroupedMatrices | GroupedColumns):
        elements = [ELEMENTS[operand.codes.dtype] for operand in (left, right)]  # pyright: ignore
        assert left.format is not None
        return grouped_scaled.BlockScales(
            (elements[0], elements[1]), form.length, factor, left.format.row_scaled
        )

    different = 0
    for out, left, right, added in ((y, rows[0], b, bias), (dx, rows[1], b_t, None)):
        shape = (total, out.shape[1], k + n - out.shape[1], count, scales(left, right))
        factors = (left.scale, right.scale, left.amax, right.amax)
        by_tma = out.clone()
        for tma, result in ((False, out), (True, by_tma)):
            record = grouped_scaled.product_of_rows(*shape, tma=tma)
            launch.start(
                record, (left.codes, right.codes, groups.layout, *factors, added, result), -1
            )
        different += int((by_tma != out).sum())
    left, right = columns[1], columns[0]
    inputs = (
        left.codes,
        right.codes,
        left.scale,
        right.scale,
        left.amax,
        right.amax,
        groups.layout,
    )
    shape = (total, n, k, count, scales(left, right))
    by_tma = dw.clone()
    for tma, result in ((False, dw), (True, by_tma)):
        record = grouped_scaled.product_of_columns(*shape, tma=tma)
        launch.start(record, (*inputs, None, result), -1)
    different += int((by_tma != dw).sum())
    added = grouped_scaled.product_of_columns(*shape, accumulates=True, by_address=True)
    launch.start(added, (*inputs, address, members[0]), -1)
    products = {
        "y": (y, rows[0], b, (n, k), bias),
        "dx": (dx, rows[1], b_t, (k, n), None),
        "dw": (dw, left, right, (n, k), None),
        "dw added": (torch.stack(members) - 1, left, right, (n, k), None),
    }
    results = {}
    for product, (out, a, other, extents, of_groups) in products.items():
        offsets = [0.0] * count if of_groups is None else list(of_groups.double())
        each = iterate_operands(GroupedProduct(a, other, groups, extents, out))
        errors = [
            error(part, left, right, offset)
            for (rows_of_group, left, right, part), offset in zip(each, offsets, strict=True)
            if rows_of_group
        ]
        results[f"grouped {name} {product}"] = max(errors)
    # Gradient for a group without rows.
    empty = splits.index(0)
    results[f"grouped {name} by TMA"] = different
    results[f"grouped {name} empty"] = float(
        dw[empty].abs().max() + (members[empty] - 1).abs().max()
    )
    return results


ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.uint8: "e2m1"}
GROUPED = {
    "mxfp8": (MXFP8, GRADIENT, (32, 160, 0, 96, 288)),
    "nvfp4": (NVFP4, NVFP4, (32, 160, 0, 96, 288)),
    "nvfp4 rows": (NVFP4_ROWS, NVFP4, (64, 0, 160)),
}


if __name__ == "__main__":
    torch.manual_seed(0)
    interpreter.repair()
    dot_scaled.install()
    record_kernels()
    results = orders()
    for name, case in COPIED.items():
        results |= compare_tma(name, *case)
    for name, case in GROUPED.items():
        results |= grouped(name, *case)
    for name, case in CASES.items():
        results |= products(name, *case)
    print(json.dumps(results))
