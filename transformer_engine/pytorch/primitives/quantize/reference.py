"""Every format in plain torch operations: float32, literal, on any device, for any request."""

from __future__ import annotations

from torch import Tensor

from ....common.dispatch import Backend
from .format_row import Given
from .formats import FORMATS
from .spec import Quantized, QuantizeSpec, Request


def refuses(request: Request) -> str | None:
    """Never."""
    return None


def run(
    x: Tensor,
    spec: QuantizeSpec,
    scale: Tensor | None,
    amax: Tensor | None,
    amax_t: Tensor | None,
    random: tuple[Tensor, Tensor] | None,
    record: Tensor | None = None,
) -> Quantized:
    """x [M, K] -> the directions that spec asks for."""
    return FORMATS[spec.format.name].quantize(x, spec, Given(scale, amax, amax_t, random, record))


BACKEND = Backend[Request]("reference", run, refuses)
