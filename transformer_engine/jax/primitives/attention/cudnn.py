"""cuDNN's fused attention, through the public call of jax.nn; packed rows through `cudnn_packed`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common import env
from ....common.dispatch import Backend
from ...platform import compute_capability
from ..custom_calls import switched_off
from . import cudnn_packed
from .alike import alike, apart
from .enums import AttnBiasType, AttnSoftmaxType
from .request import AttentionRequest, Call, Parts

_VARYING = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
_PACKED_CAPABILITY = 90
_MOST_HEAD_DIM = 128
# H200, cuDNN 9.19: 0.47 ms forward and 2.49 with backward for 2 x 4096 tokens of 16 heads, our kernels 0.65 and 4.50.
_WIDE_HEAD_DIM, _WIDE_CAPABILITY, _WIDE_TRAINING = 256, 90, 91900


def refuses(request: AttentionRequest) -> str | None:
    if (reason := request.refuses_tokens()) is not None:
        return reason
    if request.platform != "cuda":
        return f"it needs a CUDA device, the program is for {request.platform}"
    if (reason := switched_off("FusedAttnFwdPrimitive")) is not None:
        return reason
    if (reason := cudnn_packed.library_failure()) is not None:
        return reason
    if request.training and not env.flag(_VARYING):
        return f"gradients that differ from run to run, where {_VARYING}=0; jax asks cuDNN for no others"
    if request.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{request.dtype}; it takes bfloat16 and float16"
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
        return f"values of {request.value_dim} elements beside keys of {request.head_dim}"
    if request.head_dim % 8 or request.head_dim > (most := _most_head_dim(request.training)):
        return f"head_dim={request.head_dim}; it takes multiples of 8 up to {most}"
    if request.modified:
        return "a score_mod; jax.nn takes none"
    if request.tokens == "part" and request.window is not None:
        return "a part with a window; jax's call of cuDNN for parts has none"
    if request.tokens == "part" and (reason := cudnn_packed.part_failure()) is not None:
        return reason
    return _refuses_packed(request) if request.layout.is_thd() else None


def _most_head_dim(training: bool) -> int:
    if compute_capability() < _WIDE_CAPABILITY or (
        training and cudnn_packed.library_version() < _WIDE_TRAINING
    ):
        return _MOST_HEAD_DIM
    return _WIDE_HEAD_DIM


def _refuses_packed(request: AttentionRequest) -> str | None:
    if (reason := cudnn_packed.failure() or cudnn_packed.part_failure()) is not None:
        return reason
    if compute_capability() < _PACKED_CAPABILITY:
        return f"packed rows at compute capability {compute_capability() / 10} < 9.0"
    if request.segments == 1:
        return "packed rows of one sequence, which may begin anywhere"
    if request.mask.is_bottom_right():
        return "a bottom-right mask of packed rows"
    if request.window is not None or request.bias is not AttnBiasType.NO_BIAS:
        return "packed rows with a window or a bias"
    return None


def run(call: Call, packed: bool) -> Array:
    """out [b, q, h, d]; rows behind a length are zero."""
    if packed:
        causal = call.mask_type.is_causal()
        return cudnn_packed.attend(call.query, call.key, call.value, call.bounds(), call.scale, causal)
    bias = call.bias
    if bias is not None:
        # jax refuses one that is broadcast to queries or keys; to batches and heads it broadcasts itself.
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], call.query.shape[1], call.key.shape[1]))
    query, key, value, bias, lengths = alike(call.query, call.key, call.value, bias, call.lengths or ())
    queries, keys = lengths or (None, None)
    window = None if call.window is None or call.window[0] < 0 else (call.window[0], 0)
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
    out = apart(out, key.shape[2])
    if queries is None:
        return out
    inside = jnp.arange(out.shape[1])[None, :] < queries[:, None]
    return jnp.where(inside[:, :, None, None], out, 0)


def bind(request: AttentionRequest) -> Any:
    if request.tokens == "part":
        causal = request.mask.is_causal()
        return Parts(
            functools.partial(cudnn_packed.forward_part, causal=causal),
            functools.partial(cudnn_packed.backward_part, causal=causal),
        )
    return functools.partial(run, packed=request.layout.is_thd())


BACKEND = Backend[AttentionRequest]("cudnn", refuses=refuses, bind=bind)
