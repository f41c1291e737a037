"""Single-device attention: the backend table and the choice for each platform."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array, lax

from ....common.dispatch import Table
from ...runtime.checks import is_symbolic
from ..platforms import bind_by_platform, differentiable_by_platform
from . import cudnn, reference, triton
from .enums import AttnBiasType
from .masks import hidden_keys
from .request import AttentionOperands, AttentionRequest, Parts

__all__ = [
    "TABLE",
    "AttentionOperands",
    "AttentionRequest",
    "Parts",
    "attention",
    "attention_parts",
]

# The Triton kernels are preferred if both sequences have at most this length. Forward and backward on an H200, cuDNN
# 9.19 compared with the kernels: 4 x 128 tokens, 16 heads x 64: GPU 26 and 15 us, host 140 and 72 us; 4 x 512 tokens:
# GPU 69 and 56 us; 1024 tokens, 32 heads x 128: GPU 150 and 168 us.
SHORT = 512


def preference(request: AttentionRequest) -> tuple[str, ...]:
    """Backend names in order of preference: the fastest for the request's sizes first."""
    lengths = (request.queries, request.keys)
    # Symbolic jax.export lengths cannot be compared with a number.
    has_known_lengths = (
        request.tokens == "whole"
        and not request.layout.is_thd()
        and not any(map(is_symbolic, lengths))
    )
    if has_known_lengths and max(lengths) <= SHORT:
        return ("triton", "cudnn", "reference")
    return ("cudnn", "triton", "reference")


TABLE: Table[AttentionRequest] = Table(
    "jax_attention", (cudnn.BACKEND, triton.BACKEND, reference.BACKEND), order=preference
)


def attention(request: AttentionRequest, call: AttentionOperands) -> Array:
    """Compute attention with the backend for the platform that the program is lowered for.

    Args:
        request: Call shapes, dtypes and options.
        call: Call arrays.

    Returns:
        out [b, q, h, dv] in query's dtype.
    """
    calls = bind_by_platform(TABLE, lambda platform: request._replace(platform=platform))
    on_cuda, on_cpu = calls["cuda"], calls["cpu"]
    if on_cuda is on_cpu:
        return on_cpu(call)
    dense = request.rows == request.tokens == "whole" and not request.layout.is_thd()
    # Functions that close over arrays for dropout and for a score_mod.
    closures = (call.draw, call.dropped, call.modified)
    if (
        not dense
        or any(closure is not None for closure in closures)
        or not isinstance(call.scale, float)
    ):
        return lax.platform_dependent(cuda=lambda: on_cuda(call), default=lambda: on_cpu(call))
    # The call reads query, key, value, bias and sink only.
    cuda, default = (
        _WholeRows(run, request, call.bias_type, call.scale) for run in (on_cuda, on_cpu)
    )
    arrays = (call.query, call.key, call.value, call.bias, call.sink)
    return differentiable_by_platform(*arrays, cuda=cuda, default=default)


@dataclass(frozen=True)
class _WholeRows:
    """Full-row attention with one backend, as an array function that compares by value.

    The function rebuilds the `AttentionOperands`, whose callables would compare by identity.
    """

    run: Callable[[AttentionOperands], Array]
    request: AttentionRequest
    bias_type: AttnBiasType
    scale: float

    def __call__(
        self, query: Array, key: Array, value: Array, bias: Array | None, sink: Array | None
    ) -> Array:
        mask, window = self.request.mask, self.request.window
        hidden = functools.partial(hidden_keys, mask, window, None, query.shape[1], key.shape[1])
        return self.run(
            AttentionOperands(
                query=query,
                key=key,
                value=value,
                bias=bias,
                bias_type=self.bias_type,
                mask_type=mask,
                window=window,
                hidden=hidden,
                lengths=None,
                scale=self.scale,
                sink=sink,
                dropped=None,
                modified=None,
                bounds=_no_bounds,
                draw=None,
            )
        )


def _no_bounds() -> tuple[Array, Array, Array, Array]:
    raise AssertionError("only packed rows have bounds")


def attention_parts(request: AttentionRequest, scale: float) -> Parts:
    """Build the functions that compute one part of an attention without bias and sink; see `Parts`.

    Args:
        request: Shapes, dtypes and options for the full attention.
        scale: Factor of the scores.

    Returns:
        The forward and the backward function for a part, which choose the backend by platform.
    """
    calls = bind_by_platform(
        TABLE, lambda platform: request._replace(tokens="part", platform=platform)
    )

    def direction(name: str) -> Any:
        cuda, cpu = (
            functools.partial(getattr(calls[platform], name), scale=scale)
            for platform in ("cuda", "cpu")
        )
        if cuda.func is cpu.func:
            return cpu
        return functools.partial(lax.platform_dependent, cuda=cuda, default=cpu)

    return Parts(direction("forward"), direction("backward"))
