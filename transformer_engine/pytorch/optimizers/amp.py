"""What a torch.amp.GradScaler says about the gradients of a step: are they finite, and what are they multiplied by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState


def heed(grad_scaler: Any, optimizer: torch.optim.Optimizer, flag: Tensor) -> Tensor:
    """float32 [1] = 1 / scale, or 1 where the gradients are unscaled already; flag = is a gradient not finite?"""
    found = grad_scaler._check_inf_per_device(optimizer)
    flag.copy_(torch.stack([value.to(flag.device).view(()) for value in found.values()]).sum() != 0)
    scale = grad_scaler._get_scale_async().to(flag.device)
    if grad_scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
        return torch.ones_like(scale, dtype=torch.float32).view(1)
    return scale.to(torch.float64).reciprocal().to(torch.float32).view(1)
