"""Expert choice for tokens, and expert computation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ..activation import activation
from ..permutation import aligned
from ..quantize.grouped import group_of_rows
from ..quantize.quantizers import QuantizerSet
from ..router import fused_moe_aux_loss, fused_topk_with_score_function
from .grouped_dense import RowsSpec, checked_kernel, plus_bias, product

# The row count of an expert is a multiple, which all formats' blocks and kernels' tiles divide.
ALIGN_SIZE = 128


@dataclass(frozen=True)
class Routing:
    """Expert choice; see `fused_topk_with_score_function`."""

    num_experts: int
    topk: int
    use_pre_softmax: bool
    num_groups: int
    group_topk: int
    scaling_factor: float
    score_function: Any
    aux_loss_coeff: float

    def __call__(self, logits: Array, expert_bias: Array | None) -> tuple[Array, Array]:
        return fused_topk_with_score_function(
            logits,
            self.topk,
            self.use_pre_softmax,
            self.num_groups,
            self.group_topk,
            self.scaling_factor,
            self.score_function,
            expert_bias,
        )

    def aux_loss(self, logits: Array, chosen: Array, axes: tuple[str, ...]) -> Array | None:
        """Compute the loss over all tokens, including those on other devices along `axes`."""
        if self.aux_loss_coeff == 0.0:
            return None
        scores, _ = fused_topk_with_score_function(
            logits, self.topk, score_function=self.score_function, compute_aux_scores=True
        )
        if axes:
            chosen = lax.all_gather(chosen, axes, axis=0, tiled=True)
            scores = lax.all_gather(scores, axes, axis=0, tiled=True)
        return fused_moe_aux_loss(scores, chosen.sum(axis=0), self.topk, self.aux_loss_coeff)


@dataclass(frozen=True)
class Experts:
    """Expert computation.

    Attributes:
        activation_type: Activation for the first half of the hidden features, which multiplies the second half.
        weights_early: Multiply the hidden features by the weights of a token, not the output.
        quantizer_sets: Quantizers for wi and wo, or for wi_0, wi_1 and wo.
        over: Axes whose devices hold other rows for the same experts.
    """

    activation_type: str
    weights_early: bool
    quantizer_sets: tuple[QuantizerSet, ...] = field(hash=False, compare=False)
    over: tuple[str, ...] = ()

    def __call__(self, params: Any, rows: Array, weights: Array, counts: Array) -> Array:
        """Compute rows [rows, h] -> [rows, h]; with `weights_early`, weights multiply the hidden values.

        Args:
            params: Kernels and biases for wi [E, h, 2 f] or both halves wi_0 and wi_1 [E, h, f], and for wo.
            rows: Expert rows.
            weights: Weight per row.
            counts: Tokens per expert, whose rows begin at multiples of ALIGN_SIZE, expert 0 first. The rows
                between them stay zero up to the last product, because otherwise their biases would count in maxima.
        """
        sizes = aligned(counts, ALIGN_SIZE)
        experts = _expert_of_rows(sizes, counts, rows.shape[0])

        def linear(rows: Array, name: str, quantizers: QuantizerSet) -> Array:
            kernel = checked_kernel(rows, params[name], sizes)
            y = product(rows, kernel, sizes, quantizers, RowsSpec(self.over, aligned=True))
            bias = params[f"{name}_bias"]
            return y if bias is None else plus_bias(y, bias, experts)

        *sets, last = self.quantizer_sets
        if len(sets) == 1:
            halves = linear(rows, "wi", sets[0])
            halves = halves.reshape(halves.shape[0], 2, halves.shape[1] // 2)
        else:
            both = (
                linear(rows, name, one) for name, one in zip(("wi_0", "wi_1"), sets, strict=True)
            )
            halves = jnp.stack(tuple(both), axis=-2)
        hidden = activation(halves, (self.activation_type, "linear"))
        if self.weights_early:
            hidden = hidden * weights[:, None].astype(hidden.dtype)
        return linear(hidden, "wo", last)


def _expert_of_rows(sizes: Array, counts: Array, rows: int) -> Array:
    """Expert of each row's token, int32 [rows]; the number of experts for a row without a token.

    Args:
        sizes: Rows per expert.
        counts: Tokens per expert, which are its first rows.
        rows: Number of rows.
    """
    expert = group_of_rows(sizes, rows)
    ends = jnp.append(jnp.cumsum(sizes) - sizes + counts, 0)
    return jnp.where(jnp.arange(rows) < ends[expert], expert, sizes.shape[0])
