"""Measure training steps of one arm in this process; `models.py` starts this script once per arm and run.

    python benchmarks/model_step.py ARM [--size NAME ...] [--trace] [--eager] [--one-thread]
        [--device cuda|cpu]

A step is forward, backward and torch's fused AdamW. Prints one line of JSON per size. The script imports no part of
transformer_engine unless the arm does, so that any release may be on the path.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from model_arms import ARMS, OPT_INS, SIZES, LanguageModel, Size, make_model
from model_trace import count_launches, trace
from torch import Tensor

WARM_UP, BLOCKS, BLOCK = 4, 3, 4  # steps before the measurement, blocks, steps per block


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("arm", choices=(*ARMS, *OPT_INS))
    options.add_argument("--size", nargs="+", choices=SIZES, default=["57M", "1B", "8Bx4"])
    options.add_argument(
        "--trace", action="store_true", help="print the kernels of a step instead of its time"
    )
    options.add_argument("--eager", action="store_true", help="do not compile the layers of pt")
    options.add_argument(
        "--one-thread", action="store_true", help="backward passes on the calling thread"
    )
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = options.parse_args()
    if chosen.one_thread:
        torch.autograd.set_multithreading_enabled(False)
    failed = False
    for name in chosen.size:
        row: dict[str, Any] = {"arm": chosen.arm, "size": name}
        try:
            row |= measure_arm(
                chosen.arm, SIZES[name], chosen.device, not chosen.eager, chosen.trace
            )
        except (
            ImportError,
            RuntimeError,
            ValueError,
        ) as error:  # one size may exceed the GPU memory
            traceback.print_exc()
            row["error"], failed = f"{type(error).__name__}: {error}"[:400], True
        print(json.dumps(row), flush=True)
        gc.collect()
        if chosen.device == "cuda":
            torch.cuda.empty_cache()
    sys.exit(failed)


def measure_arm(arm: str, size: Size, device: str, compiled: bool, traced: bool) -> dict[str, Any]:
    """An arm's figures, or one step's kernel table if `traced`."""
    if arm.startswith("pt:") and compiled:
        torch._dynamo.config.automatic_dynamic_shapes = False
        torch._dynamo.config.cache_size_limit = 64
    torch.manual_seed(0)
    model = make_model(arm, size, device, compiled)
    steps = Steps(model, device)
    start = time.perf_counter()
    first_loss = steps.run().item()
    about = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "engine": _engine() if arm.startswith("te:") else None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_s": time.perf_counter() - start,
        "first_loss": first_loss,
    }
    if not traced:
        return about | steps.measure()
    for _ in range(WARM_UP):
        steps.run()
    step_ms = statistics.median(steps.block_ms() for _ in range(BLOCKS))
    model.traced = True
    steps.run()
    return about | {"step_ms": step_ms} | trace(steps.run, device)


class Steps:
    """A model's training steps on one random token batch."""

    def __init__(self, model: LanguageModel, device: str) -> None:
        size = model.size
        self.model, self.device = model, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.tokens, self.targets = torch.randint(
            size.vocabulary, (2, size.batch, size.length), device=device
        ).unbind()

    def run(self) -> Tensor:
        """Forward, backward and optimizer; returns the loss."""
        self.model.mark("embedding")
        loss = self.model(self.tokens, self.targets)
        loss.backward()
        self.model.mark("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def measure(self) -> dict[str, Any]:
        """Tokens per second, peak memory, host time and launches of warm steps, and the last step's loss."""
        for _ in range(WARM_UP):
            self.run()
        peak = self._peak_gib()
        step_ms = statistics.median(self.block_ms() for _ in range(BLOCKS))
        return {
            "step_ms": step_ms,
            "tokens_per_second": 1e3 * self.tokens.numel() / step_ms,
            "peak_gib": peak,
            "host_ms": statistics.median(self._host_ms() for _ in range(BLOCKS)),
            "launches": count_launches(self.run, self.device),
            "loss": self.run().item(),
        }

    def block_ms(self) -> float:
        """Milliseconds per step over a block of steps."""
        return _measure_ms(lambda: [self.run() for _ in range(BLOCK)], self._synchronize) / BLOCK

    def _host_ms(self) -> float:
        """Milliseconds in which the host queues a forward and a backward pass on an idle device."""
        self._synchronize()
        elapsed = _measure_ms(
            lambda: self.model(self.tokens, self.targets).backward(), lambda: None
        )
        self.optimizer.zero_grad(set_to_none=True)
        return elapsed

    def _peak_gib(self) -> float | None:
        """Peak allocated memory within a step, parameters and optimizer states included."""
        if self.device != "cuda":
            return None
        self._synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.run()
        self._synchronize()
        return torch.cuda.max_memory_allocated() / 2**30

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _measure_ms(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    call()
    wait()
    return (time.perf_counter() - start) * 1e3


def _engine() -> str:
    """The imported Transformer Engine's version."""
    import transformer_engine

    return getattr(transformer_engine, "__version__", "unknown")


if __name__ == "__main__":
    main()
