"""The number of steps of Adam and the rates of a step, on the host or on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import to_bool
from ..functions.multi_tensor import device_rates
from ..primitives.multi_tensor import adam_rates, on_device
from .adam_checks import pair_of


def next_step(step: int | Tensor, flag: Tensor, capturable: bool) -> int | Tensor:
    """Return step + 1: an int, or with `capturable` int32 [1] on the flag's device, unchanged if the flag is set."""
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
    """Return the ten numbers of `adam_step` for a step of the group, on each device.

    Args:
        inverse: Multiplier of the gradients.
    """
    betas, eps, step = pair_of(group["betas"]), float(group["eps"]), group["step"]
    rest = (to_bool("bias_correction", group["bias_correction"]), float(group["weight_decay"]))
    if not capturable:
        numbers = adam_rates(float(group["lr"]), betas, eps, step, *rest)
        return {device: on_device(numbers, device) for device in devices}
    lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=flag.device)
    rates = device_rates(lr, betas, eps, step, *rest, inverse)
    return {device: rates.to(device) for device in devices}
