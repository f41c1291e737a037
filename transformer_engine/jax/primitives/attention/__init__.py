"""Attention of one device: vocabulary, sequences, masks, and the table of what computes it."""

from __future__ import annotations

import functools
from typing import Any

from jax import Array, lax

from ....common.dispatch import Table
from ...checks import is_symbolic
from ..platforms import chosen
from . import cudnn, reference, triton
from .request import AttentionRequest, Call, Parts

__all__ = ["TABLE", "AttentionRequest", "Call", "Parts", "attention", "attention_parts"]

# Both sequences up to this length: Triton kernels are preferred. H200, forward and backward, cuDNN 9.19 against the
# kernels: 4 x 128 tokens of 16 heads of 64, 26 us on the GPU against 15, and 140 us on the host against 72.
# 4 x 512 tokens, 69 us on the GPU against 56; 1024 tokens of 32 heads of 128, 150 against 168.
SHORT = 512


def preference(request: AttentionRequest) -> tuple[str, ...]:
    """Return the names of the backends, the fastest first for requests of this size."""
    lengths = (request.queries, request.keys)
    # Symbolic lengths of jax.export have no order among them.
    known = request.tokens == "whole" and not request.layout.is_thd() and not any(map(is_symbolic, lengths))
    if known and max(lengths) <= SHORT:
        return ("triton", "cudnn", "reference")
    return ("cudnn", "triton", "reference")


TABLE: Table[AttentionRequest] = Table(
    "jax_attention", (cudnn.BACKEND, triton.BACKEND, reference.BACKEND), order=preference
)


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
