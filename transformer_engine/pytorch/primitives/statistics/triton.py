"""The statistics on a GPU: one pass over matrix, codes and scales, and one over its partial results."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ....common.dispatch import Backend
from ...runtime.launching import perform, unsupported_casts
from ..operand import Operand
from .reference import StatisticsRequest, greatest

_SCALINGS = {"float32": "FLOAT_BLOCKS", "e8m0": "EXPONENT_BLOCKS", "e4m3": "TWO_LEVELS"}


def unsupported_reason(request: StatisticsRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if (reason := unsupported_casts(request.device, request.dtype)) is not None:
        return reason
    if 0 in request.shape:
        return f"{list(request.shape)} has no elements"
    form = request.format
    if form is not None and form.scale not in _SCALINGS:
        return f"{form.name} has {form.scale} scales; supported: {', '.join(_SCALINGS)}"
    if form is not None and form.row_scaled:
        return f"{form.name} has a second-level scale per row; supported: one per matrix"
    return None


def bind(request: StatisticsRequest) -> Callable[[Tensor, Operand | None, Tensor], None]:
    """(x, its codes, kept) -> None: kept takes the statistics in."""
    from ....common.kernels import statistics as kernels

    form, codes = request.format, kernels.Codes()
    if form is not None:
        assert request.element is not None
        blocks = form.block is not None
        codes = kernels.Codes(
            getattr(kernels, _SCALINGS[form.scale]) if blocks else kernels.ONE_SCALE,
            form.packing == 2,
            form.block or (1, 1),
            *greatest(request.element),
            (*request.codes, *(request.scales if blocks else (0, 0))),  # pyright: ignore[reportArgumentType]
        )
    program = kernels.statistics(request.shape, request.strides, codes)
    unit = None if form is None else form.unit_amax

    def measure(x: Tensor, operand: Operand | None, accumulated: Tensor) -> None:
        if operand is None:
            perform(program, (x, None, None, None, accumulated))
            return
        second = None if unit is None or operand.amax is None else _as_vector(operand.amax / unit)
        perform(program, (x, operand.codes, _as_vector(operand.scale), second, accumulated))

    return measure


def _as_vector(scale: Tensor | None) -> Tensor | None:
    """Return a number without dimensions as [1], because a kernel needs an address of elements."""
    return scale if scale is None or scale.dim() else scale.view(1)


BACKEND: Backend[StatisticsRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind
)
