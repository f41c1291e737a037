"""A literal stand-in for the flash-attn packages: sequences one by one, the diagonal ends bottom right."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: tuple[int, int],
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    score_mod=None,
) -> tuple[Tensor, Tensor]:
    """(out [i, h, d], lse [h, i]) for one sequence q [i, h, d], k, v [j, g, d]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    score = torch.einsum("ihd,jhd->hij", q, k) * scale
    if score_mod is not None:
        score = score_mod(score)
    distance = (
        torch.arange(k.shape[0])[None]
        - torch.arange(q.shape[0])[:, None]
        - (k.shape[0] - q.shape[0])
    )
    if slopes is not None:
        score = score - slopes[:, None, None] * distance.abs()
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if window[0] >= 0:
        hidden |= distance < -window[0]
    if window[1] >= 0:
        hidden |= distance > window[1]
    score = score.masked_fill(hidden, -math.inf)
    lse = score.logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink[:, None])
    weights = torch.where(lse[..., None] == -math.inf, 0.0, (score - lse[..., None]).exp())
    return torch.einsum("hij,jhd->ihd", weights, v), lse


def spans(
    x: Tensor, starts: Tensor | None, used: Tensor | None, table: Tensor | None = None
) -> list[Tensor]:
    """Tokens [s, .., d], sequence by sequence."""
    if table is not None:
        x = x[table.long()].flatten(1, 2)
    if starts is None:
        return [x[b] if used is None else x[b, : int(used[b])] for b in range(x.shape[0])]
    ends = starts[1:] if used is None else starts[:-1] + used
    return [x[int(a) : int(b)] for a, b in zip(starts[:-1], ends, strict=True)]


def softcap_score_mod(softcap: float):
    """Score function for a softcap, as flash_attn.cute.utils.create_softcap_scoremod; None for softcap 0."""
    return (lambda score: softcap * torch.tanh(score / softcap)) if softcap else None


class CuteUtilities:
    """Like flash_attn.cute.utils; a backward function belongs to its softcap's last forward function."""

    def __init__(self) -> None:
        self.functions = {}

    def create_softcap_scoremod(self, softcap):
        self.functions[softcap] = softcap_score_mod(softcap)
        return self.functions[softcap]

    def create_softcap_scoremod_bwd(self, softcap):
        def derivative() -> None: ...

        derivative.derivative_of = self.functions[softcap]  # pyright: ignore[reportFunctionMemberAccess]
        return derivative


def flash_attn_fwd(q, k, v, **kwargs):
    """As flash_attn.cute.interface._flash_attn_fwd; rows that belong to no sequence are not written."""
    window = window_sides(kwargs)
    out = kwargs["out"]
    queries = spans(q, kwargs["cu_seqlens_q"], kwargs["seqused_q"])
    targets = spans(out, kwargs["cu_seqlens_q"], kwargs["seqused_q"])
    keys, values = (
        spans(x, kwargs["cu_seqlens_k"], kwargs["seqused_k"], kwargs["page_table"]) for x in (k, v)
    )
    shape = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(shape, -math.inf)
    position = 0
    for b, (one, target, key, value) in enumerate(zip(queries, targets, keys, values, strict=True)):
        result, rows = attend(
            one,
            key,
            value,
            kwargs["softmax_scale"],
            window,
            kwargs["learnable_sink"],
            None,
            kwargs.get("score_mod"),
        )
        target.copy_(result)
        if q.ndim == 3:
            position = int(kwargs["cu_seqlens_q"][b])
            lse[:, position : position + one.shape[0]] = rows
        else:
            lse[b, :, : one.shape[0]] = rows
    return out, lse if kwargs["return_lse"] else None, None, None, None


def flash_attn_bwd(q, k, v, out, dout, lse, **kwargs):
    """As flash_attn.cute.interface._flash_attn_bwd, by autograd."""
    assert (
        kwargs.get("score_mod") is None
        or kwargs["score_mod_bwd"].derivative_of is kwargs["score_mod"]
    )
    sink = kwargs["learnable_sink"]
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    if sink is not None:
        leaves.append(sink.detach().clone().requires_grad_())
    window = window_sides(kwargs)
    queries = spans(leaves[0], kwargs["cu_seqlens_q"], kwargs["seqused_q"])
    grads = spans(dout, kwargs["cu_seqlens_q"], kwargs["seqused_q"])
    keys, values = (spans(x, kwargs["cu_seqlens_k"], kwargs["seqused_k"]) for x in leaves[1:3])
    total = torch.zeros(())
    for one, key, value, grad in zip(queries, keys, values, grads, strict=True):
        result, _ = attend(
            one,
            key,
            value,
            kwargs["softmax_scale"],
            window,
            None if sink is None else leaves[3],
            None,
            kwargs.get("score_mod"),
        )
        total = total + (result * grad).sum()
    actual = torch.autograd.grad(total, leaves)
    for name, first, starts, used in (
        ("dq", actual[0], kwargs["cu_seqlens_q"], kwargs["seqused_q"]),
        ("dk", actual[1], kwargs["cu_seqlens_k"], kwargs["seqused_k"]),
        ("dv", actual[2], kwargs["cu_seqlens_k"], kwargs["seqused_k"]),
    ):
        for target, value in zip(
            spans(kwargs[name], starts, used), spans(first, starts, used), strict=True
        ):
            target.copy_(value)
    return (kwargs["dq"], kwargs["dk"], kwargs["dv"], *actual[3:])


def window_sides(argument) -> tuple[int, int]:
    left, right = argument["window_size_left"], argument["window_size_right"]
    return (
        -1 if left is None else left,
        0 if argument["causal"] else -1 if right is None else right,
    )


def flash_attn_func(
    q,
    k,
    v,
    *,
    softmax_scale,
    causal,
    window_size,
    deterministic,
    dropout_p=0.0,
    alibi_slopes=None,
    softcap=0.0,
):
    """As flash_attn.flash_attn_func, without dropout."""
    del deterministic, dropout_p
    window = (-1, 0) if causal else window_size
    rest = (softmax_scale, window, None, alibi_slopes, softcap_score_mod(softcap))
    return torch.stack([attend(q[b], k[b], v[b], *rest)[0] for b in range(q.shape[0])])


def flash_attn_varlen_func(
    q,
    k,
    v,
    starts_q,
    starts_kv,
    max_q,
    max_kv,
    *,
    softmax_scale,
    causal,
    window_size,
    softcap=0.0,
    **other,
):
    """As flash_attn.flash_attn_varlen_func, without dropout; tokens of no sequence get NaN."""
    window = (-1, 0) if causal else window_size
    parts = [spans(x, s, None) for x, s in ((q, starts_q), (k, starts_kv), (v, starts_kv))]
    rest = (softmax_scale, window, None, None, softcap_score_mod(softcap))
    results = [attend(*each, *rest)[0] for each in zip(*parts, strict=True)]
    rest = q.shape[0] - sum(part.shape[0] for part in results)
    return torch.cat([*results, q.new_full((rest, q.shape[1], v.shape[2]), math.nan)])
