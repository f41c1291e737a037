"""o [b, h, i, d] = sum_j p v[j], p = exp(s - lse), s = softcap(scale * q k^T) + bias where visible, in float32.

Literal, on any device, for q [b, h, i, d] and k, v [b, g, j, d]; head h reads group h // (heads / groups). A row that
sees no key is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.autograd import multiply_without_autocast
from ...runtime.device import autocast_kind
from . import fixed_blocks
from .dropout import kept

Rounding = Callable[[Tensor], Tensor]


class Terms(NamedTuple):
    """The terms of the logits besides q and k.

    Attributes:
        bias: Added to the scaled scores, broadcastable to [b, h, i, j].
        sink: Logit [h] for a key without a value.
        visible: bool, broadcastable to [b, h, i, j]; None if all keys are visible.
        score_mod: score_mod(score, b, h, i, j) after softcap and bias, with index tensors that broadcast.
        softcap: Limit c of c * tanh(score / c); 0: no limit.
        caps_bias: The bias is added before the softcap, otherwise after it.
        blocks: Multiply and add in blocks of constant size; see `fixed_blocks.py`.
        round_p, round_ds: Round the probabilities, and the gradient of the logits, before the products.
    """

    scale: float
    bias: Tensor | None = None
    sink: Tensor | None = None
    visible: Tensor | None = None
    dropout: float = 0.0
    score_mod: Callable[..., Tensor] | None = None
    round_p: Rounding | None = None
    round_ds: Rounding | None = None
    softcap: float = 0.0
    caps_bias: bool = False
    blocks: bool = False


class DenseOutput(NamedTuple):
    """out [b, h, i, d] in q's dtype; lse [b, h, i] = log sum_j exp(s); max_logit [h]."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor


class DenseGradients(NamedTuple):
    """Gradients with the shapes and dtypes of q, k, v, bias and sink; None for missing ones."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink: Tensor | None


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms, rng_state: Tensor | None) -> DenseOutput:
    """Compute attention from q to k and v, which autograd can differentiate too."""
    with torch.autocast(autocast_kind(q.device), enabled=False):
        logits = _logits(_scores(q, k, terms), terms)
        lse = _log_sum(logits, terms.sink, terms.blocks)
        probabilities = _drop_weights(_probabilities(logits, lse), terms.dropout, rng_state)
        if terms.round_p is not None:
            probabilities = terms.round_p(probabilities)
        products = fixed_blocks if terms.blocks else _WholeMatrices
        out = _ungroup_heads(
            products.sum_over_keys(_grouped(probabilities, k.shape[1]), _wide(v)[:, :, None])
        )
        max_logit = (
            logits.amax(dim=(0, 2, 3))
            if logits.numel()
            else logits.new_full((q.shape[1],), -torch.inf)
        )
        return DenseOutput(out.to(q.dtype), lse, max_logit)


def backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    rng_state: Tensor | None,
) -> DenseGradients:
    """Compute dq = scale ds k, dk = scale ds^T q, dv = p^T do, dsink = -p_sink D; ds = p (dp - D), D = sum(do o).

    With a softcap, ds has the factor 1 - tanh^2, which the gradient of a bias added after the softcap does not have.
    """
    with torch.autocast(autocast_kind(q.device), enabled=False):
        groups = k.shape[1]
        scores = _scores(q, k, terms)
        probabilities = _probabilities(_logits(scores, terms), lse)
        grad_out = _wide(grad_out)
        inner = (grad_out * _wide(out)).sum(dim=-1)
        products = fixed_blocks if terms.blocks else _WholeMatrices
        grad_p = _ungroup_heads(products.scores(_grouped(grad_out, groups), _wide(v)[:, :, None]))
        grad_p = _drop_weights(grad_p, terms.dropout, rng_state)
        dropped = _drop_weights(probabilities, terms.dropout, rng_state)
        if terms.round_p is not None:
            dropped = terms.round_p(dropped)
        grad_v = products.sum_over_queries(
            _grouped(dropped, groups), _grouped(grad_out, groups)
        ).sum(dim=2)
        grad_s = probabilities * (grad_p - inner[..., None])
        grad_after = grad_s
        if terms.softcap != 0.0:
            grad_s = grad_s * (1.0 - torch.tanh(scores / terms.softcap).square())
        if terms.round_ds is not None:
            grad_s = terms.round_ds(grad_s)
        if terms.softcap == 0.0 or terms.caps_bias:
            grad_after = grad_s
        grouped_s = _grouped(grad_s, groups)
        grad_q = (
            _ungroup_heads(products.sum_over_keys(grouped_s, _wide(k)[:, :, None])) * terms.scale
        )
        grad_k = (
            products.sum_over_queries(grouped_s, _grouped(_wide(q), groups)).sum(dim=2)
            * terms.scale
        )
        bias, sink = terms.bias, terms.sink
        grad_bias = None if bias is None else grad_after.sum_to_size(bias.shape).to(bias.dtype)
        grad_sink = None
        if sink is not None:
            # A row that is not a token has no lse.
            sink_probability = torch.exp(sink.to(inner.dtype)[None, :, None] - lse).masked_fill(
                lse == -torch.inf, 0.0
            )
            grad_sink = -(sink_probability * inner).sum(dim=(0, 2)).to(sink.dtype)
        return DenseGradients(
            grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_bias, grad_sink
        )


class _WholeMatrices:
    """The products of `fixed_blocks`, each in one call."""

    @staticmethod
    def scores(q: Tensor, k: Tensor) -> Tensor:
        return multiply_without_autocast(q, k.transpose(-1, -2))

    @staticmethod
    def sum_over_keys(p: Tensor, v: Tensor) -> Tensor:
        return multiply_without_autocast(p, v)

    @staticmethod
    def sum_over_queries(p: Tensor, x: Tensor) -> Tensor:
        return multiply_without_autocast(p.transpose(-1, -2), x)


def _wide(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if it is, so that gradients can be checked numerically."""
    return x if x.dtype == torch.float64 else x.float()


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return [b, h, ..] as [b, g, h / g, ..]."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _ungroup_heads(x: Tensor) -> Tensor:
    return x.flatten(1, 2)


def _scores(q: Tensor, k: Tensor, terms: Terms) -> Tensor:
    """Compute the scores [b, h, i, j] before the softcap: scale * q k^T, and a bias that the softcap limits too."""
    products = fixed_blocks if terms.blocks else _WholeMatrices
    keys = _wide(k)[:, :, None]
    scores = _ungroup_heads(products.scores(_grouped(_wide(q), k.shape[1]), keys)) * terms.scale
    if terms.bias is not None and (terms.softcap == 0.0 or terms.caps_bias):
        scores = scores + terms.bias.to(scores.dtype)
    return scores


def _logits(scores: Tensor, terms: Terms) -> Tensor:
    """Compute s [b, h, i, j] from `_scores`: softcap, the bias behind it, score_mod; -inf where not visible."""
    logits = scores
    if terms.softcap != 0.0:
        logits = terms.softcap * torch.tanh(scores / terms.softcap)
        if terms.bias is not None and not terms.caps_bias:
            logits = logits + terms.bias.to(logits.dtype)
    if terms.score_mod is not None:
        # places: the indices b, h, i, j of every logit, as int32 tensors that broadcast.
        places = []
        for axis, size in enumerate(logits.shape):
            shape = [1] * logits.ndim
            shape[axis] = size
            places.append(
                torch.arange(size, dtype=torch.int32, device=logits.device).reshape(shape)
            )
        changed = terms.score_mod(logits, *places)
        if not isinstance(changed, Tensor):
            raise TypeError(
                f"score_mod returned a value of type {type(changed).__name__}; return the tensor of scores"
            )
        sizes = zip(changed.shape[::-1], logits.shape[::-1], strict=False)
        if changed.dim() > logits.dim() or any(size not in (1, full) for size, full in sizes):
            raise ValueError(
                f"score_mod returned {list(changed.shape)}, which does not broadcast to the scores "
                f"{list(logits.shape)}; compute each score from one score and its indices"
            )
        logits = changed.to(logits.dtype).expand(logits.shape)
    return logits if terms.visible is None else logits.masked_fill(~terms.visible, -torch.inf)


def _log_sum(logits: Tensor, sink: Tensor | None, blocks: bool = False) -> Tensor:
    """Compute log (sum_j exp(s) + exp(sink)), -inf for a row without a visible key and without a sink."""
    blind = None
    if logits.requires_grad:
        # Autograd's derivatives of these functions are NaN at -inf: such rows go past them.
        blind = (logits == -torch.inf).all(dim=-1)
        logits = logits.masked_fill(blind[..., None], 0.0)
    lse = _block_log_sum(logits) if blocks else torch.logsumexp(logits, dim=-1)
    if sink is None:
        return lse if blind is None else lse.masked_fill(blind, -torch.inf)
    sink = sink.to(lse.dtype)[None, :, None]
    total = _add_exponentials(lse, sink) if blocks else torch.logaddexp(lse, sink)
    return total if blind is None else torch.where(blind, sink, total)


def _block_log_sum(logits: Tensor) -> Tensor:
    """Compute logsumexp over the last axis by sums of constant length."""
    top = logits.amax(dim=-1)
    base = torch.where(top.abs() == torch.inf, 0.0, top)
    return torch.log(fixed_blocks.row_sums(torch.exp(logits - base[..., None]))) + base


def _add_exponentials(lse: Tensor, sink: Tensor) -> Tensor:
    """Compute torch.logaddexp, which rounds the last elements of a tensor otherwise on a CPU."""
    top = torch.maximum(lse, sink)
    return torch.log(torch.exp(lse - top) + torch.exp(sink - top)) + top


def _probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    """Compute p = exp(s - lse); a row without a visible key (lse = -inf) is zero instead of exp(-inf + inf)."""
    lse = lse[..., None]
    blind = lse == -torch.inf
    return torch.where(blind, 0.0, torch.exp(logits - torch.where(blind, 0.0, lse)))


def _drop_weights(x: Tensor, probability: float, rng_state: Tensor | None) -> Tensor:
    if probability == 0.0:
        return x
    if probability == 1.0:  # 1 / (1 - probability) is infinite, and x * 0.0 is NaN for infinities
        return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0.0)
    assert rng_state is not None
    return x * kept(rng_state, x.shape, probability) / (1.0 - probability)
