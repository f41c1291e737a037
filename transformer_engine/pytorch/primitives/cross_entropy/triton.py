"""Cross entropy on GPUs: logits read once for the loss, read and written once for the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ....common.dispatch import Backend
from ...runtime.launching import DTYPE_NAMES, run, unsupported_elementwise
from .reference import CrossEntropyRequest

_LIMIT = 1 << 30  # rows and columns are numbered in 32 bits


def unsupported_reason(request: CrossEntropyRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if max(request.rows, request.width) >= _LIMIT:
        return f"{request.rows} rows of {request.width} columns reach {_LIMIT}"
    if 0 in (request.rows, request.width):
        return "the logits are empty"
    return unsupported_elementwise(request.device, request.dtype)


def bind(request: CrossEntropyRequest) -> Callable[..., Any]:
    """Return a callable with the same arguments and results as `reference.bind`."""
    from ....common.kernels import cross_entropy as kernels

    rows, width = request.rows, request.width
    labels = request.labels
    if request.operation == "statistics":
        statistics = kernels.statistics(rows, width, request.strips, labels)
        return lambda x, targets: run(statistics, (x, targets))[0]
    if request.operation == "losses":
        losses = kernels.losses(rows, request.strips, labels)
        return lambda partials, targets: tuple(run(losses, (partials, targets)))
    if request.operation == "rescale":
        rescale = kernels.rescale(rows, width)

        def rescale_gradient(x: Tensor, factor: Tensor) -> Tensor:
            run(rescale, (x, factor))
            return x

        return rescale_gradient
    dtype, in_place = DTYPE_NAMES[request.dtype], request.in_place
    launch = kernels.gradient(rows, width, labels, dtype, request.per_row, in_place)

    def gradient(x: Tensor, targets: Tensor, statistics: Tensor, factor: Tensor) -> Tensor:
        (dx,) = run(launch, (x, targets, statistics, factor))
        return x if in_place else dx

    return gradient


BACKEND: Backend[CrossEntropyRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind, opaque=True
)
