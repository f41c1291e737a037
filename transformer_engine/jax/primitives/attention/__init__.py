"""Attention of one device: vocabulary, sequences, masks, and the table of what computes it."""

from __future__ import annotations

from jax import Array, lax

from ....common.dispatch import Table
from ..platforms import chosen
from . import cudnn, reference, triton
from .request import AttentionRequest, Call

__all__ = ["TABLE", "AttentionRequest", "Call", "attention"]

TABLE: Table[AttentionRequest] = Table("jax_attention", (cudnn.BACKEND, triton.BACKEND, reference.BACKEND))


def attention(request: AttentionRequest, call: Call) -> Array:
    """out [b, q, h, dv], by the backend of every platform that the program may be lowered for."""
    calls = chosen(TABLE, lambda platform: request._replace(platform=platform))
    on_gpu, elsewhere = calls["cuda"], calls["cpu"]
    if on_gpu is elsewhere:
        return elsewhere(call)
    return lax.platform_dependent(cuda=lambda: on_gpu(call), default=lambda: elsewhere(call))
