"""cuDNN's fused attention, through the public function in jax.nn; packed rows with `cudnn_packed`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common import env
from ....common.dispatch import Backend
from ...runtime.platform import hardware
from ..launching import disabled_reason
from . import cudnn_packed
from .alignment import align, isolate
from .enums import AttnBiasType, AttnSoftmaxType
from .request import AttentionOperands, AttentionRequest, Parts, spread_unsupported_reason

_VARYING = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
_HEAD_DIM = 128
_WIDE_HEAD_DIM, _WIDE_TRAINING = 256, 91900


def unsupported_reason(request: AttentionRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if (reason := spread_unsupported_reason(request)) is not None:
        return reason
    if request.platform != "cuda":
        return f"it needs a CUDA device, the program is for {request.platform}"
    if (reason := disabled_reason("FusedAttnFwdPrimitive")) is not None:
        return reason
    if (reason := cudnn_packed.library_failure()) is not None:
        return reason
    if request.training and not env.flag(_VARYING):
        return f"gradients that differ from run to run, where {_VARYING}=0; jax asks cuDNN for no others"
    if request.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{request.dtype}; supported: bfloat16 and float16"
    if request.softmax is not AttnSoftmaxType.VANILLA_SOFTMAX:
        return f"a sink ({request.softmax.name}); jax.nn has none"
    if request.bias is AttnBiasType.PRE_SCALE_BIAS:
        return "a bias before the scale; jax.nn adds it after"
    if not request.layout.is_thd() and request.rows not in ("whole", "lengths"):
        return f"rows given by {request.rows}; jax.nn takes whole rows or lengths"
    if request.mask.is_bottom_right() and request.queries != request.keys:
        return f"a bottom-right mask of {request.queries} queries and {request.keys} keys"
    if request.window is not None and request.window[1] not in (0, -1):
        return f"a window of {request.window[1]} tokens to the right"
    if request.window is not None and not request.mask.is_causal():
        return "a window without a causal mask"
    if request.training and request.dropout > 0:
        return f"dropout of {request.dropout}; jax.nn draws none from a run-time key"
    if request.value_dim != request.head_dim:
        return f"values of {request.value_dim} elements with keys of {request.head_dim}"
    # H200, cuDNN 9.19, 2 x 4096 tokens, 16 wide heads: forward 0.47 ms, with backward 2.49; our kernels 0.65 and 4.50.
    wide = hardware().backward_head == _WIDE_HEAD_DIM
    if wide and request.training:
        wide = cudnn_packed.library_version() >= _WIDE_TRAINING
    most = _WIDE_HEAD_DIM if wide else _HEAD_DIM
    if request.head_dim % 8 or request.head_dim > most:
        return f"head_dim={request.head_dim}; supported: multiples of 8 up to {most}"
    if request.modified:
        return "a score_mod; jax.nn does not support it"
    if request.max_logit:
        return "the largest logits; jax.nn does not return them"
    if request.tokens == "part" and request.window is not None:
        return "a part with a window; jax's call of cuDNN for parts has none"
    if request.tokens == "part" and (reason := cudnn_packed.part_failure()) is not None:
        return reason
    return _packed_unsupported_reason(request) if request.layout.is_thd() else None


def _packed_unsupported_reason(request: AttentionRequest) -> str | None:
    if (reason := cudnn_packed.failure() or cudnn_packed.part_failure()) is not None:
        return reason
    if (reason := hardware().lacks("cudnn packed attention")) is not None:
        return f"packed rows: {reason}"
    if request.segments == 1:
        return "packed rows of one sequence, which may begin anywhere"
    if request.mask.is_bottom_right():
        return "a bottom-right mask of packed rows"
    if request.window is not None or request.bias is not AttnBiasType.NO_BIAS:
        return "packed rows with a window or a bias"
    return None


def run(call: AttentionOperands, packed: bool) -> Array:
    """Compute out [b, q, h, d]; tokens after a length are zero."""
    if packed:
        causal = call.mask_type.is_causal()
        return cudnn_packed.attend(
            call.query, call.key, call.value, call.bounds(), call.scale, causal
        )
    bias = call.bias
    if bias is not None:
        # JAX rejects a bias that broadcasts over queries or keys; it broadcasts over batches and heads itself.
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], call.query.shape[1], call.key.shape[1]))
    query, key, value, bias, lengths = align(
        call.query, call.key, call.value, bias, call.lengths or ()
    )
    queries, keys = lengths or (None, None)
    window = None
    if call.window is not None and call.window[0] >= 0:
        window = (min(call.window[0], max(call.query.shape[1], call.key.shape[1])), 0)
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        scale=call.scale,
        is_causal=call.mask_type.is_causal(),
        query_seq_lengths=queries,
        key_value_seq_lengths=keys,
        local_window_size=window,
        implementation="cudnn",
    )
    isolated: Any = isolate(out, key.shape[2])
    if queries is None:
        return isolated
    inside = jnp.arange(isolated.shape[1])[None, :] < queries[:, None]
    return jnp.where(inside[:, :, None, None], isolated, 0)


def bind(request: AttentionRequest) -> Any:
    if request.tokens == "part":
        causal = request.mask.is_causal()
        return Parts(
            functools.partial(cudnn_packed.forward_part, causal=causal),
            functools.partial(cudnn_packed.backward_part, causal=causal),
        )
    return functools.partial(run, packed=request.layout.is_thd())


BACKEND = Backend[AttentionRequest]("cudnn", unsupported_reason=unsupported_reason, bind=bind)
