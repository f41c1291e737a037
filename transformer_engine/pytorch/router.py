"""The router of a mixture of experts: which take a token and with which weight, and the loss that balances them.

Everything is computed in float32. Leading dimensions of the logits [.., E] count as one, the tokens.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import torch
from torch import Tensor

from ..common.checks import described, number, number_or_none, one_of, switch, whole, whole_or_none
from .functions.router import balancing_loss, chosen_experts, counted_margins
from .primitives.router import BITS, BYTES, INDICES, SOFTMAX, SOFTMAX_AFTER, Choice
from .runtime.checks import floating, same_device, tensor
from .runtime.device_checks import demand

__all__ = [
    "QBHistogramMode",
    "RoutingMapFormat",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
_LOGITS = (torch.float32, torch.bfloat16, torch.float16)
_INDICES = (torch.int16, torch.int32, torch.int64)
_MOST = 2**31 - 1  # logits, as the original counts them


class RoutingMapFormat(enum.IntEnum):
    """How a routing map says which experts take a token."""

    BYTEMAP = 0  # bool [.., E]
    BITMAP_U8 = 1  # uint8 [.., ceil(E / 8)], expert e in bit e % 8 of byte e // 8; bits beyond E are 0


class QBHistogramMode(enum.Enum):
    """How the histogram of quantile balancing is counted."""

    TWO_KERNEL = "two_kernel"
    FUSED_ATOMIC = "fused_atomic"


_MAPS = {RoutingMapFormat.BYTEMAP: BYTES, RoutingMapFormat.BITMAP_U8: BITS}


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: RoutingMapFormat | int | str = RoutingMapFormat.BYTEMAP,
    topk_indices: Tensor | None = None,
    qb_histogram: Tensor | None = None,
    qb_bin_bounds: Tensor | None = None,
    qb_histogram_mode: QBHistogramMode | str | None = None,
) -> tuple[Tensor, Tensor]:
    """(probs [.., E], routing_map): the weights of the topk experts of each token, 0 for the others, in logits' dtype.

    use_pre_softmax      with "softmax": weights are those of a softmax over all experts; else over those chosen
    num_groups           experts form so many groups, one after another, of which a token's experts come from the
    group_topk           best group_topk, by the sum of a group's topk / group_topk largest scores
    scaling_factor       the weights are multiplied by it at the end
    score_function       "softmax", "sigmoid" or "sqrtsoftplus"; the weights of the last two add up to 1 where topk > 1
    expert_bias          float32 [E], added to the scores to choose by, not to the weights; not with "softmax"
    routing_map_format   what the routing map is; "bytemap" and "bitmap_u8" stand for the formats
    topk_indices         int16, int32 or int64 [.., topk], contiguous: the experts are written there, the best first,
                         and it is returned in place of a map
    qb_histogram         int32 [E, bins], contiguous, of quantile balancing: 1 is added for every token and expert, in
                         the bin of c - sigmoid(logit), c the (topk + 1)st largest biased score, the cut-off
    qb_bin_bounds        float32 [2], where the first bin begins and the last ends; what lies outside counts in these
    qb_histogram_mode    "two_kernel" or "fused_atomic", the original's ways to count; here the counts, and the way, are
                         the same. All three go together, with "sigmoid", a bias, no groups and fewer than all experts

    Of equal scores the expert with the lower number is chosen. The gradient goes to the logits alone.
    """
    groups = check_choice(logits, topk, num_groups, group_topk, scaling_factor, score_function)
    switch("use_pre_softmax", use_pre_softmax)
    check_bias(expert_bias, logits, score_function)
    counted = check_histogram(qb_histogram, qb_bin_bounds, qb_histogram_mode, logits)
    if counted is not None:
        check_margins(topk, groups, score_function, expert_bias, logits)
    map = map_format(routing_map_format)
    if topk_indices is not None:
        check_indices(topk_indices, logits, topk, map)
        map = INDICES
    kind = SOFTMAX_AFTER if score_function == SOFTMAX and not use_pre_softmax else score_function
    scale = 1.0 if scaling_factor is None else float(scaling_factor)
    choice = Choice(topk, kind, False, groups, scale, map)
    indices = None if topk_indices is None else topk_indices.view(-1, topk)
    probs, chosen = chosen_experts(_matrix(logits), choice, logits.dtype, expert_bias, indices)
    if counted is not None and expert_bias is not None:
        counted_margins(_matrix(logits), expert_bias, topk, *counted)
    routing = routing_map(chosen, map, logits) if topk_indices is None else topk_indices
    return probs.view(logits.shape), routing


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor,
    topk: int,
    score_function: str,
    routing_map_format: RoutingMapFormat | int | str = RoutingMapFormat.BYTEMAP,
) -> tuple[Tensor, Tensor]:
    """(routing_map, scores float32 [.., E]): the scores of all experts, which add up to 1, and the topk of each token.

    Parameters as in fused_topk_with_score_function; neither groups nor a bias limit the choice.
    """
    check_choice(logits, topk, None, None, None, score_function)
    map = map_format(routing_map_format)
    choice = Choice(topk, score_function, True, map=map)
    scores, chosen = chosen_experts(_matrix(logits), choice, torch.float32)
    return routing_map(chosen, map, logits), scores.view(logits.shape)


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    """A scalar in probs' dtype: C sum over c of tokens_per_expert[c] sum over r of probs[r, c], accumulated in float32.

    C = num_experts coeff / (topk total_num_tokens^2)

    probs               [rows, columns], columns a multiple of num_experts (a loss for each sequence: [s, b E])
    tokens_per_expert   [columns], integers or floating point
    total_num_tokens    an int, or one integer on probs' device, which the host does not read
    """
    floating("probs", probs)
    tensor("tokens_per_expert", tokens_per_expert)
    for name, value in (("num_experts", num_experts), ("topk", topk)):
        whole(name, value)
    number("coeff", coeff)
    if probs.dim() != 2 or probs.shape[1] % num_experts:
        raise ValueError(
            f"probs is {list(probs.shape)}; give [tokens, columns], columns a multiple of num_experts={num_experts}"
        )
    if tuple(tokens_per_expert.shape) != probs.shape[1:]:
        raise ValueError(
            f"tokens_per_expert is {list(tokens_per_expert.shape)}; give [{probs.shape[1]}], one a column of probs"
        )
    same_device("tokens_per_expert", tokens_per_expert, "probs", probs.device)
    factor = num_experts * coeff / topk
    if isinstance(total_num_tokens, Tensor):
        if total_num_tokens.numel() != 1 or total_num_tokens.is_floating_point():
            raise ValueError(
                f"total_num_tokens is {total_num_tokens.dtype} {list(total_num_tokens.shape)}; give one whole number"
            )
        same_device("total_num_tokens", total_num_tokens, "probs", probs.device)
        return balancing_loss(probs, tokens_per_expert, factor, total_num_tokens)
    whole("total_num_tokens", total_num_tokens)
    return balancing_loss(probs, tokens_per_expert, factor / total_num_tokens**2)


def _matrix(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def routing_map(chosen: Tensor, map: str, logits: Tensor) -> Tensor:
    """The map as callers get it, with the logits' leading dimensions."""
    chosen = chosen.view(torch.bool) if map == BYTES else chosen
    return chosen.view(*logits.shape[:-1], chosen.shape[1])


def map_format(value: Any) -> str:
    """BYTES or BITS, of a RoutingMapFormat, its number or its name."""
    if isinstance(value, str):
        names = {member.name.lower(): member for member in RoutingMapFormat}
        one_of("routing_map_format", value, tuple(names))
        return _MAPS[names[value]]
    if isinstance(value, RoutingMapFormat):
        return _MAPS[value]
    if isinstance(value, bool) or not hasattr(value, "__int__") or isinstance(value, float):
        raise TypeError(
            f"routing_map_format={described(value)} is a {type(value).__name__}; give a RoutingMapFormat, "
            "'bytemap' or 'bitmap_u8'"
        )
    if int(value) not in list(RoutingMapFormat):
        raise ValueError(
            f"routing_map_format={described(value)} does not exist; choose one of 0 (bytemap), 1 (bitmap_u8)"
        )
    return _MAPS[RoutingMapFormat(int(value))]


def check_choice(
    logits: Tensor,
    topk: int,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
) -> tuple[int, int] | None:
    """(num_groups, group_topk) where they limit the choice."""
    floating("logits", logits)
    if logits.dtype not in _LOGITS:
        raise ValueError(f"logits is {logits.dtype}; give float32, bfloat16 or float16")
    if logits.dim() < 2 or logits.numel() == 0:
        raise ValueError(f"logits is {list(logits.shape)}; give [tokens, experts], at least one of each")
    if logits.numel() > _MOST:
        raise ValueError(f"logits has {logits.numel()} elements > {_MOST}; give fewer tokens at a time")
    one_of("score_function", score_function, SCORE_FUNCTIONS)
    number_or_none("scaling_factor", scaling_factor)
    whole("topk", topk)
    experts = logits.shape[-1]
    if topk > experts:
        raise ValueError(f"topk={topk} > {experts} experts; choose fewer")
    whole_or_none("num_groups", num_groups, -1)
    whole_or_none("group_topk", group_topk, -1)
    if group_topk is None or group_topk <= 0 or num_groups is None or num_groups <= 0:
        return None
    if experts % num_groups:
        raise ValueError(
            f"num_groups={num_groups} does not divide {experts} experts; give groups of equal size"
        )
    if group_topk > num_groups:
        raise ValueError(f"group_topk={group_topk} > num_groups={num_groups}; choose from fewer groups")
    if topk % group_topk or topk // group_topk > experts // num_groups:
        raise ValueError(
            f"topk={topk} with group_topk={group_topk} takes {topk / group_topk:g} of the {experts // num_groups} "
            "experts of a group; give a topk that group_topk divides, and no more than there are"
        )
    return num_groups, group_topk


def check_bias(bias: Tensor | None, logits: Tensor, score_function: str) -> None:
    """A bias of the experts, or None."""
    if bias is None:
        return
    tensor("expert_bias", bias)
    if score_function == SOFTMAX:
        raise ValueError("expert_bias goes with 'sigmoid' and 'sqrtsoftplus'; leave it None with 'softmax'")
    if bias.dtype != torch.float32:
        raise TypeError(f"expert_bias is {bias.dtype}; give float32, for example expert_bias.float()")
    if tuple(bias.shape) != logits.shape[-1:]:
        raise ValueError(f"expert_bias is {list(bias.shape)}; give [{logits.shape[-1]}], one an expert")
    same_device("expert_bias", bias, "logits", logits.device)


def check_histogram(
    histogram: Tensor | None, bounds: Tensor | None, mode: QBHistogramMode | str | None, logits: Tensor
) -> tuple[Tensor, Tensor] | None:
    """(histogram, bounds) of quantile balancing; None where none is counted."""
    if histogram is None and bounds is None and mode is None:
        return None
    if histogram is None or bounds is None or mode is None:
        missing = ("qb_histogram", histogram), ("qb_bin_bounds", bounds), ("qb_histogram_mode", mode)
        names = ", ".join(name for name, value in missing if value is None)
        raise ValueError(
            f"{names} is None; qb_histogram, qb_bin_bounds and qb_histogram_mode are provided together: give all three"
        )
    if not isinstance(mode, QBHistogramMode):
        one_of("qb_histogram_mode", mode, tuple(member.value for member in QBHistogramMode))
    tensor("qb_histogram", histogram)
    tensor("qb_bin_bounds", bounds)
    experts = logits.shape[-1]
    fits = histogram.dim() == 2 and histogram.shape[0] == experts and histogram.shape[1] > 0
    if histogram.dtype != torch.int32 or not fits or not histogram.is_contiguous():
        raise ValueError(
            f"qb_histogram is {histogram.dtype} {list(histogram.shape)}; give contiguous int32 [{experts}, bins]"
        )
    if bounds.dtype != torch.float32 or tuple(bounds.shape) != (2,):
        raise ValueError(f"qb_bin_bounds is {bounds.dtype} {list(bounds.shape)}; give float32 [2]")
    same_device("qb_histogram", histogram, "logits", logits.device)
    same_device("qb_bin_bounds", bounds, "logits", logits.device)
    demand(_check_bounds, (bounds,))
    return histogram, bounds


def _check_bounds(bounds: list[float]) -> None:
    lower, upper = bounds
    if not (math.isfinite(lower) and math.isfinite(upper) and lower < upper):
        raise ValueError(f"qb_bin_bounds={bounds}; give two finite numbers, the lower one first")


def check_margins(
    topk: int, groups: tuple[int, int] | None, score_function: str, bias: Tensor | None, logits: Tensor
) -> None:
    """ValueError for a choice whose margins are not counted."""
    if score_function != "sigmoid" or bias is None or groups is not None or topk >= logits.shape[-1]:
        given = f"score_function={score_function!r}, expert_bias {'None' if bias is None else 'given'}"
        raise ValueError(
            f"qb_histogram with {given}, topk={topk} of {logits.shape[-1]} experts"
            f"{'' if groups is None else ' in groups'}; it takes 'sigmoid' with a bias, no groups, and fewer than all "
            "experts"
        )


def check_indices(indices: Tensor, logits: Tensor, topk: int, map: str) -> None:
    """Room for the topk experts of each token, in place of a map of bytes."""
    tensor("topk_indices", indices)
    if map != BYTES:
        raise ValueError(
            "topk_indices take the place of the map; leave routing_map_format 'bytemap' with them"
        )
    shape = (*logits.shape[:-1], topk)
    if indices.dtype not in _INDICES or tuple(indices.shape) != shape or not indices.is_contiguous():
        raise ValueError(
            f"topk_indices is {indices.dtype} {list(indices.shape)}; give contiguous int16, int32 or int64 "
            f"{list(shape)}"
        )
    same_device("topk_indices", indices, "logits", logits.device)
