"""Router in a mixture of experts: expert choice, their weights, and the auxiliary loss that balances them.

Everything is computed in float32. The leading axes of the logits [..., E] are flattened to one, the tokens.
"""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..common.checks import check_option, described
from ..common.numbers import to_bool, to_float, to_int, with_article
from .functions.router import BalancingLoss, ChosenExperts
from .primitives.router import BITS, BYTES, INDICES, SOFTMAX, SOFTMAX_AFTER, Choice, count_margins
from .runtime.capture import is_capturing
from .runtime.checks import floating, same_device, tensor
from .runtime.device_checks import demand

__all__ = [
    "QBHistogramMode",
    "RoutingMapFormat",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "mark_qb_bin_bounds_validated",
]

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
_LOGITS = (torch.float32, torch.bfloat16, torch.float16)
_INDICES = (torch.int16, torch.int32, torch.int64)
_MOST = 2**31 - 1  # logits, as NVIDIA's engine counts them


class RoutingMapFormat(enum.IntEnum):
    """Routing map encoding."""

    BYTEMAP = 0  # bool [.., E]
    # uint8 [.., ceil(E / 8)], expert e in bit e % 8 of byte e // 8; bits beyond E are 0.
    BITMAP_U8 = 1


class QBHistogramMode(enum.Enum):
    """Algorithm that counts the quantile balancing histogram."""

    TWO_KERNEL = "two_kernel"
    FUSED_ATOMIC = "fused_atomic"


class ChoiceNumbers(NamedTuple):
    """Checked numbers for an expert choice.

    Attributes:
        groups: `(num_groups, group_topk)` if groups limit the choice.
        scale: Weight multiplier.
    """

    topk: int
    groups: tuple[int, int] | None
    scale: float


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
    """Choose the top-k experts of each token and compute their weights.

    Args:
        logits: [..., E], float32, bfloat16 or float16.
        topk: Experts per token.
        use_pre_softmax: With "softmax", take weights from a softmax over all experts instead of the chosen ones.
        num_groups: Number of consecutive groups that the experts form. None or a number below 1 disables the limit.
        group_topk: Group count that a token's experts come from: the groups whose topk / group_topk
            largest scores have the largest sums. None or a number below 1 disables the limit.
        scaling_factor: Weight multiplier.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus". For the last two the weights are
            normalized to sum 1 if topk > 1.
        expert_bias: [E], added in float32 to the scores that are compared, not to the weights; not with "softmax".
        routing_map_format: Routing map encoding; "bytemap" and "bitmap_u8" name the formats.
        topk_indices: int16, int32 or int64 [..., topk], contiguous. Receives the experts, the best first, and is
            returned instead of a map.
        qb_histogram: int32 [E, bins], contiguous, for quantile balancing. For every token and expert 1 is added to
            the bin for c - sigmoid(logit), with the cut-off c, the (topk + 1)st largest biased score.
        qb_bin_bounds: float32 [2], bin limits; values outside count in the first and the last bin.
        qb_histogram_mode: "two_kernel" or "fused_atomic"; both count the same here. The three arguments go together,
            with "sigmoid", a bias, no groups and topk < E.

    Of equal scores the expert with the lower number is chosen. Only the logits have a gradient.

    Returns:
        `(probs [..., E], routing_map)`: the weights in the dtype of the logits, 0 for other experts.
    """
    topk, groups, scale = check_choice(
        logits, topk, num_groups, group_topk, scaling_factor, score_function
    )
    use_pre_softmax = to_bool("use_pre_softmax", use_pre_softmax)
    expert_bias = check_bias(expert_bias, logits, score_function)
    counted = check_histogram(qb_histogram, qb_bin_bounds, qb_histogram_mode, logits)
    if counted is not None:
        check_margins(topk, groups, score_function, expert_bias, logits)
    map = map_format(routing_map_format)
    if topk_indices is not None:
        check_indices(topk_indices, logits, topk, map)
        map = INDICES
    kind = SOFTMAX_AFTER if score_function == SOFTMAX and not use_pre_softmax else score_function
    choice = Choice(topk, kind, False, groups, scale, map)
    indices = None if topk_indices is None else topk_indices.view(-1, topk)
    matrix = logits.reshape(-1, logits.shape[-1])
    probs, routing_bits = ChosenExperts.apply(matrix, expert_bias, indices, choice, logits.dtype)
    if counted is not None and expert_bias is not None:
        with torch.no_grad():
            count_margins(matrix.detach(), expert_bias.detach(), topk, *counted)
    routing = routing_map(routing_bits, map, logits) if topk_indices is None else topk_indices
    return probs.view(logits.shape), routing


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor,
    topk: int,
    score_function: str,
    routing_map_format: RoutingMapFormat | int | str = RoutingMapFormat.BYTEMAP,
) -> tuple[Tensor, Tensor]:
    """Compute normalized scores for all experts and the top-k experts of each token, without groups and bias.

    The other arguments are as in `fused_topk_with_score_function`.

    Returns:
        `(routing_map, scores float32 [..., E])`; the scores of a token sum to 1.
    """
    topk = check_choice(
        logits,
        topk,
        num_groups=None,
        group_topk=None,
        scaling_factor=None,
        score_function=score_function,
    ).topk
    map = map_format(routing_map_format)
    choice = Choice(topk, score_function, True, map=map)
    matrix = logits.reshape(-1, logits.shape[-1])
    scores, chosen = ChosenExperts.apply(matrix, None, None, choice, torch.float32)
    return routing_map(chosen, map, logits), scores.view(logits.shape)


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    """Compute the auxiliary loss C * sum over c of tokens_per_expert[c] * sum over r of probs[r, c].

    C = num_experts * coeff / (topk * total_num_tokens^2). Sums are accumulated in float32.

    Args:
        probs: [rows, columns], columns a multiple of `num_experts` (one loss per sequence: [s, b E]).
        tokens_per_expert: `columns` numbers in any dtype and shape.
        total_num_tokens: A number, or a one-element tensor on the device of `probs`, which the host does not read.
        num_experts: Expert count.
        topk: Experts per token.
        coeff: Loss factor.

    Returns:
        A scalar in the dtype of `probs`.
    """
    floating("probs", probs)
    tensor("tokens_per_expert", tokens_per_expert)
    num_experts, topk = to_int("num_experts", num_experts, 1), to_int("topk", topk, 1)
    coeff = finite("coeff", coeff)
    if probs.dim() != 2 or probs.shape[1] % num_experts:
        raise ValueError(
            f"probs is {list(probs.shape)}; give [tokens, columns], columns a multiple of num_experts={num_experts}"
        )
    if tokens_per_expert.numel() != probs.shape[1]:
        raise ValueError(
            f"tokens_per_expert is {list(tokens_per_expert.shape)}; give [{probs.shape[1]}], one a column of probs"
        )
    same_device("tokens_per_expert", tokens_per_expert, "probs", probs.device)
    tokens, factor = tokens_per_expert.reshape(-1), num_experts * coeff / topk
    total = token_total(total_num_tokens, probs.device)
    if not isinstance(total, Tensor):
        factor, total = factor / total**2, None
    return BalancingLoss.apply(probs, tokens, factor, total)


def token_total(total: int | Tensor, device: torch.device) -> int | Tensor:
    """Return `total_num_tokens` as an int, or as a one-element tensor on the device."""
    if isinstance(total, Tensor):
        if total.numel() != 1:
            raise ValueError(
                f"total_num_tokens is {total.dtype} {list(total.shape)}; give one whole number"
            )
        if total.device == device:
            return total
    return to_int("total_num_tokens", total, 1)


def finite(name: str, value: Any) -> float:
    """Convert the value to a float; raise ValueError for infinities and NaN."""
    number = to_float(name, value)
    # `math.isfinite` does not take the symbols of torch.compile
    if not -math.inf < number < math.inf:
        raise ValueError(f"{name}={number} is not finite; give a finite number")
    return number


def routing_map(routing_bits: Tensor, map: str, logits: Tensor) -> Tensor:
    """Return the map in the public dtype, with the leading axes of the logits."""
    routing_bits = routing_bits.view(torch.bool) if map == BYTES else routing_bits
    return routing_bits.view(*logits.shape[:-1], routing_bits.shape[1])


def map_format(value: Any) -> str:
    """Convert a RoutingMapFormat, its number or its name to BYTES or BITS."""
    if isinstance(value, str):
        names = {member.name.lower(): member for member in RoutingMapFormat}
        check_option("routing_map_format", value, tuple(names))
        return _MAPS[names[value]]
    if isinstance(value, RoutingMapFormat):
        return _MAPS[value]
    if isinstance(value, bool) or not hasattr(value, "__int__") or isinstance(value, float):
        raise TypeError(
            f"routing_map_format={described(value)} is {with_article(type(value))}; give a RoutingMapFormat, "
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
) -> ChoiceNumbers:
    """Convert the numbers of a choice; raise an error unless they fit the logits."""
    floating("logits", logits)
    if logits.dtype not in _LOGITS:
        raise ValueError(f"logits is {logits.dtype}; give float32, bfloat16 or float16")
    if logits.dim() < 1 or logits.numel() == 0:
        raise ValueError(
            f"logits is {list(logits.shape)}; give [tokens, experts], at least one of each"
        )
    if logits.numel() > _MOST:
        raise ValueError(
            f"logits has {logits.numel()} elements > {_MOST}; give fewer tokens at a time"
        )
    check_option("score_function", score_function, SCORE_FUNCTIONS)
    scale = 1.0 if scaling_factor is None else finite("scaling_factor", scaling_factor)
    topk = to_int("topk", topk, 1)
    experts = logits.shape[-1]
    if topk > experts:
        raise ValueError(f"topk={topk} > {experts} experts; choose fewer")
    num_groups = 0 if num_groups is None else to_int("num_groups", num_groups)
    group_topk = 0 if group_topk is None else to_int("group_topk", group_topk)
    if group_topk <= 0 or num_groups <= 0:
        return ChoiceNumbers(topk, None, scale)
    if experts % num_groups:
        raise ValueError(
            f"num_groups={num_groups} does not divide {experts} experts; give groups of equal size"
        )
    if group_topk > num_groups:
        raise ValueError(
            f"group_topk={group_topk} > num_groups={num_groups}; choose from fewer groups"
        )
    if topk % group_topk or topk // group_topk > experts // num_groups:
        raise ValueError(
            f"topk={topk} with group_topk={group_topk} takes {topk / group_topk:g} of the {experts // num_groups} "
            "experts of a group; give a topk that group_topk divides, and no more than there are"
        )
    return ChoiceNumbers(topk, (num_groups, group_topk), scale)


def check_bias(bias: Tensor | None, logits: Tensor, score_function: str) -> Tensor | None:
    """Return the expert bias in float32; raise an error unless it fits the logits."""
    if bias is None:
        return None
    tensor("expert_bias", bias)
    if score_function == SOFTMAX:
        raise ValueError(
            "expert_bias goes with 'sigmoid' and 'sqrtsoftplus'; leave it None with 'softmax'"
        )
    if tuple(bias.shape) != logits.shape[-1:]:
        raise ValueError(
            f"expert_bias is {list(bias.shape)}; give [{logits.shape[-1]}], one an expert"
        )
    same_device("expert_bias", bias, "logits", logits.device)
    return bias.float()


def check_histogram(
    histogram: Tensor | None,
    bounds: Tensor | None,
    mode: QBHistogramMode | str | None,
    logits: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Return `(histogram, bounds)` for quantile balancing, None without it."""
    if histogram is None and bounds is None and mode is None:
        return None
    if histogram is None or bounds is None or mode is None:
        missing = (
            ("qb_histogram", histogram),
            ("qb_bin_bounds", bounds),
            ("qb_histogram_mode", mode),
        )
        names = ", ".join(name for name, value in missing if value is None)
        raise ValueError(
            f"{names} is None; qb_histogram, qb_bin_bounds and qb_histogram_mode are provided together: give all three"
        )
    if not isinstance(mode, QBHistogramMode):
        check_option("qb_histogram_mode", mode, tuple(member.value for member in QBHistogramMode))
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
    if not _is_validated(bounds):
        demand(_check_bounds, (bounds,))
    return histogram, bounds


# Bounds -> (version that a caller has validated on the device, whether during the capture of a CUDA graph).
_validated: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _is_validated(bounds: Tensor) -> bool:
    """Whether a caller has validated the current values.

    Validation during a capture holds during captures only: the update on the device runs in each replay.
    """
    if bounds.is_inference():  # torch does not count writes to it
        return False
    cached = _validated.get(bounds)
    if cached is None:
        return False
    version, captured = cached
    return version == bounds._version and (not captured or is_capturing(bounds.device))


def mark_qb_bin_bounds_validated(bin_bounds: Tensor) -> None:
    """Promise that the current values of `qb_bin_bounds` are finite and in order, as after an update on the device.

    The values are not read, so the call can be captured in a CUDA graph; the promise then holds during captures. A
    later write to the tensor ends the promise.

    Args:
        bin_bounds: float32 [2], contiguous.

    Raises:
        ValueError: The tensor has another dtype, shape or layout, or is an inference tensor.
    """
    tensor("bin_bounds", bin_bounds)
    if (
        bin_bounds.dtype != torch.float32
        or tuple(bin_bounds.shape) != (2,)
        or not bin_bounds.is_contiguous()
    ):
        raise ValueError(
            f"bin_bounds is {bin_bounds.dtype} {list(bin_bounds.shape)} with strides {bin_bounds.stride()}; give "
            "contiguous float32 [2]"
        )
    if bin_bounds.is_inference():
        raise ValueError(
            "bin_bounds is an inference tensor, whose later writes torch does not count; make it outside of "
            "torch.inference_mode()"
        )
    _validated[bin_bounds] = bin_bounds._version, is_capturing(bin_bounds.device)


def _check_bounds(bounds: list[float]) -> None:
    lower, upper = bounds
    if not (math.isfinite(lower) and math.isfinite(upper) and lower < upper):
        raise ValueError(f"qb_bin_bounds={bounds}; give two finite numbers, the lower one first")


def check_margins(
    topk: int,
    groups: tuple[int, int] | None,
    score_function: str,
    bias: Tensor | None,
    logits: Tensor,
) -> None:
    """Raise ValueError for a choice whose margins cannot be counted."""
    if (
        score_function != "sigmoid"
        or bias is None
        or groups is not None
        or topk >= logits.shape[-1]
    ):
        setting = (
            f"score_function={score_function!r}, expert_bias {'None' if bias is None else 'given'}"
        )
        raise ValueError(
            f"qb_histogram with {setting}, topk={topk} of {logits.shape[-1]} experts"
            f"{'' if groups is None else ' in groups'}; supported: 'sigmoid' with a bias, no groups, and fewer than "
            "all experts"
        )


def check_indices(indices: Tensor, logits: Tensor, topk: int, map: str) -> None:
    """Raise an error unless the tensor can receive the top-k experts of each token."""
    tensor("topk_indices", indices)
    if map != BYTES:
        raise ValueError(
            "topk_indices take the place of the map; leave routing_map_format 'bytemap' with them"
        )
    shape = (*logits.shape[:-1], topk)
    if (
        indices.dtype not in _INDICES
        or tuple(indices.shape) != shape
        or not indices.is_contiguous()
    ):
        raise ValueError(
            f"topk_indices is {indices.dtype} {list(indices.shape)}; give contiguous int16, int32 or int64 "
            f"{list(shape)}"
        )
    same_device("topk_indices", indices, "logits", logits.device)
