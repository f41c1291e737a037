"""o = the FlashAttention-2 kernels inside PyTorch (aten::_flash_attention_forward): any NVIDIA GPU from Ampere on."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .....common.dispatch import Backend
from ..autograd import Kernels, attend
from ..layout import batch_first
from ..request import Attended, AttentionInputs, AttentionRequest, Gradients
from ..tail import clear_tail
from .limits import refuses_beyond_flash, refuses_loose_sequences, refuses_top_left

_LARGEST_HEAD = 256


def refuses(r: AttentionRequest) -> str | None:
    """Why this backend cannot take the request; None if it can."""
    if not (r.switches.flash and r.switches.flash2):
        return "NVTE_FLASH_ATTN=0" if not r.switches.flash else "NVTE_FLASH_ATTN_V2=0"
    refusal = refuses_beyond_flash(r, _LARGEST_HEAD, dropout=True) or refuses_top_left(r)
    if refusal is not None:
        return refusal
    if r.capability < (8, 0):
        return f"compute capability {r.capability[0]}.{r.capability[1]} < 8.0"
    refusal = refuses_loose_sequences(r)
    if refusal is not None:
        return refusal
    if r.deterministic and r.needs_gradient and not torch.are_deterministic_algorithms_enabled():
        return "its backward is only deterministic under torch.use_deterministic_algorithms(True)"
    return None


def forward(request: AttentionRequest, inputs: AttentionInputs) -> Attended:
    """Attention by PyTorch's operator, in the layout of the request."""
    q, k, v = (batch_first(request.q_format, x) for x in inputs[:3])
    out, lse, rng_state, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        inputs.starts_q,
        inputs.starts_kv,
        request.seqlen_q,
        request.seqlen_kv,
        request.dropout,
        _causal(request),
        False,
        **_options(request),
    )
    out = batch_first(request.q_format, out).contiguous()
    if request.packed:
        assert inputs.starts_q is not None
        clear_tail(out, inputs.starts_q)
    return Attended(out, lse, rng_state.view(torch.int64) if request.dropout > 0.0 else None)


def backward(
    request: AttentionRequest, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    """Gradients by PyTorch's operator."""
    q, k, v = (batch_first(request.q_format, x) for x in inputs[:3])
    if attended.rng_state is None:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
    else:
        state = attended.rng_state.view(torch.uint64)
    found = torch.ops.aten._flash_attention_backward(
        batch_first(request.q_format, grad_output),
        q,
        k,
        v,
        batch_first(request.q_format, attended.output),
        attended.lse,
        inputs.starts_q,
        inputs.starts_kv,
        request.seqlen_q,
        request.seqlen_kv,
        request.dropout,
        _causal(request),
        state,
        torch.empty(0, dtype=torch.uint64, device=q.device),
        **_options(request),
    )
    gradients = Gradients(*(batch_first(request.q_format, x) for x in found))
    if request.packed:
        assert inputs.starts_q is not None and inputs.starts_kv is not None
        clear_tail(gradients.q, inputs.starts_q)
        clear_tail(gradients.k, inputs.starts_kv)
        clear_tail(gradients.v, inputs.starts_kv)
    return gradients


def _causal(request: AttentionRequest) -> bool:
    return request.mask.window == (-1, 0)


def _options(request: AttentionRequest) -> dict[str, Any]:
    left, right = request.mask.window
    if _causal(request) or not request.mask.banded:
        return {"scale": request.scale}
    return {"scale": request.scale, "window_size_left": left, "window_size_right": right}


KERNELS = Kernels("torch_flash", forward, backward)
BACKEND = Backend("torch_flash", functools.partial(attend, KERNELS), refuses)
