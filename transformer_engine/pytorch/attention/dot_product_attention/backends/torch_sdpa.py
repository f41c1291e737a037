"""o = torch.nn.functional.scaled_dot_product_attention(q, k, v), where a request maps on it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .....common.dispatch import Backend
from .. import layout, mask
from ..request import AttentionInputs, AttentionRequest, AttentionResult


def refuses(r: AttentionRequest) -> str | None:
    """Why this backend cannot take the request; None if it can."""
    if not (r.switches.flash or r.switches.fused):
        return "NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0"
    if r.bias != "no_bias":
        return f"core_attention_bias_type={r.bias!r}; it takes no bias"
    if r.softmax != "vanilla":
        return f"softmax_type={r.softmax!r}; it has no sink"
    if r.max_logit:
        return "return_max_logit; it keeps its logits to itself"
    if r.fp8 is not None:
        return "FP8 attention; it takes float16, bfloat16 and float32"
    if r.score_mod is not None:
        return "score_mod; it has no hook for it"
    if r.deterministic and r.needs_gradient and r.device_type == "cuda" and not _torch_is_deterministic():
        return "its backward on CUDA is only deterministic under torch.use_deterministic_algorithms(True)"
    if r.empty:
        return "an empty tensor"
    return None


def _torch_is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def attend(request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
    """The attention of a request, differentiable in q, k and v."""
    q, k, v = layout.dense_qkv(request, inputs)
    if _is_plain_causal(request):
        visible, seeing = None, None
    else:
        visible = mask.visible(request, inputs)
        seeing = None if visible is None else visible.any(dim=-1, keepdim=True)
    if visible is not None and seeing is not None:
        # A row without a key would be 0 / 0 in some kernels: let it see everything, and zero its output.
        visible = visible | ~seeing
    native_groups = visible is None and request.head_dim_qk == request.head_dim_v
    if request.groups != request.heads and not native_groups:
        # torch's kernels that take a mask or two head sizes take no grouped heads
        k, v = _repeat_heads(k, request.heads), _repeat_heads(v, request.heads)
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=visible,
        dropout_p=request.dropout,
        is_causal=_is_plain_causal(request),
        scale=request.scale,
        enable_gqa=request.groups != request.heads and native_groups,
    )
    if seeing is not None:
        out = torch.where(seeing, out, 0)
    out = layout.from_bhsd(request, inputs, out).flatten(-2)
    if out.is_cuda and out.requires_grad and not torch.compiler.is_compiling():
        # On a GPU torch 2.11 reads a gradient that is a slice of wider rows as if its rows lay side by side.
        out.register_hook(Tensor.contiguous)
    return AttentionResult(out)


def _is_plain_causal(request: AttentionRequest) -> bool:
    """Is the mask j <= i and nothing else?"""
    aligned = not request.mask.bottom_right or request.seqlen_q == request.seqlen_kv
    return request.mask.window == (-1, 0) and aligned and request.mask.name.startswith("causal")


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[b, g, s, d] as [b, h, s, d]"""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


BACKEND = Backend("torch_sdpa", attend, refuses)
