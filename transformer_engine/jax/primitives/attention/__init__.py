"""Attention of one device: vocabulary, sequences, masks, and the table of what computes it."""

from __future__ import annotations

import functools
from typing import Any

from jax import Array, lax

from ....common.dispatch import Table
from ..platforms import chosen
from . import cudnn, reference, triton
from .request import AttentionRequest, Call, Parts

__all__ = ["TABLE", "AttentionRequest", "Call", "Parts", "attention", "attention_parts"]

TABLE: Table[AttentionRequest] = Table("jax_attention", (cudnn.BACKEND, triton.BACKEND, reference.BACKEND))


def attention(request: AttentionRequest, call: Call) -> Array:
    """out [b, q, h, dv], by the backend of every platform that the program may be lowered for."""
    calls = chosen(TABLE, lambda platform: request._replace(platform=platform))
    on_gpu, elsewhere = calls["cuda"], calls["cpu"]
    if on_gpu is elsewhere:
        return elsewhere(call)
    return lax.platform_dependent(cuda=lambda: on_gpu(call), default=lambda: elsewhere(call))


def attention_parts(request: AttentionRequest, scale: float) -> Parts:
    """How parts of an attention, of no bias and no sink, are computed on every platform: see `Parts`."""
    calls = chosen(TABLE, lambda platform: request._replace(tokens="part", platform=platform))
    on_gpu, elsewhere = calls["cuda"], calls["cpu"]

    def computed(name: str) -> Any:
        there, here = (functools.partial(getattr(one, name), scale=scale) for one in (on_gpu, elsewhere))
        if there.func is here.func:
            return here
        return functools.partial(lax.platform_dependent, cuda=there, default=here)

    return Parts(computed("forward"), computed("backward"))
