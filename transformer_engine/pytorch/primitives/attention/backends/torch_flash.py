"""o = the FlashAttention-2 kernels inside PyTorch (aten::_flash_attention_forward): any NVIDIA GPU from Ampere on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .....common.dispatch import Backend
from ..layout import batch_first
from ..packed import zero_behind
from ..passes import Passes
from ..request import Attended, AttentionInputs, AttentionRequest, Feature, Gradients
from .limits import FLASH, refuses_beyond_flash

_LARGEST_HEAD = 256
TAKES = FLASH | {Feature.DROPOUT}


def refuses(r: AttentionRequest) -> str | None:
    """Why this backend cannot take the request; None if it can."""
    if not (r.device.switches.flash and r.device.switches.flash2):
        return "NVTE_FLASH_ATTN=0" if not r.device.switches.flash else "NVTE_FLASH_ATTN_V2=0"
    refusal = refuses_beyond_flash(r, _LARGEST_HEAD)
    if refusal is not None:
        return refusal
    if r.device.capability < (8, 0):
        return f"compute capability {r.device.capability[0]}.{r.device.capability[1]} < 8.0"
    if (
        r.device.deterministic
        and r.options.needs_gradient
        and not torch.are_deterministic_algorithms_enabled()
    ):
        return "its backward is only deterministic under torch.use_deterministic_algorithms(True)"
    return None


def forward(request: AttentionRequest, inputs: AttentionInputs) -> Attended:
    """Attention by PyTorch's operator, in the layout of the request."""
    q, k, v = (batch_first(request.shape.q_format, x) for x in inputs[:3])
    out, lse, rng_state, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        inputs.starts_q,
        inputs.starts_kv,
        request.shape.seqlen_q,
        request.shape.seqlen_kv,
        request.options.dropout,
        _causal(request),
        False,
        **_options(request),
    )
    out = batch_first(request.shape.q_format, out).contiguous()
    if request.packed:
        assert inputs.starts_q is not None
        zero_behind(out, inputs.starts_q)
    return Attended(out, lse, rng_state.view(torch.int64) if request.options.dropout > 0.0 else None)


def backward(
    request: AttentionRequest, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    """Gradients by PyTorch's operator."""
    q, k, v = (batch_first(request.shape.q_format, x) for x in inputs[:3])
    if attended.rng_state is None:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
    else:
        state = attended.rng_state.view(torch.uint64)
    found = torch.ops.aten._flash_attention_backward(
        batch_first(request.shape.q_format, grad_output),
        q,
        k,
        v,
        batch_first(request.shape.q_format, attended.output),
        attended.lse,
        inputs.starts_q,
        inputs.starts_kv,
        request.shape.seqlen_q,
        request.shape.seqlen_kv,
        request.options.dropout,
        _causal(request),
        state,
        torch.empty(0, dtype=torch.uint64, device=q.device),
        **_options(request),
    )
    gradients = Gradients(*(batch_first(request.shape.q_format, x) for x in found))
    if request.packed:
        assert inputs.starts_q is not None and inputs.starts_kv is not None
        zero_behind(gradients.q, inputs.starts_q)
        zero_behind(gradients.k, inputs.starts_kv)
        zero_behind(gradients.v, inputs.starts_kv)
    return gradients


def _causal(request: AttentionRequest) -> bool:
    return request.options.mask.window == (-1, 0)


def _options(request: AttentionRequest) -> dict[str, Any]:
    left, right = request.options.mask.window
    if _causal(request) or not request.options.mask.banded:
        return {"scale": request.options.scale}
    return {"scale": request.options.scale, "window_size_left": left, "window_size_right": right}


PASSES = Passes("torch_flash", forward, backward)
BACKEND = Backend("torch_flash", takes=TAKES, refuses=refuses, bind=lambda request: PASSES, opaque=True)
