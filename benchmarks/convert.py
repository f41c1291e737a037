"""Tokens/s and peak memory for training plain PyTorch models: unchanged, with torchao, and with te.convert.

Arms, each in bfloat16 with torch's fused AdamW and every block compiled by itself, except `eager` and `te`:

- eager: torch without a compiler;
- bf16: torch, compiled;
- torchao: `convert_to_float8_training` with one scale per tensor, compiled;
- te: `te.convert` under Float8CurrentScaling with the batch as its sample, without a compiler;
- te+compile: the same for the compiled model.

    python benchmarks/convert.py --out $OUT/convert.json       # all models; on one GPU
    python benchmarks/convert.py --size tiny --arms eager te   # a check on a CPU

An arm is built, timed and released before the next one. The file has a
table for each conversion.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from convert_models import SIZES, Model, make_batch, make_model
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

ARMS = ("eager", "bf16", "torchao", "te", "te+compile")
WARM, TIMED = 5, 12


def build(arm: str, size: Any, device: str, batch: Any) -> Model:
    """An arm's model, converted and compiled."""
    torch.manual_seed(0)
    model = make_model(size, device)
    if arm == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model.layers, config=Float8LinearConfig.from_recipe_name("tensorwise")
        )
    if arm in ("bf16", "torchao", "te+compile"):
        for layer in model.layers:
            layer.compile(fullgraph=True)
    if arm.startswith("te"):
        te.convert(model, Float8CurrentScaling(), sample=batch, exclude="embedding", verbose=False)
    return model


def measure(arm: str, size: Any, device: str) -> dict[str, Any]:
    """Median step time, tokens per second, peak memory and the table of a conversion."""
    batch = make_batch(size, device)
    begin = time.perf_counter()
    model = build(arm, size, device, batch)
    built = time.perf_counter() - begin
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    times, losses = [], []
    for step in range(WARM + TIMED):
        if step == WARM and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        begin = time.perf_counter()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        times.append(time.perf_counter() - begin)
        losses.append(loss.item())
    step = statistics.median(times[WARM:])
    found = {
        "step_ms": 1e3 * step,
        "tokens_per_second": size.batch * size.length / step,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "build_s": built,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    if arm.startswith("te"):
        found["table"] = str(te.conversion_table(model))
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--size",
        nargs="+",
        choices=SIZES,
        default=[name for name in SIZES if not name.startswith("tiny")],
    )
    options.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    options.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no arm after this time"
    )
    options.add_argument("--out", type=Path)
    arguments = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, dict[str, Any]] = {}
    begin = time.perf_counter()
    for name in arguments.size:
        for arm in arguments.arms:
            if time.perf_counter() - begin > arguments.seconds:
                print(f"{name} {arm}: not run, the time is over", flush=True)
                continue
            with sdpa_kernel(
                [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
                set_priority=True,
            ):
                found = measure(arm, SIZES[name], device)
            results.setdefault(name, {})[arm] = found
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            best = min(entry["step_ms"] for entry in results[name].values())
            print(
                f"{name:9} {arm:11} {found['step_ms']:9.2f} ms  {found['tokens_per_second']:11,.0f} tokens/s  "
                f"{found['peak_gib'] or 0:6.2f} GiB  {found['step_ms'] / best:.3f} of the best so far  "
                f"built in {found['build_s']:.0f} s  loss {found['first_loss']:.4f} -> {found['last_loss']:.4f}",
                flush=True,
            )
            if "table" in found:
                print(found["table"], flush=True)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
