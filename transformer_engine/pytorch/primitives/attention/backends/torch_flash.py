"""PyTorch's FlashAttention-2 kernels (aten::_flash_attention_forward): any NVIDIA GPU from Ampere on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .....common.dispatch import Backend
from ..call import Attended, AttentionCall, AttentionInputs, Feature, Gradients
from ..layout import batch_first
from ..packed import zero_padding
from ..passes import Passes
from .limits import FLASH, WITHOUT_DETERMINISM, unsupported_beyond_flash

_LARGEST_HEAD = 256
TAKES = FLASH | {Feature.DROPOUT}


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if not (call.switches.flash and call.switches.flash2):
        return "NVTE_FLASH_ATTN=0" if not call.switches.flash else "NVTE_FLASH_ATTN_V2=0"
    reason = unsupported_beyond_flash(call, _LARGEST_HEAD)
    if reason is not None:
        return reason
    if (reason := call.hardware.lacks("torch flash attention")) is not None:
        return reason
    if call.demands_determinism and not call.torch_deterministic:
        return WITHOUT_DETERMINISM
    return None


def forward(call: AttentionCall, inputs: AttentionInputs) -> Attended:
    """Compute attention by PyTorch's operator, in the layout of the call."""
    q, k, v = (batch_first(call.q_format, x) for x in inputs[:3])
    out, lse, rng_state, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        inputs.starts_q,
        inputs.starts_kv,
        call.seqlen_q,
        call.seqlen_kv,
        call.dropout,
        call.mask.causal,
        False,
        **_options(call),
    )
    out = batch_first(call.q_format, out).contiguous()
    if call.packed:
        assert inputs.starts_q is not None
        zero_padding(out, inputs.starts_q)
    return Attended(out, lse, rng_state.view(torch.int64) if call.dropout > 0.0 else None)


def backward(
    call: AttentionCall, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    """Compute gradients by PyTorch's operator."""
    q, k, v = (batch_first(call.q_format, x) for x in inputs[:3])
    if attended.rng_state is None:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
    else:
        state = attended.rng_state.view(torch.uint64)
    grads = torch.ops.aten._flash_attention_backward(
        batch_first(call.q_format, grad_output),
        q,
        k,
        v,
        batch_first(call.q_format, attended.output),
        attended.lse,
        inputs.starts_q,
        inputs.starts_kv,
        call.seqlen_q,
        call.seqlen_kv,
        call.dropout,
        call.mask.causal,
        state,
        torch.empty(0, dtype=torch.uint64, device=q.device),
        **_options(call),
    )
    gradients = Gradients(*(batch_first(call.q_format, x) for x in grads))
    if call.packed:
        assert inputs.starts_q is not None and inputs.starts_kv is not None
        zero_padding(gradients.q, inputs.starts_q)
        zero_padding(gradients.k, inputs.starts_kv)
        zero_padding(gradients.v, inputs.starts_kv)
    return gradients


def _options(call: AttentionCall) -> dict[str, Any]:
    left, right = call.mask.window
    if call.mask.causal or not call.mask.banded:
        return {"scale": call.scale}
    return {"scale": call.scale, "window_size_left": left, "window_size_right": right}


PASSES = Passes("torch_flash", forward, backward)
BACKEND = Backend(
    "torch_flash",
    takes=TAKES,
    unsupported_reason=unsupported_reason,
    bind=lambda call: PASSES,
    opaque=True,
)
