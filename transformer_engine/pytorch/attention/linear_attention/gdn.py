"""GatedDeltaNetAttention: linear attention whose state decays and is corrected towards each value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...compat.argument_orders import declare_call
from ...primitives.linear_attention.request import DeltaInputs, Option, Rule
from .base import DeltaRule, LinearAttentionBase, flags, missing_gates
from .inputs import check_dtype


class GatedDeltaNetAttention(LinearAttentionBase):
    """Gated DeltaNet: per head, with the state S [dk, dv] in float32,

    S <- exp(g_t) S; S <- S + beta_t k_t (v_t - S^T k_t)^T; o_t = scale * S^T q_t.

    Args:
        num_attention_heads: Heads on all ranks of `tp_group`.
        kv_channels: Head size, or a pair (query and key size, value size).
        qkv_format: "sbhd" [s, b, h, d], "bshd" [b, s, h, d] or "thd" [t, h, d] (packed sequences).
        tp_size: Tensor-parallel rank count; the ranks share the heads.
        tp_group: Tensor-parallel process group; sets `tp_size`.
        layer_number: Layer number, by default 1.
        scale: Query factor, by default 1 / sqrt(query head size).

    Raises:
        ValueError: `tp_size` does not divide the heads, or a setting is outside its limits.
    """

    rule = Rule.GDN
    adapter = "gdn_attention"
    gdn_attention: DeltaRule

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens: Tensor | None = None,
        checkpoint_core_attention: bool = False,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the output [.., h * dv], or (output, final state) with `output_final_state`.

        Args:
            query_layer: Queries [.., h, dk], bfloat16 or float16; float32 and float64 run in torch operations.
            key_layer: Keys [.., h, dk].
            value_layer: Values [.., h, dv].
            g: Log decays [.., h], float32.
            beta: Update strengths [.., h], float32.
            qkv_format: Layout of this call, by default the module's.
            cu_seqlens: Packed sequence bounds, int32 [b + 1], for "thd" only; sequences may be empty.
            checkpoint_core_attention: Save only the inputs, and compute the attention again in the backward pass.
            initial_state: State before the first tokens, float32 [b, h, dv, dk], differentiable; zeros by default.
            output_final_state: Return the state after the last tokens too, shaped like `initial_state`.
            use_qk_l2norm_in_kernel: Divide queries and keys by sqrt(sum of squares + 1e-6).

        Raises:
            TypeError: A tensor has an unsupported dtype.
            ValueError: A gate is missing, keys or values have another dtype than the queries, or a tensor has another
                shape or device than they require.
            RuntimeError: `tp_size` > 1, and no tensor-parallel group was set.
        """
        self.prepare_forward(query_layer, allow_non_contiguous=True)
        try:
            layout = self._call_layout(query_layer, key_layer, value_layer, qkv_format)
            missing_gates(g=g, beta=beta)
            assert g is not None and beta is not None
            for name, gate in (("g", g), ("beta", beta)):
                layout.check(name, gate, layout.heads)
                check_dtype(name, gate, query_layer, (torch.float32,))
            active = flags(
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )
            inputs = DeltaInputs(
                query_layer,
                key_layer,
                value_layer,
                g,
                beta,
                w=None,
                a_log=None,
                dt_bias=None,
                initial_state=initial_state,
                cu_seqlens=cu_seqlens,
            )
            options = {
                Option.FINAL_STATE: active["output_final_state"],
                Option.L2_NORM: active["use_qk_l2norm_in_kernel"],
            }
            return self._attend(layout, inputs, checkpoint_core_attention, options)
        finally:
            self.end_forward()

    if TYPE_CHECKING:

        @declare_call(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
