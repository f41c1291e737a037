"""What an operation on lists of tensors is told before a backend says yes or no."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....common.operation_settings import Adam, Sgd


class MultiTensorRequest(NamedTuple):
    """One of "scale", "squares", "adam", "sgd" on lists of tensors of one device; kinds: the dtype of each list.

    how    of a step
    flag   is there a flag, by which a step is skipped?
    """

    operation: str
    device: torch.device
    kinds: tuple[torch.dtype, ...]
    how: Adam | Sgd | None = None
    flag: bool = False
