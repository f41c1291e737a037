"""GatedDeltaNet2Attention: linear attention with decay, erase and write gates of every channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...primitives.linear_attention.request import (
    FINAL_STATE,
    GDN2,
    GUARD,
    L2_NORM,
    NEGATIVE,
    SIGMOID,
    LinearAttentionInputs,
)
from .base import DeltaRule, LinearAttentionBase, flags, missing_gates
from .inputs import check_dtype


class GatedDeltaNet2Attention(LinearAttentionBase):
    r"""Gated DeltaNet 2: per head, with the state S [dk, dv] in float32,

    S <- diag(exp(g_t)) S;  S <- S + k_t (w_t * v_t - S^T (beta_t * k_t))^T;  o_t = scale * S^T q_t.

    Args:
        num_attention_heads: Heads of all ranks of `tp_group`.
        kv_channels: Head size, or (of queries and keys, of values); each 64 or 128.
        qkv_format: "sbhd" [s, b, h, d], "bshd" [b, s, h, d] or "thd" [t, h, d] (packed sequences).
        tp_size: Number of tensor-parallel ranks, which share the heads.
        tp_group: Tensor-parallel process group; sets `tp_size`.
        layer_number: Number of the layer, by default 1.
        scale: Factor of the queries, by default 1 / sqrt(head size of queries).

    Raises:
        ValueError: A head size is neither 64 nor 128, `tp_size` does not divide the heads, or a setting is outside
            its limits.
    """

    rule = GDN2
    sizes = (64, 128)

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        qkv_format: str = "sbhd",
        tp_size: int = 1,
        tp_group: Any = None,
        layer_number: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(num_attention_heads, kv_channels, qkv_format, tp_size, tp_group, layer_number, scale)
        self.gdn2_attention = DeltaRule(self.rule, self.scale)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        w: Tensor | None = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens: Tensor | None = None,
        checkpoint_core_attention: bool = False,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        beta_guard: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the output [.., h * dv], or (output, final state) with `output_final_state`.

        Args:
            query_layer: Queries [.., h, dk], bfloat16 or float16; float32 and float64 run in torch operations.
            key_layer: Keys [.., h, dk].
            value_layer: Values [.., h, dv].
            g: Logarithms of the decays [.., h, dk], float32 or the queries' dtype.
            beta: Erase gates [.., h, dk] in the queries' dtype, or their logits.
            w: Write gates [.., h, dv] in the queries' dtype.
            qkv_format: Layout of this call, by default the module's.
            cu_seqlens: Bounds of packed sequences, int32 [b + 1], for "thd" only; sequences may be empty.
            checkpoint_core_attention: Save only the inputs, and compute the attention again in the backward pass.
            initial_state: State before the first tokens, float32 [b, h, dv, dk], differentiable; zeros by default.
            output_final_state: Return the state after the last tokens too, shaped like `initial_state`.
            use_qk_l2norm_in_kernel: Divide queries and keys by sqrt(sum of squares + 1e-6).
            use_beta_sigmoid_in_kernel: `beta` contains logits; the erase gates are their sigmoid.
            allow_neg_eigval: Erase gates are 2 * sigmoid(beta).
            beta_guard: Shrink erase gates whose contrast would enlarge the state; the gradient ignores this.

        Raises:
            TypeError: A tensor has an unsupported dtype.
            ValueError: A gate is missing, a tensor has another shape or device than the queries require,
                `allow_neg_eigval` without `use_beta_sigmoid_in_kernel`, or `beta_guard` without
                `use_qk_l2norm_in_kernel`.
            RuntimeError: `tp_size` > 1, and no tensor-parallel group was set.
        """
        self.prepare_forward(query_layer, allow_non_contiguous=True)
        try:
            layout = self._call_layout(query_layer, key_layer, value_layer, qkv_format)
            missing_gates(g=g, beta=beta, w=w)
            assert g is not None and beta is not None and w is not None
            dtype = query_layer.dtype
            for name, gate, width, dtypes in (
                ("g", g, layout.size_qk, (torch.float32, dtype)),
                ("beta", beta, layout.size_qk, (dtype,)),
                ("w", w, layout.size_v, (dtype,)),
            ):
                layout.check(name, gate, layout.heads, width)
                check_dtype(name, gate, query_layer, dtypes)
            active = flags(
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
                allow_neg_eigval=allow_neg_eigval,
                beta_guard=beta_guard,
            )
            check_negative_eigenvalues(active)
            if active["beta_guard"] and not active["use_qk_l2norm_in_kernel"]:
                raise ValueError(
                    "beta_guard=True needs use_qk_l2norm_in_kernel=True: its limit is that of normalized keys"
                )
            inputs = LinearAttentionInputs(
                query_layer,
                key_layer,
                value_layer,
                g,
                beta,
                w,
                initial_state=initial_state,
                cu_seqlens=cu_seqlens,
            )
            options = {
                FINAL_STATE: active["output_final_state"],
                L2_NORM: active["use_qk_l2norm_in_kernel"],
                SIGMOID: active["use_beta_sigmoid_in_kernel"],
                NEGATIVE: active["allow_neg_eigval"],
                GUARD: active["beta_guard"],
            }
            return self._attend(self.gdn2_attention, layout, inputs, checkpoint_core_attention, options)
        finally:
            self.end_forward()


def check_negative_eigenvalues(active: dict[str, bool]) -> None:
    """Raise ValueError for `allow_neg_eigval` without `use_beta_sigmoid_in_kernel`."""
    if active["allow_neg_eigval"] and not active["use_beta_sigmoid_in_kernel"]:
        raise ValueError(
            "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True; scale gates that are not logits by 2 yourself"
        )
