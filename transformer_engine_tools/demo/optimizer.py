"""AdamW on float32 weights, with the learning rate given at each step.

On CUDA the learning rate and the step count are tensors on the device, so that CUDA graphs can capture a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.optimizers import FusedAdam

from .config import BETAS, CLIP, DECAY


class MasterAdamW:
    """AdamW that keeps a float32 copy of every narrower parameter: bfloat16 would round small steps away."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)
        self.masters = [
            parameter if parameter.dtype == torch.float32 else parameter.detach().float().clone()
            for parameter in self.parameters
        ]
        matrices = [master for master in self.masters if master.dim() >= 2]
        vectors = [master for master in self.masters if master.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.gpu = _find_gpu(self.parameters)
        self.adam = torch.optim.AdamW(
            groups, betas=BETAS, fused=True, capturable=self.gpu is not None
        )
        _keep_rates_on_device(self.adam, self.gpu)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate for the next steps."""
        _set_rate(self.adam, rate)

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients, take one step, and clear the gradients."""
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
        return {
            "adam": self.adam.state_dict(),
            "masters": [master.detach() for master in self.masters],
        }

    def mismatch(self, state: dict[str, Any]) -> str | None:
        """Reason why a state does not match this optimizer, or None."""
        adam, masters = state.get("adam"), state.get("masters")
        if not isinstance(adam, dict) or not isinstance(masters, list):
            return "its optimizer has no adam and masters"
        if [getattr(saved, "shape", None) for saved in masters] != [
            master.shape for master in self.masters
        ]:
            return "the optimizer's master weights have other shapes"
        return _misfit(adam, self.adam)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        _keep_rates_on_device(self.adam, self.gpu)
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)


class FusedAdamW:
    """AdamW by `FusedAdam`, which launches one kernel per dtype and keeps the float32 copies itself.

    Args:
        parameters: Parameters.
        settings: Further FusedAdam arguments.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], **settings: Any):
        self.parameters = list(parameters)
        matrices = [parameter for parameter in self.parameters if parameter.dim() >= 2]
        vectors = [parameter for parameter in self.parameters if parameter.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ]
        narrow = any(parameter.dtype != torch.float32 for parameter in self.parameters)
        self.gpu = _find_gpu(self.parameters)
        settings = {"master_weights": narrow, "capturable": self.gpu is not None} | settings
        self.adam = FusedAdam(groups, betas=BETAS, **settings)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate for the next steps."""
        _set_rate(self.adam, rate)

    def step(self) -> None:
        """Clip the gradients, take one step, and clear the gradients."""
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.adam.step()
        # In a captured step the gradients stay at the addresses for which FusedAdam has a table.
        self.adam.zero_grad(set_to_none=self.gpu is None)

    def state_dict(self) -> dict[str, Any]:
        return {"fused_adam": self.adam.state_dict()}

    def mismatch(self, state: dict[str, Any]) -> str | None:
        """Reason why a state does not match this optimizer, or None."""
        adam = state.get("fused_adam")
        if not isinstance(adam, dict):
            return "its optimizer has no fused_adam"
        return _misfit(adam, self.adam)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["fused_adam"])


# Optimizers for `te train --optimizer`.
OPTIMIZERS: dict[str, type[MasterAdamW | FusedAdamW]] = {
    "adamw": MasterAdamW,
    "fused_adam": FusedAdamW,
}


def _set_rate(adam: torch.optim.Optimizer, rate: float) -> None:
    for group in adam.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _find_gpu(parameters: list[nn.Parameter]) -> torch.device | None:
    """GPU of the parameters, or None."""
    return next((parameter.device for parameter in parameters if parameter.is_cuda), None)


def _keep_rates_on_device(adam: torch.optim.Optimizer, gpu: torch.device | None) -> None:
    """Keep learning rates in the parameters' GPU memory, also after loading another device's checkpoint.

    Args:
        adam: The optimizer.
        gpu: GPU of its parameters. None: numbers, without capturable steps.
    """
    for group in adam.param_groups:
        group["capturable"] = gpu is not None
        rate = float(group["lr"])
        group["lr"] = rate if gpu is None else torch.tensor(rate, dtype=torch.float32, device=gpu)


def _misfit(saved: dict[str, Any], adam: torch.optim.Optimizer) -> str | None:
    """Reason why an Adam state dict does not match the parameters and settings, or None."""
    current = adam.state_dict()["param_groups"]
    groups, moments = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, list) or not isinstance(moments, dict):
        return "its optimizer has no param_groups and state"
    # FusedAdam counts its steps in the group, once there are any.
    settings = [set(group) - {"step"} if isinstance(group, dict) else None for group in groups]
    if settings != [set(group) - {"step"} for group in current]:
        return "the optimizer's groups have other settings"
    if [group["params"] for group in groups] != [group["params"] for group in current]:
        return "the optimizer's groups have other parameters"
    ordered = [parameter for group in adam.param_groups for parameter in group["params"]]
    for index, moment in moments.items():
        shapes = [getattr(moment.get(name), "shape", None) for name in ("exp_avg", "exp_avg_sq")]
        if index not in range(len(ordered)) or shapes != [ordered[index].shape] * 2:
            return f"the optimizer's moments of parameter {index} have other shapes"
    return None
