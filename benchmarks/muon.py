"""Milliseconds per step of FusedMuon and torch.optim.Muon for the matrices of a Llama with 1 B parameters.

    python benchmarks/muon.py --out $OUT/muon.json         # on one GPU, 30 seconds
    python benchmarks/muon.py --layers 1 --hidden 128      # a check on a CPU

Arms: torch; FusedMuon in bfloat16, whose products are torch's, batched by shape; FusedMuon by default, float16 with
symmetric products. `error` is the relative error of a layer's updates against those in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.optimizers import FusedMuon
from transformer_engine.pytorch.primitives.symmetric_product import symmetric_product


def make_parameters(layers: int, hidden: int, device: str, dtype: torch.dtype) -> list[Any]:
    """Matrices of attention with grouped keys and of a gated MLP, with gradients."""
    shapes = [(hidden, hidden)] * 2 + [(hidden // 4, hidden)] * 2
    shapes += [(4 * hidden, hidden)] * 2 + [(hidden, 4 * hidden)]
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for shape in shapes * layers:
        value = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        parameter = torch.nn.Parameter(0.02 * value)
        parameter.grad = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        parameters.append(parameter)
    return parameters


def make_optimizer(arm: str, parameters: list[Any]) -> torch.optim.Optimizer:
    """An arm's optimizer."""
    if arm == "torch":
        return torch.optim.Muon(parameters, lr=0.02)
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32, "default": None}
    return FusedMuon(parameters, lr=0.02, ns_dtype=dtypes[arm])


def updates(arm: str, hidden: int, device: str) -> list[Tensor]:
    """First updates of one layer of float32 parameters."""
    parameters = make_parameters(1, hidden, device, torch.float32)
    before = [parameter.detach().clone() for parameter in parameters]
    make_optimizer(arm, parameters).step()
    return [parameter.detach() - start for parameter, start in zip(parameters, before, strict=True)]


def measure(arm: str, layers: int, hidden: int, device: str, steps: int) -> dict[str, float]:
    """Median step time and peak memory."""
    optimizer = make_optimizer(arm, make_parameters(layers, hidden, device, torch.bfloat16))
    times = []
    for step in range(steps + 2):
        if step == 2 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    found = {"ms": 1e3 * statistics.median(times[2:])}
    if device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def measure_products(hidden: int) -> dict[str, float]:
    """Teraflops of general and symmetric products [4, hidden, hidden]; a symmetric one counts as a whole one."""
    x = torch.randn(4, hidden, hidden, device="cuda", dtype=torch.float16)
    found = {}
    for name, function in (
        ("bmm", lambda: torch.bmm(x, x.mT)),
        ("symmetric", lambda: symmetric_product(x, x)),
        ("baddbmm", lambda: torch.baddbmm(x, x, x.mT)),
        ("symmetric with a sum", lambda: symmetric_product(x, x, x, beta=2.0)),
    ):
        for _ in range(3):
            function()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            function()
        end.record()
        torch.cuda.synchronize()
        found[name] = 20 * 8 * hidden**3 / (1e-3 * begin.elapsed_time(end)) / 1e12
    return found


def parse_arguments() -> argparse.Namespace:
    """Options of this program."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--hidden", type=int, default=2048)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--out", type=Path)
    return options.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers, hidden = arguments.layers, arguments.hidden
    results: dict[str, Any] = {}
    if device == "cuda":
        results["teraflops"] = measure_products(hidden)
        print(json.dumps(results), flush=True)
    exact = updates("float32", hidden, device)
    for arm in ("torch", "bfloat16", "default"):
        found = measure(arm, layers, hidden, device, arguments.steps)
        pairs = zip(updates(arm, hidden, device), exact, strict=True)
        found["error"] = max(((one - other).norm() / other.norm()).item() for one, other in pairs)
        results[arm] = found
        print(json.dumps({arm: found}), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(results, indent=1))
    ratio = results["default"]["ms"] / results["torch"]["ms"]
    print(f"FusedMuon takes {ratio:.2f} of torch.optim.Muon's time")


if __name__ == "__main__":
    main()
