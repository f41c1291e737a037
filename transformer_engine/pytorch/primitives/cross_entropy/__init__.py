"""loss [M] = ln(sum(exp(x [M, V]))) - x[target], its gradient, and the backend table.

In three steps, because other ranks may hold the rest of a row: local column statistics, losses from
statistics of all columns, local column gradients. x, contiguous, is read once for the loss and once
for the gradient; the loss saves two numbers per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Operator, Table
from ....common.operation_settings import Labels
from ...runtime.launching import operator
from . import reference, triton
from .reference import CrossEntropyRequest, count_strips

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
    """Compute partial statistics float32 [S, M, 4] of x [M, V] and targets int64 [M], for each of S column strips.

    They are max, sum(exp(x - max)), x[target] (-inf outside the strip) and sum(x / vocabulary).
    """
    key = ("statistics", *x.shape, x.dtype, x.device, labels, count_strips(*x.shape))
    return TABLE.bound(key)(x, targets)


def cross_entropy_losses(
    partials: Tensor, targets: Tensor, labels: Labels
) -> tuple[Tensor, Tensor]:
    """Combine partials [S, M, 4] into (loss float32 [M], statistics float32 [M, 2]).

    The statistics are max and sum(exp(x - max)) over whole rows. A target outside all strips has an infinite loss.
    """
    strips, rows, _ = partials.shape
    key = ("losses", rows, labels.total, torch.float32, partials.device, labels, strips)
    return TABLE.bound(key)(partials, targets)


def cross_entropy_gradient(
    x: Tensor,
    targets: Tensor,
    statistics: Tensor,
    factor: Tensor,
    labels: Labels,
    in_place: bool = False,
) -> Tensor:
    """Return dx [M, V] = (softmax(x) - wanted) * factor in x's dtype.

    Args:
        x: Logits [M, V].
        targets: Class indices int64 [M].
        statistics: Result from `cross_entropy_losses`.
        factor: float32 [M], or [1] for all rows.
        labels: Ignored label, smoothing and class counts, which define the target distribution.
        in_place: Write the gradient to x, which is returned.
    """
    per_row = factor.shape[0] != 1
    key = ("gradient", *x.shape, x.dtype, x.device, labels, 1, per_row, in_place)
    return TABLE.bound(key)(x, targets, statistics, factor)


def cross_entropy_rescaled(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply contiguous x [.., V] in place by factor float32 [1]; a kernel reads x only if the factor is not 1."""
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    key = ("rescale", rows, x.shape[-1], x.dtype, x.device, _NO_LABELS)
    return TABLE.bound(key)(x, factor)


_NO_LABELS = Labels(ignored=0, smoothing=0.0, first=0, total=0)
_FACTS = "int ignored, float smoothing, int first, int total"


_OPERATORS = {
    "statistics": operator(
        f"cross_entropy_statistics(Tensor x, Tensor targets, *, {_FACTS}) -> Tensor",
        lambda x, targets, **labels: cross_entropy_statistics(x, targets, Labels(**labels)),
        lambda x, targets, **labels: x.new_empty(
            (count_strips(*x.shape), x.shape[0], 4), dtype=torch.float32
        ),
    ),
    "losses": operator(
        f"cross_entropy_losses(Tensor partials, Tensor targets, *, {_FACTS}) -> (Tensor, Tensor)",
        lambda partials, targets, **labels: cross_entropy_losses(
            partials, targets, Labels(**labels)
        ),
        lambda partials, targets, **labels: (
            partials.new_empty(partials.shape[1]),
            partials.new_empty(partials.shape[1], 2),
        ),
    ),
    "gradient": operator(
        "cross_entropy_gradient(Tensor x, Tensor targets, Tensor statistics, Tensor factor, *, "
        f"{_FACTS}) -> Tensor",
        lambda x, targets, statistics, factor, **labels: cross_entropy_gradient(
            x, targets, statistics, factor, Labels(**labels)
        ),
        lambda x, targets, statistics, factor, **labels: x.new_empty(x.shape),
    ),
    "rescale": operator(
        f"cross_entropy_rescaled(Tensor x, Tensor factor, *, {_FACTS}) -> Tensor",
        lambda x, factor, **labels: cross_entropy_rescaled(x.clone(), factor),
        lambda x, factor, **labels: x.new_empty(x.shape),
    ),
}


TABLE: Table[CrossEntropyRequest] = Table(
    "cross_entropy",
    (triton.BACKEND, reference.BACKEND),
    describe=CrossEntropyRequest,
    # The operators do not write to their arguments: a traced program never requests a gradient in place.
    operator=lambda request: _OPERATORS[request.operation].given(**request.labels._asdict()),
)
