"""Liger's Triton kernels: norms, and the gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..cases import Case
from ..workload import Workload
from .provider import Provider

BF16 = torch.bfloat16


def _norm(case: Case, device: torch.device) -> Workload:
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        LigerLayerNorm,
        LigerRMSNorm,
    )

    a = case.arguments
    norm = {"LayerNorm": LigerLayerNorm, "RMSNorm": LigerRMSNorm}[a["kind"]](a["width"])
    x = torch.randn(a["rows"], a["width"], device=device, dtype=BF16)
    return Workload(norm.to(device, BF16), (x,))


class _GatedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # pyright: ignore[reportMissingImports]
        from liger_kernel.transformers import LigerRMSNorm  # pyright: ignore[reportMissingImports]

        super().__init__()
        self.norm = LigerRMSNorm(hidden)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.activation = LigerSiLUMulFunction

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(self.activation.apply(self.gate(x), self.up(x)))


def _layernorm_mlp(case: Case, device: torch.device) -> Workload | None:
    a = case.arguments
    if a["activation"] != "swiglu":
        return None
    x = torch.randn(a["rows"], 1, a["hidden"], device=device, dtype=BF16)
    return Workload(_GatedMLP(a["hidden"], a["inner"]).to(device, BF16), (x,))


LIGER = Provider(
    "liger",
    ("bf16",),
    {"norm": _norm, "layernorm_mlp": _layernorm_mlp},
    module="liger_kernel",
    remedy="pip install liger-kernel",
    gpu_only="its kernels need a GPU",
)
