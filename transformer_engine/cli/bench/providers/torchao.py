"""torchao's float8 training: torch.nn.Linear with one scale a tensor, under torch.compile as its authors advise."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..cases import Case
from ..workload import Workload
from . import plain
from .provider import Builder, Provider


def _converted(build: Builder) -> Builder:
    def build_converted(case: Case, device: torch.device) -> Workload | None:
        from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingImports]

        workload = build(case, device)
        assert workload is not None and isinstance(workload.function, nn.Module)
        # A lone Linear has no parent in which it could be exchanged.
        module = convert_to_float8_training(nn.Sequential(workload.function))
        return replace(workload, function=module).compiled()

    return build_converted


TORCHAO = Provider(
    "torchao",
    ("current",),
    {
        family: _converted(plain.BUILDERS[family])
        for family in ("linear", "layernorm_linear", "layernorm_mlp", "layer", "layer_small")
    },
    module="torchao",
    remedy="pip install torchao",
    gpu_only="its float8 products need a GPU",
)
