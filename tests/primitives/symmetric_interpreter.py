"""Run the kernel of symmetric products in Triton's interpreter, compare with float64, print {case: error} as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.kernels import interpreter
from transformer_engine.common.kernels.symmetric_product import symmetric_product
from transformer_engine.pytorch.runtime.launching import run

SIZES = [(1, 128, 64), (2, 136, 72), (3, 8, 200), (1, 257, 1), (2, 384, 128)]


def errors(matrices: int, rows: int, depth: int, adds: bool) -> tuple[float, float]:
    """Largest error in units of float16, and the largest difference between the result and its transpose."""
    a = torch.randn(matrices, rows, depth).half()
    c = torch.randn(matrices, rows, rows).half() if adds else None
    c = None if c is None else (c + c.mT).contiguous()
    launch = symmetric_product(matrices, rows, depth, "float16", (0.5, 2.0))
    (out,) = run(launch, (a, a, c))
    exact = 0.5 * a.double() @ a.double().mT + (0.0 if c is None else 2.0 * c.double())
    unit = torch.finfo(torch.float16).eps / 2 * exact.abs().clamp(min=1.0)
    return ((out - exact).abs() / unit).max().item(), (out - out.mT).abs().max().item()


def asymmetry() -> float:
    """Difference between a product of polynomials of one matrix, which commute within rounding, and its transpose."""
    x = torch.randn(1, 200, 200).half() / 16
    gram = run(symmetric_product(1, 200, 200, "float16", (1.0, 0.0)), (x, x, None))[0]
    square = run(symmetric_product(1, 200, 200, "float16", (0.1, 1.5)), (gram, gram, gram))[0]
    out = run(symmetric_product(1, 200, 200, "float16", (0.1, 0.0)), (gram, square, None))[0]
    return (out - out.mT).abs().max().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    interpreter.repair()
    results = {
        f"{sizes} {'sum' if adds else 'product'}": errors(*sizes, adds)
        for sizes in SIZES
        for adds in (False, True)
    }
    print(json.dumps({"errors": results, "asymmetry": asymmetry()}))
