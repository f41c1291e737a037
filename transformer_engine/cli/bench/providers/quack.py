"""Quack's CuTe kernels: RMSNorm."""

from __future__ import annotations

import torch

from ..cases import Case
from ..workload import Workload
from .provider import Provider


def _norm(case: Case, device: torch.device) -> Workload | None:
    from quack import rmsnorm  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    a = case.arguments
    if a["kind"] != "RMSNorm":
        return None
    x = torch.randn(a["rows"], a["width"], device=device, dtype=torch.bfloat16)
    weight = torch.ones(a["width"], device=device, dtype=torch.bfloat16)
    return Workload(lambda x, weight: rmsnorm(x, weight), (x, weight))


QUACK = Provider(
    "quack",
    ("bf16",),
    {"norm": _norm},
    module="quack",
    remedy="pip install quack-kernels",
    gpu_only="its kernels need a GPU",
)
