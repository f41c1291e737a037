"""The router's passes by the extension's names: the experts of each token, scores of all, and the balancing loss."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine.common.checks import number, switch, whole
from transformer_engine.pytorch.functions.router import balancing_gradient
from transformer_engine.pytorch.primitives.router import (
    INDICES,
    SOFTMAX,
    SOFTMAX_AFTER,
    Choice,
    balance_loss,
    choose,
    choose_backward,
)
from transformer_engine.pytorch.router import (
    RoutingMapFormat,
    check_bias,
    check_choice,
    check_indices,
    map_format,
    routing_map,
)
from transformer_engine.pytorch.runtime.checks import floating, tensor

NVTERoutingMapFormat = RoutingMapFormat


def fused_topk_with_score_function_fwd(
    logits: Tensor, topk: int, use_pre_softmax: bool, num_groups: int | None, group_topk: int | None,
    scaling_factor: float | None, score_function: str, expert_bias: Tensor | None,
    routing_map_format: RoutingMapFormat | int | str = RoutingMapFormat.BYTEMAP,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(probs [.., E], routing map or topk_indices, intermediate float32 [T, E] for the gradient)."""
    groups = check_choice(logits, topk, num_groups, group_topk, scaling_factor, score_function)
    check_bias(expert_bias, logits, score_function)
    map, indices = map_format(routing_map_format), None
    if topk_indices is not None:
        check_indices(topk_indices, logits, topk, map)
        map, indices = INDICES, topk_indices.view(-1, topk)
    kind = _kind(score_function, use_pre_softmax)
    choice = Choice(topk, kind, False, groups, 1.0 if scaling_factor is None else float(scaling_factor), map)
    flat = logits.reshape(-1, logits.shape[-1])
    probs, chosen, intermediate = choose(flat, choice, logits.dtype, expert_bias, indices)
    assert intermediate is not None
    if topk_indices is None:
        assert chosen is not None
        return probs.view(logits.shape), routing_map(chosen, map, logits), intermediate
    return probs.view(logits.shape), topk_indices, intermediate


def fused_topk_with_score_function_bwd(
    routing_map: Tensor,
    intermediate: Tensor,
    grad_probs: Tensor,
    grad_logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: RoutingMapFormat | int | str = RoutingMapFormat.BYTEMAP,
) -> None:
    """grad_logits [.., E] = the gradient of the logits of fused_topk_with_score_function_fwd; in place."""
    switch("use_dense_indices", use_dense_indices)
    map = INDICES if use_dense_indices else map_format(routing_map_format)
    scale = 1.0 if scaling_factor is None else float(scaling_factor)
    choice = Choice(topk, _kind(score_function, use_pre_softmax), False, None, scale, map)
    _gradient(routing_map, intermediate, grad_probs, grad_logits, choice)


def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor,
    topk: int,
    score_function: str,
    routing_map_format: RoutingMapFormat | int | str = RoutingMapFormat.BYTEMAP,
) -> tuple[Tensor, Tensor, Tensor]:
    """(scores float32 [.., E], routing map, intermediate float32 [T, E] for the gradient)."""
    check_choice(logits, topk, None, None, None, score_function)
    map = map_format(routing_map_format)
    flat = logits.reshape(-1, logits.shape[-1])
    choice = Choice(topk, score_function, True, map=map)
    scores, chosen, intermediate = choose(flat, choice, torch.float32)
    assert chosen is not None and intermediate is not None
    return scores.view(logits.shape), routing_map(chosen, map, logits), intermediate


def fused_score_for_moe_aux_loss_bwd(
    intermediate: Tensor, grad_scores: Tensor, grad_logits: Tensor, topk: int, score_function: str
) -> None:
    """grad_logits [.., E] = the gradient of the logits of fused_score_for_moe_aux_loss_fwd; in place."""
    _gradient(None, intermediate, grad_scores, grad_logits, Choice(topk, score_function, True))


def fused_moe_aux_loss_fwd(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, num_experts: int, num_rows: int,
    num_cols: int, topk: int, coeff: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, its constant C = num_experts coeff / (topk total_num_tokens^2) as float32 [1]).

    total_num_tokens   an int, or one whole number on the device, which the host does not read
    """
    constant = _constant(probs, tokens_per_expert, (num_rows, num_cols), num_experts, topk, coeff)
    if isinstance(total_num_tokens, Tensor):
        loss = balance_loss(probs, tokens_per_expert, constant, total_num_tokens)[0]
        return loss, constant / total_num_tokens.view(1).float().square()
    whole("total_num_tokens", total_num_tokens)
    constant /= total_num_tokens**2
    loss = balance_loss(probs, tokens_per_expert, constant)[0]
    return loss, torch.full((1,), constant, dtype=torch.float32, device=probs.device)


fused_moe_aux_loss_fwd_graph_safe = fused_moe_aux_loss_fwd


def fused_moe_aux_loss_bwd(
    Const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int, num_cols: int, grad_aux_loss: Tensor
) -> Tensor:
    """grad_probs [num_rows, num_cols] = C tokens_per_expert grad_aux_loss in every row; C comes first in Const_buf."""
    floating("Const_buf", Const_buf)
    floating("grad_aux_loss", grad_aux_loss)
    tensor("tokens_per_expert", tokens_per_expert)
    shape = torch.Size((num_rows, num_cols))
    if tokens_per_expert.numel() != num_cols:
        raise ValueError(f"tokens_per_expert is {list(tokens_per_expert.shape)}; give [{num_cols}]")
    row = tokens_per_expert.float() * Const_buf.view(-1)[0]
    return balancing_gradient(grad_aux_loss, row, 1.0, None, shape).contiguous()


def _kind(score_function: str, use_pre_softmax: bool) -> str:
    return SOFTMAX_AFTER if score_function == SOFTMAX and not use_pre_softmax else score_function


def _gradient(
    map: Tensor | None, intermediate: Tensor, grad_probs: Tensor, grad_logits: Tensor, choice: Choice
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
    made = choose_backward(map, scores, gradient, choice, grad_logits.dtype)
    grad_logits.copy_(made.view(grad_logits.shape))


def _constant(
    probs: Tensor, tokens: Tensor, shape: tuple[int, int], num_experts: int, topk: int, coeff: float
) -> float:
    floating("probs", probs)
    tensor("tokens_per_expert", tokens)
    whole("num_experts", num_experts)
    whole("topk", topk)
    number("coeff", coeff)
    if tuple(probs.shape) != shape or tokens.numel() != shape[1] or shape[1] % num_experts:
        raise ValueError(
            f"probs is {list(probs.shape)} and tokens_per_expert {list(tokens.shape)}; give {list(shape)} and "
            f"[{shape[1]}], a multiple of num_experts={num_experts}"
        )
    return num_experts * coeff / topk
