"""o = torch.nn.functional.scaled_dot_product_attention(q, k, v), where a request maps on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .....common.dispatch import Backend
from ....runtime.double_backward import refuse_second
from .. import layout
from ..passes import Whole
from ..request import AttentionInputs, AttentionRequest, AttentionResult, Feature
from ..visible import visible as visible_of
from .torch_passes import torch_passes

TAKES = frozenset(Feature) - {
    Feature.EMPTY,
    Feature.FP8,
    Feature.FULL_DROPOUT,
    Feature.SCORE_MOD,
    Feature.PRE_SCALE_BIAS,
    Feature.POST_SCALE_BIAS,
    Feature.ALIBI,
    Feature.OFF_BY_ONE,
    Feature.LEARNABLE,
    Feature.MAX_LOGIT,
}


def refuses(r: AttentionRequest) -> str | None:
    """Why this backend cannot take the request; None if it can."""
    if not (r.device.switches.flash or r.device.switches.fused):
        return "NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0"
    if (
        r.device.deterministic
        and r.options.needs_gradient
        and r.device.type == "cuda"
        and not _torch_is_deterministic()
    ):
        return "its backward on CUDA is only deterministic under torch.use_deterministic_algorithms(True)"
    return None


def _torch_is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def attend(request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
    """The attention of a request, differentiable in q, k and v."""
    q, k, v = layout.dense_qkv(request, inputs)
    if _is_plain_causal(request):
        visible, seeing = None, None
    else:
        visible = visible_of(request, inputs)
        seeing = None if visible is None else visible.any(dim=-1, keepdim=True)
    if visible is not None and seeing is not None:
        # A row without a key would be 0 / 0 in some kernels: let it see everything, and zero its output.
        visible = visible | ~seeing
    native_groups = visible is None and request.shape.head_dim_qk == request.shape.head_dim_v
    if request.shape.groups != request.shape.heads and not native_groups:
        # torch's kernels that take a mask or two head sizes take no grouped heads
        k, v = _repeat_heads(k, request.shape.heads), _repeat_heads(v, request.shape.heads)
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=visible,
        dropout_p=request.options.dropout,
        is_causal=_is_plain_causal(request),
        scale=request.options.scale,
        enable_gqa=request.shape.groups != request.shape.heads and native_groups,
    )
    _named(out, q, k, v)
    if seeing is not None:
        out = torch.where(seeing, out, 0)
    return _guarded(layout.from_bhsd(request, inputs, out).flatten(-2))


def _named(out: Tensor, *inputs: Tensor) -> None:
    """torch's fused attentions have no second derivative, and say so by the name of their kernel's gradient."""
    if torch.compiler.is_compiling():  # which traces no node
        return
    node = out.grad_fn
    if node is not None and node.name().startswith("ScaledDotProduct"):
        refuse_second("DotProductAttention by torch_sdpa", node, *inputs)


def _guarded(out: Tensor) -> AttentionResult:
    if out.is_cuda and out.requires_grad and not torch.compiler.is_compiling():
        # On a GPU torch 2.11 reads a gradient that is a slice of wider rows as if its rows lay side by side.
        out.register_hook(Tensor.contiguous)
    return AttentionResult(out)


def _is_plain_causal(request: AttentionRequest) -> bool:
    """Is the mask j <= i and nothing else?"""
    aligned = not request.options.mask.bottom_right or request.shape.seqlen_q == request.shape.seqlen_kv
    return (
        request.options.mask.window == (-1, 0) and aligned and request.options.mask.name.startswith("causal")
    )


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[b, g, s, d] as [b, h, s, d]"""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def bind(request: AttentionRequest) -> Whole:
    """The attention of a request; of dense tensors whose mask torch has by name, in a few operations."""
    if not _is_plain(request):
        return WHOLE
    return Whole("torch_sdpa", _dense(request), torch_passes if request.options.dropout == 0.0 else None)


def _is_plain(r: AttentionRequest) -> bool:
    if r.shape.q_format != r.shape.kv_format or r.packed or r.shape.page_size:
        return False
    unmasked = r.options.mask.name == "no_mask" and not r.options.mask.banded
    native_heads = r.shape.groups == r.shape.heads or r.shape.head_dim_qk == r.shape.head_dim_v
    return native_heads and (unmasked or _is_plain_causal(r))


def _dense(r: AttentionRequest) -> Callable[[AttentionRequest, AttentionInputs], AttentionResult]:
    batch, heads, tokens = (1, 2, 0) if r.shape.q_format == "sbhd" else (0, 2, 1)
    there, back = (batch, heads, tokens, 3), (2, 0, 1, 3) if r.shape.q_format == "sbhd" else (0, 2, 1, 3)
    causal, dropout, scale = _is_plain_causal(r), r.options.dropout, r.options.scale
    grouped = r.shape.groups != r.shape.heads

    def run(request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
        out = scaled_dot_product_attention(
            inputs.q.permute(there),
            inputs.k.permute(there),
            inputs.v.permute(there),
            None,
            dropout,
            causal,
            scale=scale,
            enable_gqa=grouped,
        )
        _named(out, inputs.q, inputs.k, inputs.v)
        # A copy even where the view is contiguous, as in layout.from_bhsd.
        return _guarded(out.permute(back).clone(memory_format=torch.contiguous_format).flatten(-2))

    return run


WHOLE = Whole("torch_sdpa", attend)
BACKEND = Backend("torch_sdpa", takes=TAKES, refuses=refuses, bind=bind)
