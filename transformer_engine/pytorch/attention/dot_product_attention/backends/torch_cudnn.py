"""o = cuDNN's attention as PyTorch calls it (aten::_scaled_dot_product_cudnn_attention): dense, causal or not."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .....common.dispatch import Backend
from ..autograd import Kernels, attend
from ..request import Attended, AttentionInputs, AttentionRequest, Gradients
from .limits import refuses_beyond_flash

_LARGEST_HEAD = 128


def refuses(r: AttentionRequest) -> str | None:
    """Why this backend cannot take the request; None if it can."""
    if not r.switches.fused:
        return "NVTE_FUSED_ATTN=0"
    if r.switches.fused_kind == "2":
        return "NVTE_FUSED_ATTN_BACKEND=2 asks for FP8"
    refusal = refuses_beyond_flash(r, _LARGEST_HEAD)
    if refusal is not None:
        return refusal
    if r.capability < (9, 0):
        return f"compute capability {r.capability[0]}.{r.capability[1]} < 9.0"
    if r.packed or r.mask.padding:
        return "padding; PyTorch's operator takes sequences of one length"
    if r.mask.window not in ((-1, -1), (-1, 0)):
        return f"window_size={r.mask.window}; PyTorch's operator knows causal masks only"
    if not r.starts_aligned:
        return "a diagonal that ends bottom right; PyTorch's begins top left"
    if r.head_dim_qk != r.head_dim_v:
        return f"heads of two sizes, {r.head_dim_qk} and {r.head_dim_v}"
    if r.deterministic and r.needs_gradient:
        return "PyTorch does not ask cuDNN for a deterministic backward"
    return None


def forward(request: AttentionRequest, inputs: AttentionInputs) -> Attended:
    """Attention by PyTorch's operator, in the layout of the request."""
    q, k, v = (_to_bhsd(request, x) for x in inputs[:3])
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, request.needs_gradient, 0.0, _causal(request), False, scale=request.scale
    )
    lse = found[1].squeeze(-1) if request.needs_gradient else None
    return Attended(_from_bhsd(request, found[0]).contiguous(), lse)


def backward(
    request: AttentionRequest, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    """Gradients by PyTorch's operator."""
    assert attended.lse is not None
    q, k, v = (_to_bhsd(request, x) for x in inputs[:3])
    nothing = torch.empty((), dtype=torch.int64, device=q.device)  # seed and offset of a dropout that is 0
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _to_bhsd(request, grad_output),
        q,
        k,
        v,
        _to_bhsd(request, attended.output),
        attended.lse.unsqueeze(-1),
        nothing,
        nothing,
        None,
        None,
        None,
        request.seqlen_q,
        request.seqlen_kv,
        0.0,
        _causal(request),
        scale=request.scale,
    )
    return Gradients(*(_from_bhsd(request, x) for x in found))


def _causal(request: AttentionRequest) -> bool:
    return request.mask.banded


def _to_bhsd(request: AttentionRequest, x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3) if request.q_format == "sbhd" else x.transpose(1, 2)


def _from_bhsd(request: AttentionRequest, x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3) if request.q_format == "sbhd" else x.transpose(1, 2)


KERNELS = Kernels("torch_cudnn", forward, backward)
BACKEND = Backend("torch_cudnn", functools.partial(attend, KERNELS), refuses)
