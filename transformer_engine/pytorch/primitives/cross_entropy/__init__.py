"""loss [M] = ln(sum(exp(x [M, V]))) - x[target], its gradient, and the table of backends.

In three steps, because other ranks may hold the rest of a row: statistics of the columns that are here, losses from the
statistics of all columns, the gradient of the columns that are here. x, contiguous, is read once for the loss and once
for the gradient; between the two stand two numbers a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Operator, Table
from ....common.operation_settings import Labels
from ...runtime.launching import operator
from . import reference, triton
from .request import CrossEntropyRequest, strips_of

__all__ = [
    "TABLE",
    "CrossEntropyRequest",
    "Labels",
    "cross_entropy_gradient",
    "cross_entropy_losses",
    "cross_entropy_rescaled",
    "cross_entropy_statistics",
]


def cross_entropy_statistics(x: Tensor, targets: Tensor, labels: Labels) -> Tensor:
    """partials float32 [S, M, 4] of x [M, V], targets int64 [M]: of each of S strips of columns, S
    being the backend's, max, sum(exp(x - max)),
    x[target] (-inf where it is not there), sum(x / vocabulary)."""
    key = ("statistics", *x.shape, x.dtype, x.device, labels, strips_of(*x.shape))
    return TABLE.bound(key)(x, targets)


def cross_entropy_losses(partials: Tensor, targets: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """(loss float32 [M], statistics float32 [M, 2]: max and sum(exp(x - max)) of whole rows) of partials [S, M, 4].

    A target that no strip holds has an infinite loss.
    """
    strips, rows, _ = partials.shape
    key = ("losses", rows, labels.total, torch.float32, partials.device, labels, strips)
    return TABLE.bound(key)(partials, targets)


def cross_entropy_gradient(
    x: Tensor, targets: Tensor, statistics: Tensor, factor: Tensor, labels: Labels, in_place: bool = False
) -> Tensor:
    """dx [M, V] = (softmax(x) - wanted) * factor in x's dtype; factor: float32 [M], or [1] for all rows.

    in_place   x receives its gradient and is returned
    """
    per_row = factor.shape[0] != 1
    key = ("gradient", *x.shape, x.dtype, x.device, labels, 1, per_row, in_place)
    return TABLE.bound(key)(x, targets, statistics, factor)


def cross_entropy_rescaled(x: Tensor, factor: Tensor) -> Tensor:
    """x [.., V] contiguous, multiplied in place by factor float32 [1]; a kernel reads it only if that is not 1."""
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    key = ("rescale", rows, x.shape[-1], x.dtype, x.device, _NO_LABELS)
    return TABLE.bound(key)(x, factor)


_NO_LABELS = Labels(0, 0.0, 0, 0)
_FACTS = "int ignored, float smoothing, int first, int total"


def _statistics(x: Tensor, targets: Tensor, **labels: int | float) -> Tensor:
    return cross_entropy_statistics(x, targets, Labels(**labels))  # pyright: ignore[reportArgumentType]


def _statistics_results(x: Tensor, targets: Tensor, **labels: int | float) -> Tensor:
    return x.new_empty((strips_of(*x.shape), x.shape[0], 4), dtype=torch.float32)


def _losses(partials: Tensor, targets: Tensor, **labels: int | float) -> tuple[Tensor, Tensor]:
    return cross_entropy_losses(partials, targets, Labels(**labels))  # pyright: ignore[reportArgumentType]


def _losses_results(partials: Tensor, targets: Tensor, **labels: int | float) -> tuple[Tensor, Tensor]:
    rows = partials.shape[1]
    return partials.new_empty(rows), partials.new_empty(rows, 2)


def _gradient(
    x: Tensor, targets: Tensor, statistics: Tensor, factor: Tensor, **labels: int | float
) -> Tensor:
    return cross_entropy_gradient(x, targets, statistics, factor, Labels(**labels))  # pyright: ignore[reportArgumentType]


def _gradient_results(
    x: Tensor, targets: Tensor, statistics: Tensor, factor: Tensor, **labels: int | float
) -> Tensor:
    return x.new_empty(x.shape)


def _rescaled(x: Tensor, factor: Tensor, **labels: int | float) -> Tensor:
    return cross_entropy_rescaled(x.clone(), factor)


def _rescaled_results(x: Tensor, factor: Tensor, **labels: int | float) -> Tensor:
    return x.new_empty(x.shape)


_OPERATORS = {
    "statistics": operator(
        f"cross_entropy_statistics(Tensor x, Tensor targets, *, {_FACTS}) -> Tensor",
        _statistics,
        _statistics_results,
    ),
    "losses": operator(
        f"cross_entropy_losses(Tensor partials, Tensor targets, *, {_FACTS}) -> (Tensor, Tensor)",
        _losses,
        _losses_results,
    ),
    "gradient": operator(
        "cross_entropy_gradient(Tensor x, Tensor targets, Tensor statistics, Tensor factor, *, "
        f"{_FACTS}) -> Tensor",
        _gradient,
        _gradient_results,
    ),
    "rescale": operator(
        f"cross_entropy_rescaled(Tensor x, Tensor factor, *, {_FACTS}) -> Tensor",
        _rescaled,
        _rescaled_results,
    ),
}


def _operator_of(request: CrossEntropyRequest) -> Operator:
    """Of operations that write nothing they are given: who traces asks for no gradient in place."""
    return _OPERATORS[request.operation].given(**request.labels._asdict())


TABLE: Table[CrossEntropyRequest] = Table(
    "cross_entropy", (triton.BACKEND, reference.BACKEND), describe=CrossEntropyRequest, operator=_operator_of
)
