"""Reference of the mixture-of-experts router, in float32 torch operations on any device.

The file has the choice of experts, its gradient, the auxiliary loss, and histograms of margins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend, depends_on_gpu
from ...runtime.tracing import cast_result
from ..activation.reference import sigmoid

SOFTMAX, SOFTMAX_AFTER, SIGMOID, SQRTSOFTPLUS = (
    "softmax",
    "softmax_after",
    "sigmoid",
    "sqrtsoftplus",
)
BYTES, BITS, INDICES = "bytes", "bits", "indices"


class Choice(NamedTuple):
    """The choice of k experts per token.

    Attributes:
        k: Experts per token.
        score: SOFTMAX, SIGMOID or SQRTSOFTPLUS over the logits; SOFTMAX_AFTER: a softmax over the chosen logits.
        all_weights: Return weights of all experts, which sum to 1, instead of the chosen experts' weights only.
        groups: (group count, candidate group count). A group's score sums its k / (candidate group
            count) largest scores. None: all experts are candidates.
        scale: Factor of the weights of chosen experts.
        map: BYTES: uint8 [T, E]. BITS: uint8 [T, ceil(E / 8)], expert e in bit e % 8 of byte e // 8. INDICES: [T, k].
    """

    k: int
    score: str
    all_weights: bool = False
    groups: tuple[int, int] | None = None
    scale: float = 1.0
    map: str = BYTES


class RouterRequest(NamedTuple):
    """One operation of the router.

    "choose", "gradient" and "margins" are for logits [T, E], "loss" is for probabilities [rows, columns].

    Attributes:
        operation: Operation name.
        shape: Logit or probability shape.
        dtype: Dtype of the logits or probabilities read.
        result_dtype: Result dtype.
        choice: Choice settings.
        saves_scores: Whether the scores are returned for the gradient.
        factor: Loss factor.
        dynamic: Whether the loss is divided by a squared token count on the device.
        bins: Number of bins in a margin histogram.
    """

    operation: str
    shape: tuple[int, int]
    dtype: torch.dtype
    result_dtype: torch.dtype
    device: torch.device
    choice: Choice = Choice(1, SOFTMAX)
    saves_scores: bool = True
    factor: float = 1.0
    dynamic: bool = False
    bins: int = 0


def bind(request: RouterRequest) -> Callable[..., Any]:
    """Return the operation as a callable.

    * choose: (logits, bias, indices) -> (probs, map, scores)
    * gradient: (map, scores, grad_probs) -> grad_logits
    * margins: (logits, bias, histogram, bounds) -> None
    * loss: (probs, tokens, total) -> loss [1]
    """
    choice, dtype = request.choice, request.result_dtype
    if request.operation == "choose":
        return lambda logits, bias, indices: choose(
            logits, bias, indices, choice, dtype, request.saves_scores
        )
    if request.operation == "gradient":
        return lambda map, scores, grad_probs: gradient(map, scores, grad_probs, choice, dtype)
    if request.operation == "margins":
        return lambda logits, bias, histogram, bounds: margins(
            logits, bias, histogram, bounds, choice.k
        )
    return lambda probs, tokens, total: loss(probs, tokens, total, request.factor)


# Literal constants: torch.compile turns a global float into a symbol while shapes are dynamic, and cannot use it in two
# calls of one graph. 1e-20 keeps sums from being 0.
def choose(
    logits: Tensor,
    bias: Tensor | None,
    indices: Tensor | None,
    choice: Choice,
    dtype: torch.dtype,
    saves_scores: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return probs [T, E], map and scores float32 [T, E]; indices [T, k] are written in place."""
    x = logits.to(torch.float32)
    if choice.score == SOFTMAX:
        score = x.softmax(1)
    elif choice.score == SOFTMAX_AFTER:
        score = x
    else:
        score = sigmoid(x) if choice.score == SIGMOID else softplus(x).sqrt()
    key = score if bias is None else score + bias.to(torch.float32)
    experts = _largest_indices(_mask_groups(key, choice), choice.k)
    if indices is not None:
        indices.copy_(experts)
    routing_map = torch.zeros_like(x, dtype=torch.uint8).scatter(1, experts, 1)
    saved = score
    if choice.all_weights:
        weight = score if choice.score == SOFTMAX else score / (score.sum(1, keepdim=True) + 1e-20)
    else:
        weight = torch.where(routing_map != 0, score, 0.0)
        if choice.score == SOFTMAX_AFTER:
            weight = torch.where(routing_map != 0, x, -torch.inf).softmax(1)
            saved = torch.where(routing_map != 0, weight, -torch.inf)
        elif choice.score != SOFTMAX and choice.k > 1:
            weight = weight / (weight.sum(1, keepdim=True) + 1e-20)
        weight = weight * choice.scale
    if choice.score not in (SOFTMAX, SOFTMAX_AFTER, SIGMOID):
        saved = x
    map = {BYTES: lambda: routing_map, BITS: lambda: pack_bits(routing_map)}.get(
        choice.map, lambda: None
    )()
    return cast_result(weight, dtype), map, saved.clone() if saves_scores else None


def gradient(
    map: Tensor | None, scores: Tensor, grad_probs: Tensor, choice: Choice, dtype: torch.dtype
) -> Tensor:
    """Return grad_logits [T, E]."""
    g = grad_probs.to(torch.float32)
    has_weight = (
        torch.ones_like(scores, dtype=torch.bool)
        if choice.all_weights
        else _choice_mask(map, scores, choice)
    )
    if not choice.all_weights:
        g = g * choice.scale
    g = torch.where(has_weight, g, 0.0)
    if choice.score in (SOFTMAX, SOFTMAX_AFTER):
        active = torch.where(has_weight, scores, 0.0) if choice.score == SOFTMAX_AFTER else scores
        return (active * (g - (g * active).sum(1, keepdim=True))).to(dtype)
    active = scores if choice.score == SIGMOID else softplus(scores).sqrt()
    share = torch.where(has_weight, active, 0.0)
    if choice.all_weights or choice.k > 1:
        total = share.sum(1, keepdim=True) + 1e-20
        g = g / total - (g * share).sum(1, keepdim=True) / total / total
    if choice.score == SIGMOID:
        slope = active * (1 - active)
    else:
        slope = torch.where(scores > 20.0, 1.0, sigmoid(scores)) / (2 * active + 1e-20)
    return torch.where(has_weight, g * slope, 0.0).to(dtype)


def margins(logits: Tensor, bias: Tensor, histogram: Tensor, bounds: Tensor, k: int) -> None:
    """histogram[e, bin] += 1 for every token, by the margin c - score of e; c: the (k + 1)st largest biased score.

    bin = floor((c - score - lower) * bins / (upper - lower)), clamped to the first and last bin.
    """
    bins = histogram.shape[1]
    score = sigmoid(logits.to(torch.float32))
    cutoff = (score + bias).topk(k + 1, dim=1).values[:, -1:]
    lower, upper = bounds.to(torch.float32).unbind(0)
    bin_index = ((cutoff - score - lower) * bins / (upper - lower)).floor()
    bin_index = torch.where(bin_index > 0, bin_index.clamp(max=bins - 1), 0.0).long()
    histogram.scatter_add_(1, bin_index.t(), torch.ones_like(bin_index.t(), dtype=histogram.dtype))


def loss(probs: Tensor, tokens: Tensor, total: Tensor | None, factor: float) -> Tensor:
    """Return [1] = factor / total^2 * sum over c of tokens[c] * sum over r of probs[r, c], in probs' dtype."""
    sums = probs.to(torch.float32).sum(0) * tokens.to(torch.float32)
    value = sums.sum().view(1) * factor
    if total is not None:
        count = total.to(torch.float32)
        value = value / count / count
    return cast_result(value, probs.dtype)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x), or x above 20, in float32."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))


def pack_bits(routing_map: Tensor) -> Tensor:
    """Pack uint8 [T, E] to uint8 [T, ceil(E / 8)], with expert e in bit e % 8 of byte e // 8."""
    rows, experts = routing_map.shape
    padded = torch.nn.functional.pad(routing_map.to(torch.int32), (0, -experts % 8)).view(
        rows, -1, 8
    )
    return (
        (padded << torch.arange(8, device=routing_map.device, dtype=torch.int32))
        .sum(2)
        .to(torch.uint8)
    )


def _largest_indices(key: Tensor, count: int) -> Tensor:
    """Indices [T, count] of the largest keys, the largest first; ties go to the lower index."""
    return key.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _mask_groups(key: Tensor, choice: Choice) -> Tensor:
    """Return the keys, -inf for experts outside the best groups."""
    if choice.groups is None:
        return key
    count, top_groups = choice.groups
    grouped = key.view(key.shape[0], count, -1)
    total = grouped.topk(choice.k // top_groups, dim=2).values.sum(2)
    best = torch.zeros_like(total, dtype=torch.bool).scatter(
        1, _largest_indices(total, top_groups), True
    )
    return torch.where(best[:, :, None], grouped, -torch.inf).view(key.shape)


def _choice_mask(map: Tensor | None, scores: Tensor, choice: Choice) -> Tensor:
    """Return bool [T, E]: the chosen experts."""
    assert map is not None
    if choice.map == BYTES:
        return map != 0
    if choice.map == BITS:
        places = torch.arange(8, device=map.device, dtype=torch.int32)
        return (((map.to(torch.int32)[:, :, None] >> places) & 1) != 0).flatten(1)[
            :, : scores.shape[1]
        ]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, map.long(), True)


BACKEND: Backend[RouterRequest] = Backend("reference", bind=bind, batch_dependent=depends_on_gpu)
