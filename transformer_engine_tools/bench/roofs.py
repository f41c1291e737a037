"""Roofs: what this machine's memory and its matrix units reach on plain work, measured before the cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transformer_engine.pytorch.runtime.device import current_hardware

from .cases import Case
from .measure import Effort, measure

GPU_COPY, GPU_SIDE = 1 << 30, 8192
CPU_COPY, CPU_SIDE = 1 << 26, 512


@dataclass(frozen=True)
class Roofs:
    """Bytes per second in a copy (read and written), operations per second in a square product; None: not possible.

    Attributes:
        copy: Bytes per second.
        bf16: bfloat16 operations per second.
        fp8: FP8 operations per second.
    """

    copy: float
    bf16: float
    fp8: float | None

    def share(self, case: Case, milliseconds: float) -> float | None:
        """Compute the fraction of its roof that a case reaches in a time; None for cases without bytes and products."""
        if case.moved:
            return case.moved / milliseconds * 1e3 / self.copy
        if case.operations:
            roof = self.bf16 if case.recipe == "bf16" or self.fp8 is None else self.fp8
            return case.operations / milliseconds * 1e3 / roof
        return None


def measure_roofs(device: torch.device, effort: Effort) -> Roofs:
    """Copy: a large buffer. Products: square bfloat16 matrices by torch.mm, E4M3 ones by torch._scaled_mm."""
    cuda = device.type == "cuda"
    size, side = (GPU_COPY, GPU_SIDE) if cuda else (CPU_COPY, CPU_SIDE)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / measure(lambda: target.copy_(source), device, effort).busiest * 1e3
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    operations = 2.0 * side**3
    bf16 = operations / measure(lambda: a @ b.t(), device, effort).busiest * 1e3
    if not cuda or not current_hardware().has("fp8 products"):
        return Roofs(copy, bf16, None)
    x, w = (t.to(torch.float8_e4m3fn) for t in (a, b))
    one = torch.ones((), device=device)

    def fp8_product() -> None:
        torch._scaled_mm(
            x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return Roofs(copy, bf16, operations / measure(fp8_product, device, effort).busiest * 1e3)
