"""out = softmax(scale * q @ k.T + bias) @ v with our kernels, which store no scores.

Packed rows [b, s, h, d] are b * s contiguous tokens for the kernels; every sequence has a start and a length.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ....common.kernels.launch import LARGEST_GRID
from ...runtime.manual_axes import align_manual_axes
from ..kernels import call as call_kernel
from ..launching import platform_failure
from .enums import AttnBiasType, AttnMaskType
from .masks import Window
from .request import AttentionOperands, AttentionRequest, Parts, spread_unsupported_reason
from .triton_kernels import AttentionBackward, AttentionForward, AttentionOptions, OptionalOperands

_LARGEST_HEAD = 256
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def unsupported_reason(request: AttentionRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if (reason := spread_unsupported_reason(request)) is not None:
        return reason
    if (reason := platform_failure(request.platform, "FusedAttnFwdPrimitive")) is not None:
        return reason
    if request.dtype not in _DTYPES:
        return f"{request.dtype}; supported: bfloat16, float16 and float32"
    if max(request.head_dim, request.value_dim) > _LARGEST_HEAD:
        return f"a head of {max(request.head_dim, request.value_dim)} elements > {_LARGEST_HEAD}"
    if request.modified:
        return "a score_mod; the kernels are fixed"
    if request.layout.is_thd() and request.bias is not AttnBiasType.NO_BIAS:
        return "a bias of packed rows; the kernels have one for whole sequences"
    sequences = request.batch * (request.segments if request.layout.is_thd() else 1)
    if sequences > LARGEST_GRID[2]:
        return f"{sequences} sequences > {LARGEST_GRID[2]}, the most programs that CUDA starts on that axis of a grid"
    if 0 in (
        request.queries,
        request.keys,
        request.query_heads,
        request.head_dim,
        request.value_dim,
    ):
        return "an array without elements"
    return None


def forward_part(
    query: Array, key: Array, value: Array, scale: float, mask: AttnMaskType, window: Window | None
) -> tuple[Array, Array]:
    """See `Parts`."""
    _, saved = _forward(_part(scale, mask, window), query, key, value, OptionalOperands())
    *_, out, level = saved
    return out, level


def backward_part(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    level: Array,
    dout: Array,
    scale: float,
    mask: AttnMaskType,
    window: Window | None,
) -> tuple[Array, Array, Array]:
    """See `Parts`: the gradients of the kernels, for an output and a level that also depend on other keys."""
    saved = (query, key, value, OptionalOperands(), out, level)
    dq, dk, dv, _ = _backward(_part(scale, mask, window), saved, dout)
    return dq, dk, dv


def _part(scale: float, mask: AttnMaskType, window: Window | None) -> AttentionOptions:
    left, right = (-1, -1) if window is None else window
    return AttentionOptions(
        float(scale),
        False,
        (left, 0 if mask.is_causal() else right),
        bottom_right=False,
        dropout=0.0,
        packed=False,
    )


def run(call: AttentionOperands, request: AttentionRequest) -> Any:
    """Compute out [b, q, h, dv], and the largest logits [h] if request.max_logit; tokens outside sequences are zero."""
    packed = request.layout.is_thd()
    masked = request.rows == "mask" or (request.rows == "segments" and not packed)
    left, right = (-1, -1) if call.window is None else call.window
    if call.mask_type.is_causal():
        right = 0
    if masked:
        left, right = -1, -1  # the mask contains the window
    options = AttentionOptions(
        scale=float(call.scale),
        pre_scaled=call.bias_type is AttnBiasType.PRE_SCALE_BIAS,
        window=(left, right),
        bottom_right=call.mask_type.is_bottom_right() and not masked,
        dropout=0.0 if call.draw is None else request.dropout,
        packed=packed,
        max_logit=request.max_logit,
    )
    hidden = call.hidden() if masked else None
    bounds = call.bounds() if packed else None
    if bounds is None:
        lengths = (
            call.lengths if request.rows == "lengths" and call.lengths is not None else (None, None)
        )
        bounds = (*lengths, None, None)
    operands = OptionalOperands(
        bounds[0],
        bounds[1],
        bounds[2],
        bounds[3],
        None if hidden is None else hidden.astype(jnp.uint8),
        call.bias,
        None if call.sink is None else jnp.broadcast_to(call.sink.ravel(), (request.query_heads,)),
        None if call.draw is None else call.draw(),
        None if call.draw is None else jnp.arange(call.query.shape[0], dtype=jnp.int32),
    )
    result: Any = attend(options, *align_manual_axes(call.query, call.key, call.value, operands))
    if not request.max_logit:
        return result
    out, largest = result
    return out, largest.max(axis=0).astype(out.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    options: AttentionOptions, query: Array, key: Array, value: Array, operands: OptionalOperands
) -> Any:
    """Compute attention with the kernels; differentiable in query, key, value, and a given bias and sink.

    With options.max_logit the result is a pair: out and the largest logits, float32 [b, h], which have no gradient.
    """
    return _forward(options, query, key, value, operands)[0]


def _forward(
    options: AttentionOptions, query: Array, key: Array, value: Array, operands: OptionalOperands
) -> tuple[Any, Any]:
    kernel = AttentionForward(options, *operands.described(query, key))
    out, lse, *largest = call_kernel(kernel, query, key, value, *operands.present())
    return (out, *largest) if largest else out, (query, key, value, operands, out, lse)


def _backward(options: AttentionOptions, saved: Any, cotangent: Any) -> tuple[Any, ...]:
    query, key, value, operands, out, lse = saved
    dout = cotangent[0] if options.max_logit else cotangent
    kernel = AttentionBackward(options, *operands.described(query, key))
    arrays = (query, key, value, *operands.present(), out, dout, lse)
    dq, dk, dv, *rest = call_kernel(kernel, *arrays)
    dbias = rest.pop(0) if operands.bias is not None else None
    dsink = rest.pop(0).sum(axis=0) if operands.sink is not None else None
    return dq, dk, dv, OptionalOperands(bias=dbias, sink=dsink)


attend.defvjp(_forward, _backward)


def bind(request: AttentionRequest) -> Any:
    if request.tokens != "part":
        return functools.partial(run, request=request)
    options = {"mask": request.mask, "window": request.window}
    return Parts(
        functools.partial(forward_part, **options), functools.partial(backward_part, **options)
    )


BACKEND = Backend[AttentionRequest]("triton", unsupported_reason=unsupported_reason, bind=bind)
