"""out = softmax(scale * q @ k.T + bias) @ v by kernels of our own, which keep no scores: what cuDNN refuses.

Packed rows [b, s, h, d] are one stretch of b * s tokens, in which every sequence has its place.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ...manual_axes import varying_alike
from ..kernels import call as call_kernel
from ..launching import refuses_on
from .enums import AttnBiasType, AttnMaskType
from .masks import Window
from .request import AttentionRequest, Call, Parts
from .triton_kernels import Backward, Facts, Forward, Given

_LARGEST_HEAD = 256
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def refuses(request: AttentionRequest) -> str | None:
    if (reason := request.refuses_tokens()) is not None:
        return reason
    if (reason := refuses_on(request.platform, "FusedAttnFwdPrimitive")) is not None:
        return reason
    if request.dtype not in _DTYPES:
        return f"{request.dtype}; it takes bfloat16, float16 and float32"
    if max(request.head_dim, request.value_dim) > _LARGEST_HEAD:
        return f"a head of {max(request.head_dim, request.value_dim)} elements > {_LARGEST_HEAD}"
    if request.modified:
        return "a score_mod; the kernels are fixed"
    if request.layout.is_thd() and request.bias is not AttnBiasType.NO_BIAS:
        return "a bias of packed rows; the kernels have one for whole sequences"
    if 0 in (request.queries, request.keys, request.query_heads, request.head_dim, request.value_dim):
        return "an array without elements"
    return None


def bind(request: AttentionRequest) -> Any:
    if request.tokens != "part":
        return functools.partial(run, request=request)
    facts = {"mask": request.mask, "window": request.window}
    return Parts(functools.partial(forward_part, **facts), functools.partial(backward_part, **facts))


def forward_part(
    query: Array, key: Array, value: Array, scale: float, mask: AttnMaskType, window: Window | None
) -> tuple[Array, Array]:
    """See `Parts`."""
    _, saved = _forward(_part(scale, mask, window), query, key, value, Given())
    *_, out, level = saved
    return out, level


def backward_part(
    query: Array, key: Array, value: Array, out: Array, level: Array, dout: Array, scale: float, mask: AttnMaskType,
    window: Window | None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """See `Parts`: the kernels' own gradients, of an output and a level that other keys have a share in."""
    saved = (query, key, value, Given(), out, level)
    dq, dk, dv, _ = _backward(_part(scale, mask, window), saved, dout)
    return dq, dk, dv


def _part(scale: float, mask: AttnMaskType, window: Window | None) -> Facts:
    left, right = (-1, -1) if window is None else window
    return Facts(float(scale), False, (left, 0 if mask.is_causal() else right), False, 0.0, False)


def run(call: Call, request: AttentionRequest) -> Array:
    """out [b, q, h, dv]; rows of no sequence are zero."""
    packed = request.layout.is_thd()
    masked = request.rows == "mask" or (request.rows == "segments" and not packed)
    left, right = (-1, -1) if call.window is None else call.window
    if call.mask_type.is_causal():
        right = 0
    if masked:
        left, right = -1, -1  # the mask holds it all
    facts = Facts(
        scale=float(call.scale),
        pre_scaled=call.bias_type is AttnBiasType.PRE_SCALE_BIAS,
        window=(left, right),
        bottom_right=call.mask_type.is_bottom_right() and not masked,
        dropout=0.0 if call.draw is None else request.dropout,
        packed=packed,
    )
    hidden = call.hidden() if masked else None
    bounds = call.bounds() if packed else None
    if bounds is None:
        lengths = call.lengths if request.rows == "lengths" and call.lengths is not None else (None, None)
        bounds = (*lengths, None, None)
    given = Given(
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
    return attend(facts, *varying_alike(call.query, call.key, call.value, given))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(facts: Facts, query: Array, key: Array, value: Array, given: Given) -> Array:
    """The kernels' attention; differentiable by query, key, value, and a bias and a sink that are given."""
    return _forward(facts, query, key, value, given)[0]


def _forward(facts: Facts, query: Array, key: Array, value: Array, given: Given) -> tuple[Array, Any]:
    kernel = Forward(facts, *given.described(query, key))
    out, lse = call_kernel(kernel, query, key, value, *given.there())
    return out, (query, key, value, given, out, lse)


def _backward(facts: Facts, saved: Any, dout: Array) -> tuple[Any, ...]:
    query, key, value, given, out, lse = saved
    kernel = Backward(facts, *given.described(query, key))
    arrays = (query, key, value, *given.there(), out, dout, lse)
    dq, dk, dv, *rest = call_kernel(kernel, *arrays)
    dbias = rest.pop(0) if given.bias is not None else None
    dsink = rest.pop(0).sum(axis=0) if given.sink is not None else None
    return dq, dk, dv, Given(bias=dbias, sink=dsink)


attend.defvjp(_forward, _backward)

BACKEND = Backend[AttentionRequest]("triton", refuses=refuses, bind=bind)
