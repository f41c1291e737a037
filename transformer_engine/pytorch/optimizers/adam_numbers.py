"""The numbers of a step of Adam: how many there have been, and what each costs, on the host or on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..functions.multi_tensor import device_rates
from ..primitives.multi_tensor import adam_rates, on_device


def next_step(step: int | Tensor, flag: Tensor, capturable: bool) -> int | Tensor:
    """step + 1: an int, or, capturable, int32 [1] on the flag's device, which stays where the flag skips the step."""
    if not capturable:
        return int(step) + 1
    steps = torch.as_tensor(step, dtype=torch.int32, device=flag.device).reshape(-1)[:1]
    return steps.add_((flag != 1).to(torch.int32))


def rates_of(
    group: dict[str, Any],
    inverse: Tensor | None,
    devices: Iterable[torch.device],
    flag: Tensor,
    capturable: bool,
) -> dict[torch.device, Tensor]:
    """The ten numbers of `adam_step` for a group's step on each device; inverse: what gradients are multiplied by."""
    betas, eps, step = group["betas"], group["eps"], group["step"]
    rest = (group["bias_correction"], group["weight_decay"])
    if not capturable:
        numbers = adam_rates(float(group["lr"]), betas, eps, step, *rest)
        return {device: on_device(numbers, device) for device in devices}
    lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=flag.device)
    rates = device_rates(lr, betas, eps, step, *rest, inverse)
    return {device: rates.to(device) for device in devices}
