"""AdamW on float32 weights, with the learning rate given at each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

CLIP = 1.0


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth (at most 100 steps), then a cosine down to a tenth of the peak."""
    warmup = max(1, min(100, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


class MasterAdamW:
    """AdamW that keeps a float32 copy of every narrower parameter: bfloat16 would round small steps away."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)
        self.masters = [_master(parameter) for parameter in self.parameters]
        matrices = [master for master in self.masters if master.dim() >= 2]
        vectors = [master for master in self.masters if master.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Clip the gradients, take one step at this learning rate, and clear the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.adam.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "masters": [master.detach() for master in self.masters]}

    def refusal(self, state: dict[str, Any]) -> str | None:
        """Why a state is not one of this optimizer; None when it is."""
        adam, masters = state.get("adam"), state.get("masters")
        if not isinstance(adam, dict) or not isinstance(masters, list):
            return "its optimizer has no adam and masters"
        if [getattr(saved, "shape", None) for saved in masters] != [own.shape for own in self.masters]:
            return "the optimizer's master weights have other shapes"
        own = self.adam.state_dict()["param_groups"]
        groups, moments = adam.get("param_groups"), adam.get("state")
        if not isinstance(groups, list) or not isinstance(moments, dict):
            return "its optimizer has no param_groups and state"
        if [set(group) if isinstance(group, dict) else None for group in groups] != [set(g) for g in own]:
            return "the optimizer's groups have other settings"
        if [group["params"] for group in groups] != [group["params"] for group in own]:
            return "the optimizer's groups have other parameters"
        ordered = [parameter for group in self.adam.param_groups for parameter in group["params"]]
        for index, moment in moments.items():
            shapes = [getattr(moment.get(name), "shape", None) for name in ("exp_avg", "exp_avg_sq")]
            if index not in range(len(ordered)) or shapes != [ordered[index].shape] * 2:
                return f"the optimizer's moments of parameter {index} have other shapes"
        return None

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> MasterAdamW:
    """The optimizer of that name."""
    return MasterAdamW(parameters)


def _master(parameter: nn.Parameter) -> Tensor:
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float().clone()
