"""Attention on one device: vocabulary, sequences, masks, and the table of its backends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array, lax

from ....common.dispatch import Table
from ...checks import is_symbolic
from ..platforms import chosen, differentiable_by_platform
from . import cudnn, reference, triton
from .enums import AttnBiasType
from .masks import hidden_keys
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
    """Compute attention by the backend of the platform that the program is lowered for.

    Args:
        request: Shapes, dtypes and options of the call.
        call: Arrays of the call.

    Returns:
        out [b, q, h, dv] in query's dtype.
    """
    calls = chosen(TABLE, lambda platform: request._replace(platform=platform))
    on_gpu, elsewhere = calls["cuda"], calls["cpu"]
    if on_gpu is elsewhere:
        return elsewhere(call)
    if not _is_closed(request, call):
        return lax.platform_dependent(cuda=lambda: on_gpu(call), default=lambda: elsewhere(call))
    cuda, default = (_WholeRows(run, request, call.bias_type, call.scale) for run in (on_gpu, elsewhere))
    arrays = (call.query, call.key, call.value, call.bias, call.sink)
    return differentiable_by_platform(*arrays, cuda=cuda, default=default)


def _is_closed(request: AttentionRequest, call: Call) -> bool:
    """Whether query, key, value, bias and sink are all the arrays that the call reads."""
    return (
        request.rows == "whole"
        and request.tokens == "whole"
        and not request.layout.is_thd()
        and call.draw is call.dropped is call.modified is None
        and isinstance(call.scale, float)
    )


@dataclass(frozen=True)
class _WholeRows:
    """Attention of whole rows by one backend, as a function of its arrays that compares by value."""

    run: Callable[[Call], Array]
    request: AttentionRequest
    bias_type: AttnBiasType
    scale: float

    def __call__(
        self, query: Array, key: Array, value: Array, bias: Array | None, sink: Array | None
    ) -> Array:
        mask, window = self.request.mask, self.request.window
        hidden = functools.partial(hidden_keys, mask, window, None, query.shape[1], key.shape[1])
        return self.run(
            Call(
                query, key, value, bias, self.bias_type, mask, window, hidden, None, self.scale, sink, None, None,
                _no_bounds, None,
            )
        )  # fmt: skip


def _no_bounds() -> tuple[Array, Array, Array, Array]:
    raise AssertionError("only packed rows have bounds")


def attention_parts(request: AttentionRequest, scale: float) -> Parts:
    """Choose how parts of an attention without bias and sink are computed on every platform; see `Parts`.

    Args:
        request: Shapes, dtypes and options of the whole attention.
        scale: Factor of the scores.

    Returns:
        The forward and the backward function of a part.
    """
    calls = chosen(TABLE, lambda platform: request._replace(tokens="part", platform=platform))
    on_gpu, elsewhere = calls["cuda"], calls["cpu"]

    def computed(name: str) -> Any:
        there, here = (functools.partial(getattr(one, name), scale=scale) for one in (on_gpu, elsewhere))
        if there.func is here.func:
            return here
        return functools.partial(lax.platform_dependent, cuda=there, default=here)

    return Parts(computed("forward"), computed("backward"))
