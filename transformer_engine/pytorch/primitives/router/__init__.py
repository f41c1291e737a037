"""probs [T, E] for the k experts of each token, their gradient, and the load-balancing loss; backend table."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import Operator, Table
from ...runtime.launching import operator
from . import reference, triton
from .reference import (
    BITS,
    BYTES,
    INDICES,
    SIGMOID,
    SOFTMAX,
    SOFTMAX_AFTER,
    SQRTSOFTPLUS,
    Choice,
    RouterRequest,
)

__all__ = [
    "BITS",
    "BYTES",
    "INDICES",
    "SIGMOID",
    "SOFTMAX",
    "SOFTMAX_AFTER",
    "SQRTSOFTPLUS",
    "TABLE",
    "Choice",
    "RouterRequest",
    "balance_loss",
    "choose",
    "choose_backward",
    "count_margins",
]


def choose(
    logits: Tensor,
    choice: Choice,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    indices: Tensor | None = None,
    saves_scores: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return probs [T, E] in dtype, map, and scores float32 [T, E] for logits [T, E]; computed in float32.

    Args:
        logits: Logits [T, E].
        choice: Choice settings.
        dtype: Probability dtype.
        bias: [E], added to the scores for the choice; weights do not include it.
        indices: [T, k], receives the experts, the best first. The map is then None.
        saves_scores: Return the scores for `choose_backward`: for a softmax after the choice, its result (-inf
            elsewhere); for sqrtsoftplus, the logits.
    """
    key = ("choose", logits.shape, logits.dtype, dtype, logits.device, choice, saves_scores)
    return TABLE.bound(key)(logits, bias, indices)


def choose_backward(
    map: Tensor | None, scores: Tensor, grad_probs: Tensor, choice: Choice, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the logits [T, E] in dtype for the probs from `choose`; map, or indices as in choice."""
    key = ("gradient", scores.shape, grad_probs.dtype, dtype, scores.device, choice)
    return TABLE.bound(key)(map, scores, grad_probs)


def count_margins(logits: Tensor, bias: Tensor, k: int, histogram: Tensor, bounds: Tensor) -> None:
    """Add 1 to histogram int32 [E, bins] for each token and expert, in the bin for the expert's margin.

    The margin is c - sigmoid(logit), where c is the (k + 1)st largest sigmoid(logit) + bias of the token;
    ties are ordered by expert. bounds float32 [2]: the lower end of the first bin, the upper end of the last.
    """
    choice = _NO_CHOICE._replace(k=k, score=SIGMOID)
    bins = histogram.shape[1]
    key = (
        "margins",
        logits.shape,
        logits.dtype,
        bounds.dtype,
        logits.device,
        choice,
        False,
        1.0,
        False,
        bins,
    )
    TABLE.bound(key)(logits, bias, histogram, bounds)


def balance_loss(
    probs: Tensor, tokens: Tensor, factor: float, total: Tensor | None = None
) -> Tensor:
    """Return [1] = factor * sum over c of tokens[c] * sum over r of probs[r, c], in float32, in probs' dtype.

    Args:
        probs: Probabilities [rows, columns].
        tokens: Tokens per column.
        factor: Loss factor.
        total: Number on the device by whose square the loss is divided, or None.
    """
    key = (
        "loss",
        probs.shape,
        probs.dtype,
        probs.dtype,
        probs.device,
        _NO_CHOICE,
        False,
        factor,
        total is not None,
    )
    return TABLE.bound(key)(probs, tokens, total)


_NO_CHOICE = Choice(1, SOFTMAX)
_CHOICE = "int k, str score, bool whole, int[]? groups, float scale, str map"


def _read(
    k: int, score: str, all_weights: bool, groups: list[int] | None, scale: float, map: str
) -> Choice:
    return Choice(
        k, score, all_weights, None if groups is None else (groups[0], groups[1]), scale, map
    )


def _choose(
    logits: Tensor,
    bias: Tensor | None,
    indices: Tensor | None,
    dtype: torch.dtype,
    saves_scores: bool,
    *choice: Any,
) -> tuple[Tensor, ...]:
    """Return three tensors, empty ones for absent results: a mutating operator cannot return a list or None."""
    results = choose(logits, _read(*choice), dtype, bias, indices, saves_scores)
    return tuple(logits.new_empty(0) if tensor is None else tensor for tensor in results)


def _choose_results(
    logits: Tensor,
    bias: Tensor | None,
    indices: Tensor | None,
    dtype: torch.dtype,
    saves_scores: bool,
    *choice: Any,
) -> tuple[Tensor, ...]:
    tokens, experts = logits.shape
    width = {BYTES: experts, BITS: (experts + 7) // 8}.get(choice[-1])
    return (
        logits.new_empty((tokens, experts), dtype=dtype),
        logits.new_empty(0)
        if width is None
        else logits.new_empty((tokens, width), dtype=torch.uint8),
        logits.new_empty((tokens, experts), dtype=torch.float32)
        if saves_scores
        else logits.new_empty(0),
    )


_OPERATORS = {
    "choose": operator(
        "router_choose(Tensor logits, Tensor? bias, Tensor(a!)? indices, ScalarType dtype, bool keeps, "
        f"{_CHOICE}) -> (Tensor, Tensor, Tensor)",
        _choose,
        _choose_results,
    ),
    "gradient": operator(
        f"router_choose_backward(Tensor? map, Tensor scores, Tensor grad_probs, ScalarType dtype, {_CHOICE}) -> Tensor",
        lambda map, scores, grad_probs, dtype, *choice: choose_backward(
            map, scores, grad_probs, _read(*choice), dtype
        ),
        lambda map, scores, grad_probs, dtype, *choice: scores.new_empty(scores.shape, dtype=dtype),
    ),
    "margins": operator(
        "router_count_margins(Tensor logits, Tensor bias, Tensor(a!) histogram, Tensor bounds, int k) -> ()",
        lambda logits, bias, histogram, bounds, k: count_margins(
            logits, bias, k, histogram, bounds
        ),
        lambda *_, **__: None,
    ),
    "loss": operator(
        "router_balance_loss(Tensor probs, Tensor tokens, Tensor? total, float factor) -> Tensor",
        lambda probs, tokens, total, factor: balance_loss(probs, tokens, factor, total),
        lambda probs, tokens, total, factor: probs.new_empty(1),
    ),
}


def _make_operator(request: RouterRequest) -> Operator:
    operator = _OPERATORS[request.operation]
    if request.operation == "loss":
        return operator.given(factor=request.factor)
    if request.operation == "margins":
        return operator.given(k=request.choice.k)

    def run(call: Any, *tensors: Tensor | None) -> Any:
        if request.operation == "gradient":
            return call(*tensors, request.result_dtype, *request.choice)
        probs, map, scores = call(
            *tensors, request.result_dtype, request.saves_scores, *request.choice
        )
        return (
            probs,
            None if request.choice.map == INDICES else map,
            scores if request.saves_scores else None,
        )

    return Operator(functools.partial(run, operator.call), functools.partial(run, operator.results))


TABLE: Table[RouterRequest] = Table(
    "router", (triton.BACKEND, reference.BACKEND), describe=RouterRequest, operator=_make_operator
)
