"""Every format in plain torch operations: float32, literal, on any device, for any request."""

from __future__ import annotations

from torch import Tensor

from ....common.dispatch import Backend
from .format_row import Given, PlannedCall
from .formats import FORMATS
from .spec import OPTIONS, Quantized, Request


def _bind(request: Request) -> PlannedCall:
    spec, encode = request.spec, FORMATS[request.spec.format.name].quantize

    def call(
        x: Tensor,
        multiplier: Tensor | None,
        amax: Tensor | None,
        amax_t: Tensor | None,
        record: Tensor | None,
        random: tuple[Tensor, Tensor] | None = None,
    ) -> Quantized:
        return encode(x, spec, Given(multiplier, amax, amax_t, random, record))

    return call


BACKEND: Backend[Request] = Backend("reference", takes=frozenset(OPTIONS), bind=_bind)
