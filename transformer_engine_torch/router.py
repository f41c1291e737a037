"""Forward and backward passes for the router and its auxiliary loss, under the extension's names."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine.common.numbers import to_bool, to_int
from transformer_engine.pytorch.functions.router import balancing_gradient
from transformer_engine.pytorch.primitives.router import (
    INDICES,
    SOFTMAX,
    SOFTMAX_AFTER,
    Choice,
    balance_loss,
    choose,
    choose_backward,
    count_margins,
)
from transformer_engine.pytorch.router import (
    QBHistogramMode,
    RoutingMapFormat,
    check_bias,
    check_choice,
    check_histogram,
    check_indices,
    check_margins,
    finite,
    map_format,
    routing_map,
    token_total,
)
from transformer_engine.pytorch.runtime.checks import floating, tensor

from .enums import NVTEQBHistogramMode

__all__ = [
    "NVTERoutingMapFormat",
    "fused_moe_aux_loss_bwd",
    "fused_moe_aux_loss_fwd",
    "fused_moe_aux_loss_fwd_graph_safe",
    "fused_score_for_moe_aux_loss_bwd",
    "fused_score_for_moe_aux_loss_fwd",
    "fused_topk_with_score_function_bwd",
    "fused_topk_with_score_function_fwd",
    "fused_topk_with_score_function_qb_fwd",
]

NVTERoutingMapFormat = RoutingMapFormat
"""Encoding of a routing map: one byte or one bit per token and expert."""


def fused_topk_with_score_function_fwd(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(probs [..., E], routing map or topk_indices, intermediate float32 [T, E] for the gradient)`."""
    topk, groups, scale = check_choice(
        logits, topk, num_groups, group_topk, scaling_factor, score_function
    )
    expert_bias = check_bias(expert_bias, logits, score_function)
    map, indices = map_format(routing_map_format), None
    if topk_indices is not None:
        check_indices(topk_indices, logits, topk, map)
        map, indices = INDICES, topk_indices.view(-1, topk)
    kind = _kind(score_function, use_pre_softmax)
    choice = Choice(topk, kind, False, groups, scale, map)
    flat = logits.reshape(-1, logits.shape[-1])
    probs, routing_bits, intermediate = choose(flat, choice, logits.dtype, expert_bias, indices)
    assert intermediate is not None
    if topk_indices is None:
        assert routing_bits is not None
        return probs.view(logits.shape), routing_map(routing_bits, map, logits), intermediate
    return probs.view(logits.shape), topk_indices, intermediate


def fused_topk_with_score_function_bwd(
    routing_map: Tensor,
    intermediate_output: Tensor,
    grad_probs: Tensor,
    grad_logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: RoutingMapFormat | int | str = RoutingMapFormat.BYTEMAP,
) -> None:
    """Write the logit gradient for `fused_topk_with_score_function_fwd` to grad_logits [..., E]."""
    dense = to_bool("use_dense_indices", use_dense_indices)
    map = INDICES if dense else map_format(routing_map_format)
    scale = 1.0 if scaling_factor is None else finite("scaling_factor", scaling_factor)
    kind = _kind(score_function, use_pre_softmax)
    choice = Choice(
        to_int("topk", topk, 1), kind, all_weights=False, groups=None, scale=scale, map=map
    )
    _gradient(routing_map, intermediate_output, grad_probs, grad_logits, choice)


def fused_topk_with_score_function_qb_fwd(
    logits: Tensor,
    topk: int,
    scaling_factor: float | None,
    expert_bias: Tensor,
    routing_map_format: RoutingMapFormat | int | str,
    topk_indices: Tensor | None,
    histogram: Tensor,
    bin_bounds: Tensor,
    histogram_mode: NVTEQBHistogramMode | QBHistogramMode | int | str,
    bin_bounds_validated: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Choose experts by sigmoid scores, and count the quantile-balancing margins.

    Args:
        logits: [..., E], float32, bfloat16 or float16.
        topk: Number of experts per token, below E.
        scaling_factor: Weight multiplier; None is 1.
        expert_bias: float32 [E], added to the scores that are compared, not to the weights.
        routing_map_format: Routing map encoding.
        topk_indices: int16, int32 or int64 [..., topk] that receives the experts and is returned instead of a map; or
            None.
        histogram: int32 [E, bins], to which the counts are added.
        bin_bounds: float32 [2], the limits of the bins.
        histogram_mode: Counting algorithm; both count the same.
        bin_bounds_validated: Has no effect; the bounds are checked where that does not wait for a GPU.

    Returns:
        `(probs [..., E], routing map or topk_indices, sigmoid scores float32 [T, E], cut-off float32 [T], histogram)`.
        A token's cut-off is its (topk + 1)st largest biased score.
    """
    if isinstance(histogram_mode, (str, QBHistogramMode)):
        named = histogram_mode
    else:
        named = NVTEQBHistogramMode(int(histogram_mode)).name.lower()
    checked = check_choice(
        logits,
        topk,
        num_groups=None,
        group_topk=None,
        scaling_factor=scaling_factor,
        score_function="sigmoid",
    )
    bias = check_bias(expert_bias, logits, "sigmoid")
    counted = check_histogram(histogram, bin_bounds, named, logits)
    check_margins(checked.topk, None, "sigmoid", bias, logits)
    assert bias is not None and counted is not None
    probs, routing, scores = fused_topk_with_score_function_fwd(
        logits,
        topk,
        use_pre_softmax=False,
        num_groups=None,
        group_topk=None,
        scaling_factor=scaling_factor,
        score_function="sigmoid",
        expert_bias=bias,
        routing_map_format=routing_map_format,
        topk_indices=topk_indices,
    )
    cutoff = (scores + bias).topk(checked.topk + 1, dim=-1).values[:, checked.topk]
    count_margins(
        logits.detach().reshape(-1, logits.shape[-1]), bias.detach(), checked.topk, *counted
    )
    return probs, routing, scores, cutoff, histogram


def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor,
    topk: int,
    score_function: str,
    routing_map_format: RoutingMapFormat | int | str = RoutingMapFormat.BYTEMAP,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(scores float32 [..., E], routing map, intermediate float32 [T, E] for the gradient)`."""
    topk = check_choice(
        logits,
        topk,
        num_groups=None,
        group_topk=None,
        scaling_factor=None,
        score_function=score_function,
    ).topk
    map = map_format(routing_map_format)
    flat = logits.reshape(-1, logits.shape[-1])
    choice = Choice(topk, score_function, True, map=map)
    scores, routing_bits, intermediate = choose(flat, choice, torch.float32)
    assert routing_bits is not None and intermediate is not None
    return scores.view(logits.shape), routing_map(routing_bits, map, logits), intermediate


def fused_score_for_moe_aux_loss_bwd(
    intermediate: Tensor, grad_scores: Tensor, grad_logits: Tensor, topk: int, score_function: str
) -> None:
    """Write the logit gradient for `fused_score_for_moe_aux_loss_fwd` to grad_logits [..., E]."""
    choice = Choice(to_int("topk", topk, 1), score_function, True)
    _gradient(None, intermediate, grad_scores, grad_logits, choice)


def fused_moe_aux_loss_fwd(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[Tensor, Tensor]:
    """Return `(loss, C)`, with C = num_experts * coeff / (topk * total_num_tokens^2) as float32 [1].

    Args:
        total_num_tokens: A number, or a one-element tensor on the device, which the host does not read.
    """
    shape = (num_rows, num_cols)
    floating("probs", probs)
    tensor("tokens_per_expert", tokens_per_expert)
    num_experts, topk = to_int("num_experts", num_experts, 1), to_int("topk", topk, 1)
    coeff = finite("coeff", coeff)
    if (
        tuple(probs.shape) != shape
        or tokens_per_expert.numel() != shape[1]
        or shape[1] % num_experts
    ):
        raise ValueError(
            f"probs is {list(probs.shape)} and tokens_per_expert {list(tokens_per_expert.shape)}; give {list(shape)} "
            f"and [{shape[1]}], a multiple of num_experts={num_experts}"
        )
    constant = num_experts * coeff / topk
    tokens, total = tokens_per_expert.reshape(-1), token_total(total_num_tokens, probs.device)
    if isinstance(total, Tensor):
        loss = balance_loss(probs, tokens, constant, total)[0]
        return loss, constant / total.view(1).float().square()
    constant /= total**2
    loss = balance_loss(probs, tokens, constant)[0]
    return loss, torch.full((1,), constant, dtype=torch.float32, device=probs.device)


fused_moe_aux_loss_fwd_graph_safe = fused_moe_aux_loss_fwd


def fused_moe_aux_loss_bwd(
    Const_buf: Tensor,
    tokens_per_expert: Tensor,
    num_rows: int,
    num_cols: int,
    grad_aux_loss: Tensor,
) -> Tensor:
    """Compute C * tokens_per_expert * grad_aux_loss in every row of [num_rows, num_cols]; C is Const_buf[0]."""
    floating("Const_buf", Const_buf)
    floating("grad_aux_loss", grad_aux_loss)
    tensor("tokens_per_expert", tokens_per_expert)
    shape = torch.Size((to_int("num_rows", num_rows, 0), to_int("num_cols", num_cols, 0)))
    if tokens_per_expert.numel() != num_cols:
        raise ValueError(f"tokens_per_expert is {list(tokens_per_expert.shape)}; give [{num_cols}]")
    row = tokens_per_expert.reshape(-1).float() * Const_buf.view(-1)[0]
    return balancing_gradient(grad_aux_loss, row, 1.0, None, shape).contiguous()


def _kind(score_function: str, use_pre_softmax: bool) -> str:
    return SOFTMAX_AFTER if score_function == SOFTMAX and not use_pre_softmax else score_function


def _gradient(
    map: Tensor | None,
    intermediate: Tensor,
    grad_probs: Tensor,
    grad_logits: Tensor,
    choice: Choice,
) -> None:
    floating("intermediate", intermediate)
    floating("grad_probs", grad_probs)
    floating("grad_logits", grad_logits)
    if grad_logits.shape != grad_probs.shape or intermediate.numel() != grad_probs.numel():
        raise ValueError(
            f"intermediate is {list(intermediate.shape)}, grad_probs {list(grad_probs.shape)} and grad_logits "
            f"{list(grad_logits.shape)}; give all [.., experts]"
        )
    experts = grad_probs.shape[-1]
    if map is not None:
        map = map.view(torch.uint8) if map.dtype is torch.bool else map
        map = map.reshape(-1, map.shape[-1])
    scores, gradient = intermediate.view(-1, experts), grad_probs.reshape(-1, experts)
    grad_scores = choose_backward(map, scores, gradient, choice, grad_logits.dtype)
    grad_logits.copy_(grad_scores.view(grad_logits.shape))
