"""o [b, h, i, d] = sum_j p v[j], p = exp(s - lse), s = scale * q k^T + bias where visible, in float32.

Literal, on any device, every mask, bias, softmax and layout; it never refuses. A row that sees no key is
zero. `forward` and `backward` are the plain pair; `attend` puts them behind autograd and round the layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .....common.dispatch import Backend
from .. import layout, mask
from ..request import AttentionInputs, AttentionRequest, AttentionResult


class Attended(NamedTuple):
    """out [b, h, i, d] in q's dtype; lse [b, h, i] = log sum_j exp(s); max_logit [h]; kept: dropout's."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    kept: Tensor | None


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink: Tensor | None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    visible: Tensor | None,
    scale: float,
    dropout: float,
) -> Attended:
    """Attention of q [b, h, i, d] to k, v [b, g, j, d], head h reading group h // (heads / groups)."""
    with torch.autocast(q.device.type, enabled=False):
        logits = _logits(q, k, bias, visible, scale)
        lse = torch.logsumexp(logits, dim=-1)
        if sink is not None:
            lse = torch.logaddexp(lse, sink.to(lse.dtype)[None, :, None])
        probabilities = _probabilities(logits, lse)
        kept = None
        if dropout > 0.0:
            kept = torch.rand_like(probabilities) >= dropout
            probabilities = probabilities * kept / (1.0 - dropout)
        out = _ungrouped(_grouped(probabilities, k.shape[1]) @ _wide(v)[:, :, None])
        max_logit = (
            logits.amax(dim=(0, 2, 3)) if logits.numel() else logits.new_full((q.shape[1],), -torch.inf)
        )
        # A copy: for an output that is a view, torch.compile of torch 2.11 gives zero gradients.
        return Attended(out.to(q.dtype, copy=True), lse, max_logit, kept)


def backward(
    grad_out: Tensor,
    attended: Attended,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    visible: Tensor | None,
    scale: float,
    dropout: float,
) -> Gradients:
    """dq = scale ds k, dk = scale ds^T q, dv = p^T do, dsink = -p_sink D; ds = p (dp - D), D = sum(do o)."""
    with torch.autocast(q.device.type, enabled=False):
        groups = k.shape[1]
        probabilities = _probabilities(_logits(q, k, bias, visible, scale), attended.lse)
        grad_out = _wide(grad_out)
        inner = (grad_out * _wide(attended.out)).sum(dim=-1)
        grad_p = _ungrouped(_grouped(grad_out, groups) @ _wide(v)[:, :, None].transpose(-1, -2))
        dropped = probabilities
        if attended.kept is not None:
            survivors = attended.kept / (1.0 - dropout)
            dropped = probabilities * survivors
            grad_p = grad_p * survivors
        grad_v = (_grouped(dropped, groups).transpose(-1, -2) @ _grouped(grad_out, groups)).sum(dim=2)
        grad_s = probabilities * (grad_p - inner[..., None])
        grouped_s = _grouped(grad_s, groups)
        grad_q = _ungrouped(grouped_s @ _wide(k)[:, :, None]) * scale
        grad_k = (grouped_s.transpose(-1, -2) @ _grouped(_wide(q), groups)).sum(dim=2) * scale
        grad_bias = None if bias is None else grad_s.sum_to_size(bias.shape).to(bias.dtype)
        grad_sink = None
        if sink is not None:
            sink_probability = torch.exp(sink.to(inner.dtype)[None, :, None] - attended.lse)
            grad_sink = -(sink_probability * inner).sum(dim=(0, 2)).to(sink.dtype)
        return Gradients(grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_bias, grad_sink)


def _wide(x: Tensor) -> Tensor:
    """x in float32; float64 stays, so that gradients can be checked numerically."""
    return x if x.dtype == torch.float64 else x.float()


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[b, h, ..] as [b, g, h / g, ..]"""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _ungrouped(x: Tensor) -> Tensor:
    return x.flatten(1, 2)


def _logits(q: Tensor, k: Tensor, bias: Tensor | None, visible: Tensor | None, scale: float) -> Tensor:
    """s [b, h, i, j] = scale * q k^T + bias, -inf where not visible."""
    logits = _ungrouped(_grouped(_wide(q), k.shape[1]) @ _wide(k)[:, :, None].transpose(-1, -2)) * scale
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return logits if visible is None else logits.masked_fill(~visible, -torch.inf)


def _probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    """p = exp(s - lse); a row without a visible key (lse = -inf) is zero instead of exp(-inf + inf)."""
    lse = lse[..., None]
    return torch.where(lse == -torch.inf, 0.0, torch.exp(logits - lse))


class Attention(torch.autograd.Function):
    """Autograd shell of forward and backward."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sink, visible, scale, dropout):
        attended = forward(q, k, v, bias, sink, visible, scale, dropout)
        ctx.save_for_backward(q, k, v, bias, sink, visible, *attended)
        ctx.scale, ctx.dropout = scale, dropout
        # Saved tensors are inputs or outputs, as torch.autograd.Function asks for.
        others = [tensor for tensor in attended[1:] if tensor is not None]
        ctx.mark_non_differentiable(*others)
        return attended.out, *others

    @staticmethod
    def backward(ctx, grad_out, *_):
        q, k, v, bias, sink, visible, *attended = ctx.saved_tensors
        gradients = backward(
            grad_out, Attended(*attended), q, k, v, bias, sink, visible, ctx.scale, ctx.dropout
        )
        return *gradients, None, None, None


def attend(request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
    """The attention of a request, differentiable in q, k, v, bias and sink."""
    q, k, v = layout.dense_qkv(request, inputs)
    out, _, max_logit, *_ = Attention.apply(
        q,
        k,
        v,
        _additive_bias(request, inputs),
        inputs.sink,
        mask.visible(request, inputs),
        request.scale,
        request.dropout,
    )
    return AttentionResult(layout.flat_output(request, inputs, out), max_logit if request.max_logit else None)


def _additive_bias(request: AttentionRequest, inputs: AttentionInputs) -> Tensor | None:
    """What is added to scale * q k^T: (q k^T + bias) * scale is scale * q k^T + bias * scale."""
    if request.bias == "pre_scale_bias":
        assert inputs.bias is not None
        return inputs.bias * request.scale
    if request.bias == "alibi":
        assert inputs.slopes is not None
        slopes = inputs.slopes.float().reshape(-1, request.heads, 1, 1)
        return -slopes * mask.distance(request, inputs).abs()
    return inputs.bias


def refuses(request: AttentionRequest) -> str | None:
    if not request.switches.unfused:
        return "NVTE_UNFUSED_ATTN=0"
    return None


BACKEND = Backend("reference", attend, refuses)
