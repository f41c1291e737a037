"""Other libraries: Liger's Triton kernels, Quack's CuTe kernels, and torchao's float8 training."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..cases import Case
from ..workload import Workload
from . import plain
from .provider import Provider

BF16 = torch.bfloat16


def _liger_norm(case: Case, device: torch.device) -> Workload:
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        LigerLayerNorm,
        LigerRMSNorm,
    )

    a = case.arguments
    norm = {"LayerNorm": LigerLayerNorm, "RMSNorm": LigerRMSNorm}[a["kind"]](a["width"])
    x = torch.randn(a["rows"], a["width"], device=device, dtype=BF16)
    return Workload(norm.to(device, BF16), (x,))


class _LigerGatedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int):
        from liger_kernel.ops.swiglu import (
            LigerSiLUMulFunction,
        )
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


def _liger_mlp(case: Case, device: torch.device) -> Workload | None:
    a = case.arguments
    if a["activation"] != "swiglu":
        return None
    x = torch.randn(a["rows"], 1, a["hidden"], device=device, dtype=BF16)
    return Workload(_LigerGatedMLP(a["hidden"], a["inner"]).to(device, BF16), (x,))


LIGER = Provider(
    "liger",
    ("bf16",),
    {"norm": _liger_norm, "layernorm_mlp": _liger_mlp},
    module="liger_kernel",
    remedy="pip install liger-kernel",
    gpu_only="its kernels need a GPU",
)


def _quack_norm(case: Case, device: torch.device) -> Workload | None:
    from quack import rmsnorm

    a = case.arguments
    if a["kind"] != "RMSNorm":
        return None
    x = torch.randn(a["rows"], a["width"], device=device, dtype=torch.bfloat16)
    weight = torch.ones(a["width"], device=device, dtype=torch.bfloat16)
    return Workload(lambda x, weight: rmsnorm(x, weight), (x, weight))


QUACK = Provider(
    "quack",
    ("bf16",),
    {"norm": _quack_norm},
    module="quack",
    remedy="pip install quack-kernels",
    gpu_only="its kernels need a GPU",
)


def _float8_training(case: Case, device: torch.device) -> Workload:
    """Convert torch.nn.Linear to one scale per tensor, under torch.compile as torchao's authors recommend."""
    from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingImports]

    workload = plain.BUILDERS[case.family](case, device)
    assert workload is not None and isinstance(workload.function, nn.Module)
    # A single Linear has no parent module in which it could be replaced.
    module = convert_to_float8_training(nn.Sequential(workload.function))
    return replace(workload, function=module).compiled()


TORCHAO = Provider(
    "torchao",
    ("current",),
    dict.fromkeys(
        ("linear", "layernorm_linear", "layernorm_mlp", "layer", "layer_small"), _float8_training
    ),
    module="torchao",
    remedy="pip install torchao",
    gpu_only="its float8 products need a GPU",
)
