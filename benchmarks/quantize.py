"""Time quantization on one GPU: milliseconds, GB/s for the bytes that must move, and percent of a copy's bandwidth.

usage: python benchmarks/quantize.py [--shape 8192x14336] [--backend triton] [--json FILE]

gpu_ms    GPU time for one call with its launches already queued and other data in L2, median over 8 to 40 calls
host_us   host time to queue one call, median over the same number
"""

from __future__ import annotations

from typing import Any

import torch
from record import GPU, copy_rate, options, parser, write

from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, E2M1, E4M3, FLOAT8, MXFP8, NVFP4
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, quantize
from transformer_engine_tools.bench.measure import measure

# name: (spec, whether the scale is given, bytes moved per element: 2 read in each pass, and the bytes written)
CASES: dict[str, tuple[QuantizeSpec, bool, float]] = {
    "delayed row": (QuantizeSpec(FLOAT8, E4M3), True, 3),
    "delayed both": (QuantizeSpec(FLOAT8, E4M3, columnwise=True), True, 4),
    "current row": (QuantizeSpec(FLOAT8, E4M3), False, 5),
    "current both": (QuantizeSpec(FLOAT8, E4M3, columnwise=True), False, 6),
    "block1d row": (QuantizeSpec(BLOCK_1D, E4M3, power_of_two=True), False, 3 + 4 / 128),
    "block1d both": (
        QuantizeSpec(BLOCK_1D, E4M3, columnwise=True, power_of_two=True),
        False,
        4 + 8 / 128,
    ),
    "block2d row": (QuantizeSpec(BLOCK_2D, E4M3, power_of_two=True), False, 3),
    "block2d both": (QuantizeSpec(BLOCK_2D, E4M3, columnwise=True, power_of_two=True), False, 4),
    "mxfp8 row": (QuantizeSpec(MXFP8, E4M3), False, 3 + 1 / 32),
    "mxfp8 both": (QuantizeSpec(MXFP8, E4M3, columnwise=True), False, 4 + 2 / 32),
    "nvfp4 row": (QuantizeSpec(NVFP4, E2M1), False, 4.5 + 1 / 16),
    "nvfp4 both, hadamard": (
        QuantizeSpec(NVFP4, E2M1, columnwise=True, hadamard=True),
        False,
        7 + 2 / 16,
    ),
}


def benchmark(rows: int, depth: int, backend: str, only: str) -> dict[str, Any]:
    roof = 1e3 * copy_rate(1 << 32)
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    one = torch.ones(1, device="cuda")
    print(f"{rows} x {depth} bfloat16, backend {backend}; a copy moves {roof:.0f} GB/s")
    print(f"{'case':22} {'gpu_ms':>8} {'host_us':>8} {'GB/s':>6} {'% of copy':>9}")
    results = []
    for name, (spec, scaled, size) in CASES.items():
        if only not in name:
            continue
        scale = one if scaled else None
        with use_backend(quantize=backend):
            timing = measure(
                lambda spec=spec, scale=scale: quantize(x, spec, multiplier=scale), GPU
            )
        assert timing.cpu_ms is not None
        gpu_ms, host_us = timing.busiest, 1e3 * timing.cpu_ms
        rate = size * x.numel() / gpu_ms / 1e6
        print(f"{name:22} {gpu_ms:8.4f} {host_us:8.1f} {rate:6.0f} {100 * rate / roof:9.1f}")
        results.append(
            {
                "case": name,
                "gpu_ms": gpu_ms,
                "host_us": host_us,
                "gb_per_s": rate,
                "of_copy": rate / roof,
            }
        )
    return {
        "shape": [rows, depth],
        "backend": backend,
        "copy_gb_per_s": roof,
        "results": results,
    }


def main() -> None:
    result = parser("Time quantization on one GPU.")
    result.add_argument("--shape", default="8192x14336", help="rows x depth of the matrix")
    result.add_argument("--backend", default="triton", help="a backend of primitives.quantize")
    chosen = options(result)
    rows, depth = (int(extent) for extent in chosen.shape.split("x"))
    write(chosen.json, **benchmark(rows, depth, chosen.backend, chosen.only))


if __name__ == "__main__":
    main()
