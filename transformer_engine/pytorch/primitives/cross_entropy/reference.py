"""The cross-entropy request, and the reference in float32 torch operations on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend, depends_on_gpu, requirements
from ....common.formats import ceil_div
from ....common.operation_settings import Labels
from ...runtime.row_functions import sum_rows


class CrossEntropyRequest(NamedTuple):
    """One of "statistics", "losses", "gradient" on logits [rows, width], or "rescale" for gradients.

    Attributes:
        operation: Operation name.
        labels: Ignored label, smoothing and class counts.
        strips: Partial statistics per row.
        per_row: The gradient has one factor per row instead of one for all rows.
        in_place: The gradient overwrites the logits.
    """

    operation: str
    rows: int
    width: int
    dtype: torch.dtype
    device: torch.device
    labels: Labels
    strips: int = 1
    per_row: bool = False
    in_place: bool = False


def count_strips(rows: int, width: int) -> int:
    """Return how many strips a row has: with few rows, one program per row would leave most of a GPU idle.

    The strips' sums are added, so a row has one strip if its result must not depend on the number of rows.
    """
    if requirements.batch_invariant:
        return 1
    blocks = ceil_div(width, 8192)
    return ceil_div(blocks, ceil_div(blocks, min(ceil_div(1024, rows), blocks)))


def bind(request: CrossEntropyRequest) -> Callable[..., Any]:
    """Return the operation for a request.

    * statistics: (x, targets) -> partials
    * losses: (partials, targets) -> (loss, statistics)
    * gradient: (x, targets, statistics, factor) -> dx
    * rescale: (x, factor) -> x
    """
    labels, in_place = request.labels, request.in_place
    if request.operation == "statistics":
        return lambda x, targets: statistics(x, targets, labels)
    if request.operation == "losses":
        return lambda partials, targets: losses(partials, targets, labels)
    if request.operation == "rescale":
        return lambda x, factor: x.copy_(x.to(torch.float32) * factor)
    return lambda x, targets, of_rows, factor: gradient(
        x, targets, of_rows, factor, labels, in_place
    )


def statistics(x: Tensor, targets: Tensor, labels: Labels) -> Tensor:
    """Return [1, rows, 4]: max, sum(exp(x - max)), x[target] or -inf if it is on another rank, sum(x / vocabulary)."""
    values = x.to(torch.float32)
    row_max = values.amax(1)
    base = torch.where(row_max == -torch.inf, 0.0, row_max)
    total = sum_rows(torch.exp(values - base[:, None]))
    position = targets - labels.first
    in_shard = (position >= 0) & (position < x.shape[1])
    target_logit = values.gather(1, torch.where(in_shard, position, 0)[:, None])[:, 0]
    target_logit = torch.where(in_shard, target_logit, -torch.inf)
    mean = sum_rows(values / labels.total)  # the sum of large logits is infinite
    return torch.stack((row_max, total, target_logit, mean), dim=1)[None]


def losses(partials: Tensor, targets: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """Return (loss [rows], statistics [rows, 2]) from partials [strips, rows, 4]."""
    row_max, total, target_logit, means = partials.unbind(2)
    highest = row_max.amax(0)
    base = torch.where(highest == -torch.inf, 0.0, highest)
    sum_exp = (total * torch.exp(row_max - base)).sum(0)
    logarithm = torch.log(sum_exp)
    loss = (highest - target_logit.amax(0)) + logarithm
    if labels.smoothing:
        spread = (highest - means.sum(0)) + logarithm
        loss = (1.0 - labels.smoothing) * loss + labels.smoothing * spread
    loss = torch.where(targets == labels.ignored, 0.0, loss)
    return loss, torch.stack((highest, sum_exp), dim=1)


def gradient(
    x: Tensor, targets: Tensor, statistics: Tensor, factor: Tensor, labels: Labels, in_place: bool
) -> Tensor:
    """Return dx [rows, width] in x's dtype; with `in_place`, written to x."""
    row_max, total = statistics[:, :1], statistics[:, 1:]
    probability = torch.exp(x.to(torch.float32) - row_max) / total
    column = torch.arange(x.shape[1], device=x.device)
    one_hot = (column == (targets - labels.first)[:, None]).to(torch.float32)
    target_probability = (1.0 - labels.smoothing) * one_hot + labels.smoothing / labels.total
    result = (probability - target_probability) * factor[:, None]
    result = torch.where((targets == labels.ignored)[:, None], 0.0, result)
    return x.copy_(result) if in_place else result.to(x.dtype)


BACKEND: Backend[CrossEntropyRequest] = Backend(
    "reference", bind=bind, batch_dependent=depends_on_gpu
)
