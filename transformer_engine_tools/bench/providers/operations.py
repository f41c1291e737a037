"""This engine's family `ops`: operation chains against modules that compute the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_engine import pytorch as te
from transformer_engine.pytorch import ops

from ..cases import Case
from ..workload import Workload
from .engine import BF16, BUILDERS, module_workload


class ExpertModules(torch.nn.Module):
    """A grouped MLP built from two GroupedLinear modules and a scaled SwiGLU in torch operations."""

    def __init__(
        self, groups: int, hidden: int, inner: int, factory_kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        options = {
            "bias": False,
            "params_dtype": factory_kwargs["dtype"],
            "device": factory_kwargs["device"],
        }
        self.fc1 = te.GroupedLinear(groups, hidden, 2 * inner, **options)
        self.activation = ops.SwiGLU()
        self.fc2 = te.GroupedLinear(groups, inner, hidden, **options)

    def forward(self, x: Tensor, scales: Tensor, splits: list[int]) -> Tensor:
        inner = self.activation(self.fc1(x, splits))
        scaled = (inner.float() * scales.unsqueeze(-1)).to(inner.dtype)
        return self.fc2(scaled, splits)


class ExpertOperations(torch.nn.Module):
    """The same as a Sequential."""

    def __init__(
        self, groups: int, hidden: int, inner: int, factory_kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        self.chain = ops.Sequential(
            ops.GroupedLinear(groups, hidden, 2 * inner, bias=False, **factory_kwargs),
            ops.ScaledSwiGLU(),
            ops.GroupedLinear(groups, inner, hidden, bias=False, **factory_kwargs),
        )

    def forward(self, x: Tensor, scales: Tensor, splits: list[int]) -> Tensor:
        sizes = torch.tensor(splits, device="cpu")
        return self.chain(x, sizes, scales, sizes)


@BUILDERS.of("ops")
def _ops(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    factory_kwargs = {"device": device, "dtype": BF16}
    x = torch.randn(a["rows"], a["hidden"], **factory_kwargs)
    sequential = a["made_of"] == "sequential"
    if a["groups"] is None:
        if sequential:
            module: torch.nn.Module = ops.Sequential(
                ops.LayerNorm(a["hidden"], **factory_kwargs),
                ops.Linear(a["hidden"], a["inner"], **factory_kwargs),
                ops.GELU(),
                ops.Linear(a["inner"], a["hidden"], **factory_kwargs),
            )
        else:
            module = te.LayerNormMLP(a["hidden"], a["inner"], params_dtype=BF16, device=device)
        return module_workload(module, x, case)
    kind = ExpertOperations if sequential else ExpertModules
    scales = torch.rand(a["rows"], device=device)
    splits = [a["rows"] // a["groups"]] * a["groups"]
    return module_workload(
        kind(a["groups"], a["hidden"], a["inner"], factory_kwargs),
        x,
        case,
        scales=scales,
        splits=splits,
    )
