"""Mixture of experts: routing of tokens to experts, and the experts' MLP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ..activation import activation
from ..permutation import align_counts
from ..quantize.grouped import group_of_rows
from ..quantize.quantizers import QuantizerSet
from ..router import fused_moe_aux_loss, fused_topk_with_score_function
from .grouped_dense import RowsSpec, add_bias, check_kernel, grouped_matmul

# Each expert's row count is padded to a multiple of this, which every format's block size and every kernel's tile size
# divides.
ALIGN_SIZE = 128


@dataclass(frozen=True)
class Routing:
    """Settings of the router; the fields are the arguments of `fused_topk_with_score_function`.

    Attributes:
        num_experts: Number of experts E.
        topk: Experts per token.
        use_pre_softmax: Whether softmax precedes the choice of the top k.
        num_groups: Number of expert groups, or -1 without groups.
        group_topk: Groups per token, or -1 without groups.
        scaling_factor: Factor of the probabilities.
        score_function: Name or member of `ScoreFunction`.
        aux_loss_coeff: Factor of the auxiliary loss; 0 computes none.
    """

    num_experts: int
    topk: int
    use_pre_softmax: bool
    num_groups: int
    group_topk: int
    scaling_factor: float
    score_function: Any
    aux_loss_coeff: float

    def __call__(self, logits: Array, expert_bias: Array | None) -> tuple[Array, Array]:
        """Choose experts: probabilities [T, E] and a mask [T, E], bool, for logits [T, E]."""
        return fused_topk_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=self.use_pre_softmax,
            num_groups=self.num_groups,
            group_topk=self.group_topk,
            scaling_factor=self.scaling_factor,
            score_function=self.score_function,
            expert_bias=expert_bias,
        )

    def aux_loss(
        self, logits: Array, routing_map: Array, mesh_axes: tuple[str, ...]
    ) -> Array | None:
        """Compute the auxiliary loss over the tokens of all devices along `mesh_axes`, or None without a loss.

        Args:
            logits: Router logits [T, E].
            routing_map: Whether a token is routed to an expert, bool [T, E].
            mesh_axes: Manual mesh axes that shard the tokens.
        """
        if self.aux_loss_coeff == 0.0:
            return None
        scores, _ = fused_topk_with_score_function(
            logits, self.topk, score_function=self.score_function, compute_aux_scores=True
        )
        if mesh_axes:
            routing_map = lax.all_gather(routing_map, mesh_axes, axis=0, tiled=True)
            scores = lax.all_gather(scores, mesh_axes, axis=0, tiled=True)
        return fused_moe_aux_loss(scores, routing_map.sum(axis=0), self.topk, self.aux_loss_coeff)


@dataclass(frozen=True)
class ExpertMlp:
    """Two-layer gated MLP of every expert, on rows that are sorted by expert.

    Attributes:
        activation_type: Activation for the first half of the hidden features, which multiplies the second half.
        weights_early: Whether the routing weights multiply the hidden activations instead of the output.
        quantizer_sets: Quantizers for wi and wo, or for wi_0, wi_1 and wo. They hold arrays, which have no hash.
        mesh_axes: Mesh axes over which an expert's rows are sharded; maxima are reduced over them.
    """

    activation_type: str
    weights_early: bool
    quantizer_sets: tuple[QuantizerSet, ...] = field(hash=False, compare=False)
    mesh_axes: tuple[str, ...] = ()

    def __call__(self, params: Any, x: Array, weights: Array, counts: Array) -> Array:
        """Compute the MLP's output [rows, h].

        Args:
            params: Kernels "wi" [E, h, 2 f], or "wi_0" and "wi_1" [E, h, f], and "wo" [E, f, h]; biases "wi_bias" or
                "wi_0_bias" and "wi_1_bias", and "wo_bias", [E, features] or None.
            x: Tokens sorted by expert, [rows, h].
            weights: Routing weight of each row, [rows].
            counts: Tokens per expert [E]. Each expert's rows start at a multiple of ALIGN_SIZE. Padding rows receive no
                bias: a bias would raise the absolute maximum from which the scale is derived.
        """
        padded_counts = align_counts(counts, ALIGN_SIZE)
        expert_of_row = _expert_of_rows(padded_counts, counts, x.shape[0])

        def linear(inputs: Array, name: str, quantizers: QuantizerSet) -> Array:
            kernel = check_kernel(inputs, params[name], padded_counts)
            spec = RowsSpec(self.mesh_axes, aligned=True)
            y = grouped_matmul(inputs, kernel, padded_counts, quantizers, spec)
            bias = params[f"{name}_bias"]
            return y if bias is None else add_bias(y, bias, expert_of_row)

        *input_sets, output_set = self.quantizer_sets
        if len(input_sets) == 1:
            halves = linear(x, "wi", input_sets[0])
            halves = halves.reshape(halves.shape[0], 2, halves.shape[1] // 2)
        else:
            projections = [
                linear(x, name, quantizers)
                for name, quantizers in zip(("wi_0", "wi_1"), input_sets, strict=True)
            ]
            halves = jnp.stack(projections, axis=-2)
        hidden = activation(halves, (self.activation_type, "linear"))
        if self.weights_early:
            hidden = hidden * weights[:, None].astype(hidden.dtype)
        return linear(hidden, "wo", output_set)


def _expert_of_rows(padded_counts: Array, counts: Array, num_rows: int) -> Array:
    """Expert index of each row, int32 [rows]; E for a padding row.

    Args:
        padded_counts: Rows per expert, including its padding rows.
        counts: Tokens per expert, which are its first rows.
        num_rows: Number of rows.
    """
    expert = group_of_rows(padded_counts, num_rows)
    # Rows after the last expert have the index E, and are padding.
    token_ends = jnp.append(jnp.cumsum(padded_counts) - padded_counts + counts, 0)
    is_token = jnp.arange(num_rows) < token_ends[expert]
    return jnp.where(is_token, expert, padded_counts.shape[0])
