"""The step in torch operations, on any device: all columns of equally long histories at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import FLOAT32_MAX


class ScaleUpdateRequest(NamedTuple):
    """Update for several states, by the `advance_scales` rule.

    The fields are the device type, the common length of the histories (None: they differ), the
    largest column count, the state count, and the rule.
    """

    device: str
    length: int | None
    columns: int
    states: int = 1
    algorithm: str = "max"
    fp8_max: float = 448.0
    margin: float = 0
    keep_idle: bool = True


def next_scale(amax: Tensor, scale: Tensor, fp8_max: float, margin: float) -> Tensor:
    """(fp8_max / amax) / 2^margin; the old scale where amax is 0, inf or NaN; at most FLOAT32_MAX."""
    computed = (torch.full_like(amax, fp8_max) / amax) / 2**margin
    computed = torch.where(torch.isinf(computed), torch.full_like(computed, FLOAT32_MAX), computed)
    return torch.where((amax > 0) & torch.isfinite(amax), computed, scale)


def history_amax(history: Tensor, algorithm: str) -> Tensor:
    """Return amax [n] from a history [length, n] whose row 0 is the latest step."""
    return history.amax(dim=0) if algorithm == "max" else history[0].clone()


def roll_history(history: Tensor) -> Tensor:
    """Move rows up by one, so that row 0 becomes the last, and clear row 0."""
    cleared = torch.zeros_like(history[:1])
    if history.shape[0] == 1:
        return cleared
    return torch.cat((cleared, history[2:], history[:1]))


def bind(request: ScaleUpdateRequest) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
    """Return (histories, scales) -> None, which updates both in place."""

    def step(histories: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        by_length: dict[int, list[int]] = {}
        for i, history in enumerate(histories):
            by_length.setdefault(history.shape[0], []).append(i)
        for members in by_length.values():
            columns = [scales[i].shape[0] for i in members]
            history = torch.cat([histories[i] for i in members], dim=1)
            scale = torch.cat([scales[i] for i in members])
            amax = history_amax(history, request.algorithm)
            new_scale = next_scale(amax, scale, request.fp8_max, request.margin)
            new_history = roll_history(history)
            if request.keep_idle:  # columns whose latest amax is 0 keep history and scale
                busy = history[0] != 0
                new_history = torch.where(busy, new_history, history)
                new_scale = torch.where(busy, new_scale, scale)
            torch._foreach_copy_(
                [histories[i] for i in members], list(new_history.split(columns, dim=1))
            )
            torch._foreach_copy_([scales[i] for i in members], list(new_scale.split(columns)))

    return step


BACKEND = Backend[ScaleUpdateRequest]("reference", bind=bind)
