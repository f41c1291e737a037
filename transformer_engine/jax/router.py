"""Expert choice for a token, expert weights, and the loss that balances the experts."""

from __future__ import annotations

import enum
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..common.checks import described, integer, number, switch, whole
from .runtime.checks import check_array, check_shaped, check_values

__all__ = [
    "RoutingMapFormat",
    "ScoreFunction",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]

_TINY = 1e-20  # prevents a division by zero for a row whose scores are all zero


class ScoreFunction(enum.Enum):
    """The function from logits to scores."""

    SIGMOID = 0
    SOFTMAX = 1
    SQRTSOFTPLUS = 2


class RoutingMapFormat(enum.Enum):
    """Storage format for the choice: a bool or a bit per expert."""

    BYTEMAP = 0
    BITMAP_U8 = 1


def fused_topk_with_score_function(
    logits: Array,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int = -1,
    group_topk: int = -1,
    scaling_factor: float = 1.0,
    score_function: str | ScoreFunction = "softmax",
    expert_bias: Array | None = None,
    compute_aux_scores: bool = False,
    routing_map_format: str | int | RoutingMapFormat = "bytemap",
) -> tuple[Array, Array]:
    """Choose the top-k experts of each token (arXiv:2408.15664, arXiv:2412.19437).

    Args:
        logits: Scores [T, E].
        topk: Experts per token.
        use_pre_softmax: Take the weights from a softmax over all experts instead of the chosen ones.
        num_groups: Number of expert groups; -1 for none.
        group_topk: Best groups that experts are chosen from; -1 for all.
        scaling_factor: Factor of the weights.
        score_function: "softmax"; or "sigmoid" or "sqrtsoftplus", sqrt(log(1 + exp(logit))), whose weights are divided
            by their sum if topk > 1.
        expert_bias: Bias [E] with "sigmoid" or "sqrtsoftplus", which only decides the choice.
        compute_aux_scores: Return normalized scores for all experts and the plain choice, for the loss.
        routing_map_format: "bytemap" or "bitmap_u8", whose bit e % 8 in byte e // 8 is expert e.

    Returns:
        Weights [T, E] in the dtype of the logits, and the choice, bool [T, E] or uint8 [T, ceil(E / 8)].
    """
    function = _member(ScoreFunction, "score_function", score_function)
    form = _member(RoutingMapFormat, "routing_map_format", routing_map_format)
    softmax = function is ScoreFunction.SOFTMAX
    _check(logits, topk, num_groups, group_topk, scaling_factor, softmax, expert_bias)
    switch("use_pre_softmax", use_pre_softmax)
    switch("compute_aux_scores", compute_aux_scores)
    wide = logits.astype(jnp.float32)
    if compute_aux_scores:
        scores = _normalize_logits(wide, function)
        routing_map = _choice_mask(scores, topk)
        return scores.astype(logits.dtype), _store_choice(routing_map, form)
    if softmax:
        scores = jax.nn.softmax(wide) if use_pre_softmax else wide
    else:
        scores = _scores(wide, function)
    judged = scores if expert_bias is None else scores + expert_bias.astype(jnp.float32)
    if group_topk > 0:
        # -inf outside the groups with the largest sums over their topk / group_topk best experts.
        tokens, experts = judged.shape
        grouped = lax.stop_gradient(judged).reshape(tokens, num_groups, experts // num_groups)
        best, _ = lax.top_k(grouped, topk // group_topk)
        selected = jnp.repeat(
            _choice_mask(best.sum(axis=-1), group_topk), experts // num_groups, axis=-1
        )
        judged = jnp.where(selected, judged, -jnp.inf)
    routing_map = _choice_mask(judged, topk)
    if softmax and not use_pre_softmax:
        weights = jax.nn.softmax(jnp.where(routing_map, scores, -jnp.inf))
    else:
        weights = jnp.where(routing_map, scores, 0.0)
    if not softmax and topk > 1:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + _TINY)
    return (weights * scaling_factor).astype(logits.dtype), _store_choice(routing_map, form)


def fused_moe_aux_loss(probs: Array, tokens_per_expert: Array, topk: int, coeff: float) -> Array:
    """Compute E * coeff / (topk * T^2) * sum over e of tokens_per_expert[e] * sum over t of probs[t, e].

    Differentiable in probs only; arXiv:2101.03961, equation 4, for topk choices.

    Args:
        probs: Scores [T, E].
        tokens_per_expert: Tokens per expert [E].
        topk: Experts per token.
        coeff: Factor of the loss.
    """
    check_values("probs", probs)
    check_array("tokens_per_expert", tokens_per_expert)
    whole("topk", topk)
    number("coeff", coeff)
    if probs.ndim == 2 and topk > probs.shape[1]:
        raise ValueError(
            f"topk={topk} of {probs.shape[1]} experts; choose at most {probs.shape[1]}"
        )
    if probs.ndim != 2 or tokens_per_expert.shape != probs.shape[1:]:
        raise ValueError(
            f"probs {probs.shape} and tokens_per_expert {tokens_per_expert.shape}; give [T, E] and [E]"
        )
    if not probs.shape[0]:
        raise ValueError(f"probs has shape {probs.shape}; give at least one token")
    tokens, experts = probs.shape
    share = probs.astype(jnp.float32).sum(axis=0) * tokens_per_expert.astype(jnp.float32)
    return (share.sum() * (experts * coeff / (topk * tokens * tokens))).astype(probs.dtype)


def _store_choice(routing_map: Array, form: RoutingMapFormat) -> Array:
    return (
        jnp.packbits(routing_map, axis=-1, bitorder="little")
        if form is RoutingMapFormat.BITMAP_U8
        else routing_map
    )


def _scores(logits: Array, function: ScoreFunction) -> Array:
    """Compute scores that do not depend on the logits of other experts."""
    if function is ScoreFunction.SIGMOID:
        return jax.nn.sigmoid(logits)
    # softplus(-inf) is 0, where the root has an infinite gradient and the logarithm a zero gradient: their product is
    # NaN.
    positive = jax.nn.softplus(logits)
    usable = positive > 0.0
    return jnp.where(usable, jnp.sqrt(jnp.where(usable, positive, 1.0)), 0.0)


def _normalize_logits(logits: Array, function: ScoreFunction) -> Array:
    if function is ScoreFunction.SOFTMAX:
        return jax.nn.softmax(logits)
    scores = _scores(logits, function)
    return scores / (scores.sum(axis=-1, keepdims=True) + _TINY)


def _choice_mask(scores: Array, topk: int) -> Array:
    """Select the topk largest scores in every row, bool [T, E]; ties go to the lower index."""
    _, places = lax.top_k(lax.stop_gradient(scores), topk)
    return jax.nn.one_hot(places, scores.shape[-1], dtype=jnp.bool_).any(axis=-2)


def _member(kind: type[enum.Enum], name: str, value: Any) -> Any:
    """Get a member by itself, by its name in any case, or by its number."""
    if isinstance(value, kind):
        return value
    for member in kind:
        if isinstance(value, str) and value.upper() == member.name:
            return member
        if isinstance(value, Integral) and not isinstance(value, bool) and value == member.value:
            return member
    choices = ", ".join(repr(member.name.lower()) for member in kind)
    raise ValueError(f"{name}={described(value)}; choose one of {choices}")


def _check(
    logits: Array,
    topk: int,
    num_groups: int,
    group_topk: int,
    scaling_factor: float,
    softmax: bool,
    expert_bias: Array | None,
) -> None:
    """Raise TypeError or ValueError for router arguments that do not fit each other."""
    check_values("logits", logits)
    number("scaling_factor", scaling_factor)
    whole("topk", topk)
    if logits.ndim != 2:
        raise ValueError(f"logits have shape {logits.shape}; give [tokens, experts]")
    experts = logits.shape[1]
    if topk > experts:
        raise ValueError(f"topk={topk} of {experts} experts; choose at most {experts}")
    if expert_bias is not None and softmax:
        raise ValueError(
            "expert_bias with score_function='softmax'; only 'sigmoid' and 'sqrtsoftplus' use it, give None"
        )
    if expert_bias is not None:
        check_shaped("expert_bias", expert_bias, (experts,))
    integer("group_topk", group_topk)
    if group_topk > 0:
        whole("num_groups", num_groups)
        if experts % num_groups or group_topk > num_groups or topk % group_topk:
            raise ValueError(
                f"num_groups={num_groups}, group_topk={group_topk}, topk={topk} of {experts} experts; num_groups "
                "must divide the experts, group_topk be at most num_groups and divide topk"
            )
        if topk // group_topk > experts // num_groups:
            raise ValueError(
                f"topk={topk} in group_topk={group_topk} groups of {experts // num_groups} experts; "
                "choose fewer experts or more groups"
            )
