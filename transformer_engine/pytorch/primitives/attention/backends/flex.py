"""torch.nn.attention.flex_attention: kernels that torch.compile generates for any bias, mask and score_mod.

The first of equal calls compiles for many seconds. Bands without lengths become block masks, so
that hidden blocks are skipped; everything else goes into the function that modifies the scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from .....common.dispatch import Backend
from .....common.kernels.launch import unavailable_reason
from ....runtime.device_tables import keep_if_captured
from .. import layout, visible
from ..call import AttentionCall, AttentionInputs, AttentionResult, Feature
from ..passes import Differentiable

Change = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_SIZES = range(16, 257, 16)
# Not deterministic gradients: its backward adds in no fixed order.
TAKES = frozenset(Feature) - {
    Feature.BATCH_INVARIANT,
    Feature.EMPTY,
    Feature.FP8,
    Feature.SCORE_MOD_BPROP,
    Feature.FULL_DROPOUT,
    Feature.DROPOUT,
    Feature.OFF_BY_ONE,
    Feature.LEARNABLE,
    Feature.MAX_LOGIT,
    Feature.PAGED,
    Feature.DETERMINISTIC,
}


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if not (call.switches.flash or call.switches.fused):
        return "NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0"
    if call.device_type != "cuda":
        return f"it needs a CUDA device, the tensors are on {call.device_type}"
    if (
        reason := unavailable_reason(call.hardware) or call.hardware.lacks("triton kernels")
    ) is not None:
        return reason
    if call.dtype == torch.float64:
        return "float64"
    for size in (call.head_dim_qk, call.head_dim_v):
        if size not in _SIZES:
            return f"heads of size {size}; supported: multiples of 16 up to 256"
    return None


def run(call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
    """Compute the attention of a call, differentiable in q, k, v, bias and the tensors of score_mod."""
    q, k, v = layout.dense_qkv(call, inputs)
    blocks = _band(call, q.device) if call.mask.banded and not call.mask.padding else None
    out = _compiled()(
        q,
        k,
        v,
        score_mod=_change(call, inputs),
        block_mask=blocks,
        scale=call.scale,
        enable_gqa=call.groups != call.heads,
    )
    return AttentionResult(layout.from_bhsd(call, inputs, out).flatten(-2))


def _compiled() -> Callable[..., Any]:
    return flex_attention if torch.compiler.is_compiling() else _compiled_once()


@functools.cache
def _compiled_once() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _band(call: AttentionCall, device: torch.device) -> BlockMask:
    """Return the visible blocks of a band, for equally long sequences."""
    return keep_if_captured(_blocks_of_band(call, device), device)


@functools.lru_cache(maxsize=64)
def _blocks_of_band(call: AttentionCall, device: torch.device) -> BlockMask:
    left, right = call.mask.window
    shift = call.seqlen_kv - call.seqlen_q if call.mask.bottom_right else 0

    def inside(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        lag = j - i - shift
        if left < 0:
            return lag <= right
        if right < 0:
            return lag >= -left
        return (lag >= -left) & (lag <= right)

    return create_block_mask(inside, None, None, call.seqlen_q, call.seqlen_kv, device=device)


def _change(call: AttentionCall, inputs: AttentionInputs) -> Change | None:
    """Return the modification of one score: softcap, bias, score_mod, and -inf where lengths or masks hide it."""
    steps: list[Change] = []
    if call.softcap != 0.0:
        steps.append(_cap_score(call.softcap))
    if inputs.bias is not None:
        # A bias before the scale is added before the softcap.
        steps.insert(
            0 if call.bias == "pre_scale_bias" else len(steps), _bias_score(call, inputs.bias)
        )
    if call.bias == "alibi":
        steps.append(_alibi(call, inputs))
    if call.score_mod is not None:
        steps.append(call.score_mod)
    if call.mask.padding or call.mask.arbitrary:
        steps.append(_hidden(call, inputs))
    if not steps:
        return None

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for step in steps:
            score = step(score, b, h, i, j)
        return score

    return change


def _cap_score(softcap: float) -> Change:
    return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)


def _bias_score(call: AttentionCall, bias: Tensor) -> Change:
    factor = call.scale if call.bias == "pre_scale_bias" else 1.0
    full_bias = bias.expand(call.batch, call.heads, call.seqlen_q, call.seqlen_kv)

    return lambda score, b, h, i, j: score + full_bias[b, h, i, j] * factor


def _alibi(call: AttentionCall, inputs: AttentionInputs) -> Change:
    assert inputs.slopes is not None
    slopes = inputs.slopes.float().expand(call.batch, call.heads)
    # shifts: j - i on the diagonal, [b] int32.
    shift = visible.diagonal_shift(call, inputs)
    if isinstance(shift, Tensor):
        shifts = shift.flatten()
    else:
        shifts = torch.full((call.batch,), shift, dtype=torch.int32, device=inputs.q.device)

    return lambda score, b, h, i, j: score - slopes[b, h] * (j - i - shifts[b]).abs()


def _hidden(call: AttentionCall, inputs: AttentionInputs) -> Change:
    """Return a function that hides scores by mask tensors and lengths, and by a band if there are lengths."""
    visible_mask = visible.visible(call, inputs)
    assert visible_mask is not None
    full_mask = visible_mask.expand(call.batch, call.heads, call.seqlen_q, call.seqlen_kv)

    return lambda score, b, h, i, j: torch.where(full_mask[b, h, i, j], score, -float("inf"))


WHOLE = Differentiable("flex", run)
BACKEND = Backend(
    "flex", takes=TAKES, unsupported_reason=unsupported_reason, bind=lambda call: WHOLE
)
