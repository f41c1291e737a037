"""Run the grouped kernels in Triton's interpreter, compare with the reference, print {case: equal} as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.kernels import interpreter
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, E4M3, E5M2, FLOAT8, MXFP8
from transformer_engine.common.kernels import grouped_gemm as kernels
from transformer_engine.common.kernels import grouped_layout, launch
from transformer_engine.pytorch.primitives.grouped_gemm import Matrices, make_groups
from transformer_engine.pytorch.primitives.grouped_quantize import (
    GroupedQuantizeRequest,
    ScaleSlots,
    reference,
    triton,
)
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec

SPLITS = (3, 131, 0, 70)
DEPTH = 144


def matrix_table(tensors: list[torch.Tensor]) -> Matrices:
    addresses = [tensor.data_ptr() for tensor in tensors]
    return Matrices(tuple(tensors), torch.tensor(addresses, dtype=torch.int64))


def slots() -> ScaleSlots:
    return ScaleSlots(torch.arange(1.0, 13.0), torch.zeros(2, 12), 3, 2)


def quantized(
    name: str, spec: QuantizeSpec, values, groups, tiled: bool = False
) -> dict[str, bool]:
    """Compare the kernels' codes, scales and recorded maxima with a loop over groups."""
    ours, original = (slots(), slots()) if "given" in name else (None, None)
    by_matrices = isinstance(values, Matrices)
    count, shape = (
        (len(values.tensors), values.shape) if by_matrices else (groups.count, tuple(values.shape))
    )
    places = None if ours is None else (ours.stride, ours.offset)
    cpu = torch.device("cpu")
    request = GroupedQuantizeRequest(
        spec, by_matrices, count, shape, torch.bfloat16, cpu, places, tiled
    )
    result = triton.bind(request)(values, groups, ours)
    expected = reference.BACKEND.bind(request)(values, groups, original)
    pairs = zip(result, expected, strict=True)
    if spec.format == FLOAT8:  # the first column of scales counts
        pairs = [(m if m is None or m.dtype != torch.float32 else m[:, :1], e) for m, e in pairs]
        pairs = [(m, e if e is None or e.dtype != torch.float32 else e[:, :1]) for m, e in pairs]
    equal = all(interpreter.same_bits(m, e) for m, e in pairs)
    if ours is not None and original is not None:
        equal = equal and torch.equal(ours.amax, original.amax)
    return {name: equal}


def quantizations() -> dict[str, bool]:
    x = torch.randn(sum(SPLITS), DEPTH).to(torch.bfloat16)
    x[5, 7], x[140, 3] = torch.inf, -1e9
    groups = make_groups(SPLITS, x.shape[0], x.device)
    matrices = matrix_table([torch.randn(144, DEPTH).to(torch.bfloat16) for _ in SPLITS])
    results = {}
    for rowwise, columnwise in ((True, False), (False, True), (True, True)):
        way = f"{'r' * rowwise}{'c' * columnwise}"
        for name, spec in (
            ("given", QuantizeSpec(FLOAT8, E4M3, rowwise, columnwise)),
            ("current", QuantizeSpec(FLOAT8, E5M2, rowwise, columnwise, power_of_two=True)),
        ):
            results |= quantized(f"rows {name} {way}", spec, x, groups)
            results |= quantized(f"matrices {name} {way}", spec, matrices, None)
            if columnwise:
                results |= quantized(f"tiles {name} {way}", spec, x, groups, tiled=True)
        block = QuantizeSpec(BLOCK_1D, E4M3, rowwise, columnwise, power_of_two=True)
        results |= quantized(f"rows block {way}", block, x, groups)
        if columnwise:
            results |= quantized(f"tiles block {way}", block, x, groups, tiled=True)
        for name, square in (("mxfp8", False), ("mxfp8 square", True)):
            spec = QuantizeSpec(MXFP8, E4M3, rowwise, columnwise, two_dimensional=square)
            results |= quantized(f"matrices {name} {way}", spec, matrices, None)
        square = QuantizeSpec(BLOCK_2D, E4M3, rowwise, columnwise, epsilon=0.25)
        results |= quantized(f"matrices block {way}", square, matrices, None)
    return results


def layouts() -> dict[str, bool]:
    results = {}
    for splits in (SPLITS, (128, 0, 256, 1), (5,)):
        expected = make_groups(splits, sum(splits), torch.device("cpu")).layout
        result = torch.empty_like(expected)
        record = grouped_layout.group_layout(sum(splits), len(splits))
        launch.start(record, (torch.tensor(splits), result), -1)
        results[f"layout {splits}"] = torch.equal(result, expected)
    return results


def products() -> dict[str, bool]:
    """Unquantized products, in float16, which the interpreter multiplies as numpy does."""
    total, width, depth = sum(SPLITS), 48, 80
    groups = make_groups(SPLITS, total, torch.device("cpu"))
    x, dy = torch.randn(total, depth).half(), torch.randn(total, width).half()
    weights = [torch.randn(width, depth).half() for _ in SPLITS]
    count = len(SPLITS)
    bias = torch.randn(count, width)
    y, dx = torch.empty(total, width), torch.empty(total, depth)
    forward = kernels.product_of_rows(total, width, depth, count, scaling=0, by_address=True)
    inputs = (weights[0], matrix_table(weights).table, None, None)
    launch.start(forward, (x, *inputs, bias, groups.layout, y), -1)
    backward = kernels.product_of_rows(
        total, depth, width, count, scaling=0, transposed=True, by_address=True
    )
    launch.start(backward, (dy, *inputs, None, groups.layout, dx), -1)
    dw = torch.ones(count, width, depth)
    gradient = kernels.product_of_columns(width, depth, count, scaling=0, accumulates=True)
    launch.start(gradient, (dy, x, None, None, groups.layout, None, dw), -1)
    parts = list(zip(x.float().split(SPLITS), dy.float().split(SPLITS), weights, bias, strict=True))
    expected_y = torch.cat([part @ w.float().t() + b for part, _, w, b in parts])
    expected_dx = torch.cat([grad @ w.float() for _, grad, w, _ in parts])
    expected_dw = torch.stack([grad.t() @ part for part, grad, _, _ in parts]) + 1
    return {
        f"product {name}": torch.allclose(result, expected, rtol=1e-3, atol=1e-3)
        for name, result, expected in (
            ("y", y, expected_y),
            ("dx", dx, expected_dx),
            ("dw", dw, expected_dw),
        )
    }


def main() -> None:
    interpreter.repair()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    triton.is_current_device = lambda index: True
    print(json.dumps(quantizations() | layouts() | products()))


if __name__ == "__main__":
    main()
