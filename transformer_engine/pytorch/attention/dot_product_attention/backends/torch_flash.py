"""o = the FlashAttention-2 kernels inside PyTorch (aten::_flash_attention_forward): any NVIDIA GPU from Ampere on."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .....common.dispatch import Backend
from ..autograd import Kernels, attend
from ..request import Attended, AttentionInputs, AttentionRequest, Gradients
from ..tail import clear_tail
from .limits import refuses_beyond_flash, refuses_top_left

_LARGEST_HEAD = 256


def refuses(r: AttentionRequest) -> str | None:
    if not (r.switches.flash and r.switches.flash2):
        return "NVTE_FLASH_ATTN=0" if not r.switches.flash else "NVTE_FLASH_ATTN_V2=0"
    refusal = refuses_beyond_flash(r, _LARGEST_HEAD, dropout=True) or refuses_top_left(r)
    if refusal is not None:
        return refusal
    if r.capability < (8, 0):
        return f"compute capability {r.capability[0]}.{r.capability[1]} < 8.0"
    if r.head_dim_qk != r.head_dim_v:
        return f"heads of two sizes, {r.head_dim_qk} and {r.head_dim_v}"
    if r.q_format != r.kv_format or r.page_size:
        return "a cache of keys and values; PyTorch's operator takes none"
    if r.mask.padding and not r.packed:
        return f"padding with qkv_format={r.q_format!r}; it takes lengths with 'thd' only"
    if r.padded_between:
        return "padding between packed sequences; pack them closely"
    if r.deterministic and r.needs_gradient and not torch.are_deterministic_algorithms_enabled():
        return "its backward is only deterministic under torch.use_deterministic_algorithms(True)"
    return None


def forward(request: AttentionRequest, inputs: AttentionInputs) -> Attended:
    """Attention by PyTorch's operator, in the layout of the request."""
    q, k, v = (_batch_first(request, x) for x in inputs[:3])
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
    out = _batch_first(request, out).contiguous()
    if request.packed:
        assert inputs.starts_q is not None
        clear_tail(out, inputs.starts_q)
    return Attended(out, lse, rng_state.view(torch.int64) if request.dropout > 0.0 else None)


def backward(
    request: AttentionRequest, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    """Gradients by PyTorch's operator."""
    q, k, v = (_batch_first(request, x) for x in inputs[:3])
    if attended.rng_state is None:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
    else:
        state = attended.rng_state.view(torch.uint64)
    found = torch.ops.aten._flash_attention_backward(
        _batch_first(request, grad_output),
        q,
        k,
        v,
        _batch_first(request, attended.output),
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
    gradients = Gradients(*(_batch_first(request, x) for x in found))
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


def _batch_first(request: AttentionRequest, x: Tensor) -> Tensor:
    return x.transpose(0, 1) if request.q_format == "sbhd" else x


KERNELS = Kernels("torch_flash", forward, backward)
BACKEND = Backend("torch_flash", functools.partial(attend, KERNELS), refuses)
