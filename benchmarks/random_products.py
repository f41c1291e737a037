"""Random MXFP8 products with the Triton kernels against float64 and the reference; writes one JSON line per case.

    PYTHONPATH=. python benchmarks/random_products.py --part 0/8 --out products.jsonl [--cases 500]

Four of five cases multiply two matrices: elements, shapes with tails and few rows, row-wise or column-wise
codes, views with longer rows, compact or swizzled scales, results in float32, bfloat16 and float16, bias, accumulation,
GELU and its gradient, codes through pointers or by TMA. The others are grouped products: output, input gradient,
weight gradient and its accumulation. Hopper computes tl.dot_scaled in bfloat16, in which MXFP8 values are exact.
--part splits the cases over processes, because most of the time is compilation. A case depends on its number alone.

"error" is the largest error relative to the summed product magnitudes, without the result's rounding; it is
2^-11 at most, as in tests/primitives/test_scaled_on_gpu.py. "equal" is the share of elements with the reference's bits.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import formats
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.kernels import grouped_scaled, launch
from transformer_engine.pytorch.primitives.activation import activation_backward, activation_forward
from transformer_engine.pytorch.primitives.gemm import Epilogue, gemm, triton
from transformer_engine.pytorch.primitives.grouped_gemm import (
    GroupedColumns,
    GroupedMatrices,
    GroupedRows,
    Matrices,
    make_groups,
)
from transformer_engine.pytorch.primitives.grouped_gemm.pieces import iterate_operands
from transformer_engine.pytorch.primitives.grouped_gemm.request import GroupedProduct
from transformer_engine.pytorch.primitives.grouped_quantize import quantize_matrices, quantize_rows
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, dequantize, quantize

ELEMENTS = {"e4m3": formats.E4M3, "e5m2": formats.E5M2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BOUND = 2.0**-11
SHAPES_PER_KERNEL = 5
# Values for the result's smaller extent; tiles have 16, 32, 64 or 128 columns.
EXTENTS = ((1, 16), (17, 32), (33, 64), (65, 200), (200, 700), (65, 700))


@dataclass(frozen=True)
class ProductCase:
    """A product [M, K] @ [N, K].T; `columnwise`: operands whose codes belong to a transposed matrix."""

    number: int
    m: int
    n: int
    k: int
    elements: tuple[str, str]
    columnwise: tuple[bool, bool]
    pitch: int
    tiled: bool
    dtype: str
    ending: str
    tma: bool


def product_case(number: int) -> ProductCase:
    """Case of a number; `SHAPES_PER_KERNEL` consecutive ones share everything but extents, and thus mostly a kernel."""
    kernel = random.Random(number // SHAPES_PER_KERNEL)
    shape = random.Random(f"shape {number}")
    low, high = kernel.choice(EXTENTS)
    sixteen = kernel.random() < 0.5
    few = shape.randint(low, high)
    few = max(16, few // 16 * 16) if sixteen else few
    many = 16 * shape.randint(5, 60) + (0 if sixteen else shape.randint(0, 15))
    many = max(few, many)
    m, n = (few, many) if kernel.random() < 0.5 else (many, few)
    k = 128 * shape.randint(1, 10) if kernel.random() < 0.4 else 32 * shape.randint(1, 40)
    ending = kernel.choice(("plain", "bias", "added", "gelu", "gelu_gradient"))
    dtype = (
        "float32" if ending == "added" and kernel.random() < 0.7 else kernel.choice(tuple(DTYPES))
    )
    return ProductCase(
        number,
        m,
        n,
        k,
        kernel.choice((("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"))),
        (kernel.random() < 0.5, kernel.random() < 0.5),
        kernel.choice((0, 0, 16, 3)),
        kernel.random() < 0.5,
        dtype,
        ending,
        kernel.random() < 0.5,
    )


def operand(case: ProductCase, side: int, device: str) -> Operand:
    """An operand [rows, K]; float16 results stay below 65504 without factors per row."""
    rows = (case.m, case.n)[side]
    by_columns = case.columnwise[side]
    values = torch.randn((case.k, rows) if by_columns else (rows, case.k), device=device)
    if case.dtype != "float16":
        exponents = torch.randint(-6, 6, (values.shape[0], 1), device=device)
        values *= torch.exp2(exponents.float())
    element = ELEMENTS[case.elements[side]]
    spec = QuantizeSpec(formats.MXFP8, element, not by_columns, by_columns, tiled=case.tiled)
    q = quantize(values.bfloat16(), spec)
    codes, scale = (q.codes_t, q.scale_t) if by_columns else (q.codes, q.scale)
    form = spec.columnwise_operand_format if by_columns else spec.operand_format
    assert codes is not None
    if case.pitch:
        wide = codes.new_empty(rows, case.k + case.pitch)
        wide[:, : case.k].copy_(codes)
        codes = wide[:, : case.k]
    return Operand(codes, scale, form, None, torch.bfloat16)


def decode_values(x: Operand) -> Tensor:
    return dequantize(x._replace(dtype=torch.float32)).double()


def product_error(result: Tensor, a: Operand, b: Operand, added: Tensor | float) -> float:
    """Largest error relative to |a| @ |b|.T, without half a unit in the result dtype's last place."""
    left, right = decode_values(a), decode_values(b)
    exact = left @ right.t() + added
    rounding = torch.finfo(result.dtype).eps * exact.abs() + torch.finfo(result.dtype).tiny
    excess = ((result.double() - exact).abs() - rounding).clamp(min=0.0)
    error = float((excess / (left.abs() @ right.abs().t()).clamp(min=1e-30)).max())
    return error if bool(result.isfinite().all()) else float("inf")


def run_product(case: ProductCase, device: str) -> dict[str, Any]:
    """Errors in a product, its activation and the elements next to its result."""
    a, b = operand(case, 0, device), operand(case, 1, device)
    dtype, m, n = DTYPES[case.dtype], case.m, case.n
    bias = torch.randn(n, device=device).bfloat16() if case.ending in ("bias", "gelu") else None
    wide = torch.full((m, n + 16), 3.0, device=device, dtype=dtype)
    found: dict[str, Any] = {}
    if case.ending == "added":
        epilogue = Epilogue(dtype, None, wide[:, :n], True)
        result, added = triton.run_scaled(a, b, epilogue, tma=case.tma), 3.0
        found["outside"] = int((wide[:, n:] != 3.0).sum())
    else:
        epilogue, added = Epilogue(dtype, bias), 0.0 if bias is None else bias.double()
        result = triton.run_scaled(a, b, epilogue, tma=case.tma)
        with use_backend(gemm="reference"):
            expected = gemm(a, b, epilogue)
        found["equal"] = float((expected == result).float().mean())
    found["error"] = product_error(result, a, b, added)
    if case.ending == "gelu":
        saved = torch.empty(m, n, device=device, dtype=dtype)
        activation = triton.Activation("gelu", None, saved)
        y = triton.run_scaled(a, b, epilogue, activation, tma=case.tma)
        found["kept differs"] = int((saved != result).sum())
        found["activation differs"] = differing(y, activation_forward("gelu", result))
    if case.ending == "gelu_gradient":
        x = torch.randn(m, n, device=device).to(dtype)
        dx = triton.run_scaled(a, b, epilogue, triton.Activation("gelu_gradient", x), tma=case.tma)
        found["activation differs"] = differing(dx, activation_backward("gelu", result, x))
    return found


def differing(result: Tensor, expected: Tensor) -> int:
    """Elements that differ by more than a rounding of the product to the result's dtype before the activation."""
    bound = 4 * torch.finfo(result.dtype).eps * expected.double().abs() + 1e-5 * float(
        expected.abs().max()
    )
    return int(((result.double() - expected.double()).abs() > bound).sum())


@dataclass(frozen=True)
class GroupsCase:
    """Grouped row products; four consecutive cases are the four products for one set of groups."""

    number: int
    splits: tuple[int, ...]
    n: int
    k: int
    product: str
    dtype: str
    tma: bool


def groups_case(number: int) -> GroupsCase:
    generator = random.Random(f"groups {number // 4}")
    kernel = random.Random(f"groups {number // 20}")
    count = kernel.choice((4, 7))
    splits = [32 * generator.choice((0, 1, 2, 3, 5, 9)) for _ in range(count)]
    splits[generator.randrange(count)] = 0
    splits[generator.randrange(count)] += 32
    n, k = (32 * generator.randint(2, 12) for _ in "nk")
    product = ("output", "input gradient", "weight gradient", "added weight gradient")[number % 4]
    dtype = "float32" if product.startswith("added") else kernel.choice(("float32", "bfloat16"))
    return GroupsCase(number, tuple(splits), n, k, product, dtype, kernel.random() < 0.5)


def run_groups(case: GroupsCase, device: str) -> dict[str, Any]:
    """One product's error over all groups, and the rows in empty groups."""
    n, k, count, total, wrong = case.n, case.k, len(case.splits), sum(case.splits), 0
    current = torch.device(device)
    groups = make_groups(case.splits, total, current)
    by_rows = replace(QuantizeSpec(formats.MXFP8, formats.E4M3), columnwise=True)
    gradient = replace(by_rows, element=formats.E5M2)
    x = quantize_rows(torch.randn(total, k, device=device).bfloat16(), groups, by_rows)
    dy = quantize_rows(torch.randn(total, n, device=device).bfloat16(), groups, gradient)
    weights = Matrices.of([torch.randn(n, k, device=device).bfloat16() for _ in case.splits])
    w = quantize_matrices(weights, by_rows)
    form, dtype, length = formats.MXFP8, DTYPES[case.dtype], formats.MXFP8.length
    if case.product in ("output", "input gradient"):
        forward = case.product == "output"
        elements, width, depth = (
            ("e4m3" if forward else "e5m2", "e4m3"),
            *((n, k) if forward else (k, n)),
        )
        q = x if forward else dy
        left: Any = GroupedRows(q.codes, q.scale, form, q.amax)
        codes, scale = (w.codes, w.scale) if forward else (w.codes_t, w.scale_t)
        right: Any = GroupedMatrices(None, False, codes, scale, form, w.amax)
        bias = torch.randn(count, n, device=device) if forward else None
        out: Any = torch.full((total, width), 7.0, device=device, dtype=dtype)
        scales = grouped_scaled.BlockScales(elements, length, None, False)
        record = grouped_scaled.product_of_rows(total, width, depth, count, scales, tma=case.tma)
        inputs = (left.codes, right.codes, groups.layout, left.scale, right.scale, None, None, bias)
        launch.start(record, (*inputs, out), 0)
        extents, offsets = (width, depth), [0.0] * count if bias is None else list(bias.double())
        parts = out
    else:
        left = GroupedColumns(dy.codes_t, dy.scale_t, form, dy.amax_t)
        right = GroupedColumns(x.codes_t, x.scale_t, form, x.amax_t)
        scales = grouped_scaled.BlockScales(("e5m2", "e4m3"), length, None, False)
        adds = case.product.startswith("added")
        record = grouped_scaled.product_of_columns(
            total, n, k, count, scales, tma=case.tma, accumulates=adds, by_address=adds
        )
        members = [torch.full((n, k), 2.0, device=device, dtype=dtype) for _ in range(count)]
        parts = torch.full((count, n, k), 7.0, device=device, dtype=dtype)
        addresses = torch.tensor([member.data_ptr() for member in members], device=device)
        inputs = (left.codes, right.codes, left.scale, right.scale, None, None, groups.layout)
        inputs = (*inputs, addresses if adds else None)
        launch.start(record, (*inputs, members[0] if adds else parts), 0)
        parts = torch.stack(members) if adds else parts
        extents, offsets = (n, k), [2.0 if adds else 0.0] * count
        empty = [part for part, rows in zip(parts, case.splits, strict=True) if not rows]
        wrong = sum(int((part != offsets[0]).sum()) for part in empty)
    each = iterate_operands(GroupedProduct(left, right, groups, extents, parts))
    errors = [
        product_error(result, a, b, offset)
        for (rows, a, b, result), offset in zip(each, offsets, strict=True)
        if rows
    ]
    return {"error": max(errors), "empty groups differ": wrong}


def passes(found: dict[str, Any]) -> bool:
    """Whether errors are within the bound and all difference counts are zero."""
    counts = [value for name, value in found.items() if name not in ("error", "equal")]
    return found["error"] <= BOUND and not any(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--out", default="products.jsonl")
    parser.add_argument("--device", default="cuda")
    chosen = parser.parse_args()
    part, parts = map(int, chosen.part.split("/"))
    products = chosen.cases * 4 // 5
    failed = ran = 0
    # All cases for one kernel belong to one part.
    numbers = [i for i in range(products) if i // SHAPES_PER_KERNEL % parts == part]
    grouped = [i for i in range(chosen.cases - products) if i // 20 % parts == part]
    with open(chosen.out, "a", encoding="utf-8") as file:
        for kind, number in [("groups", i) for i in grouped] + [("product", i) for i in numbers]:
            torch.manual_seed(number)
            case = product_case(number) if kind == "product" else groups_case(number)
            try:
                if isinstance(case, ProductCase):
                    found = run_product(case, chosen.device)
                else:
                    found = run_groups(case, chosen.device)
                passed = passes(found)
            except Exception as error:  # a failure is a result
                found, passed = {"raised": f"{type(error).__name__}: {error}"[:400]}, False
            failed, ran = failed + (not passed), ran + 1
            print(json.dumps([kind, asdict(case), found, passed]), file=file, flush=True)
    print(json.dumps({"part": chosen.part, "cases": ran, "failed": failed}))


if __name__ == "__main__":
    main()
