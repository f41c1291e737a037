"""GatedDeltaNet2Attention: linear attention with decay, erase and write gates per channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...compat.argument_orders import declare_call
from ...primitives.linear_attention.request import DeltaInputs, Option, Rule
from .base import DeltaRule, LinearAttentionBase, flags, missing_gates
from .inputs import check_dtype


class GatedDeltaNet2Attention(LinearAttentionBase):
    """Gated DeltaNet 2: per head, with the state S [dk, dv] in float32,

    S <- diag(exp(g_t)) S; S <- S + k_t (w_t * v_t - S^T (beta_t * k_t))^T; o_t = scale * S^T q_t.

    Args:
        num_attention_heads: Heads on all ranks of `tp_group`.
        kv_channels: Head size, or a pair (query and key size, value size); each 64 or 128.

    The other arguments are as in `GatedDeltaNetAttention`.

    Raises:
        ValueError: A head size is neither 64 nor 128, `tp_size` does not divide the heads, or a setting is outside
            its limits.
    """

    rule = Rule.GDN2
    adapter = "gdn2_attention"
    gdn2_attention: DeltaRule
    sizes = (64, 128)

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
            query_layer: Queries [.., h, dk]; the dtypes are as in `GatedDeltaNetAttention`.
            key_layer: Keys [.., h, dk].
            value_layer: Values [.., h, dv].
            g: Log decays [.., h, dk], float32 or the queries' dtype.
            beta: Erase gates [.., h, dk] in the queries' dtype, or their logits.
            w: Write gates [.., h, dv] in the queries' dtype.
            use_beta_sigmoid_in_kernel: `beta` contains logits; the erase gates are their sigmoid.
            allow_neg_eigval: Erase gates are 2 * sigmoid(beta).
            beta_guard: Shrink erase gates with which an update would enlarge the state. The gradient is computed
                as if they were not shrunk.

        The other arguments are as in `GatedDeltaNetAttention.forward`.

        Raises:
            TypeError: A tensor has an unsupported dtype.
            ValueError: A gate is missing; the dtype of the keys or values differs from the queries'; a tensor has the
                wrong shape or device; `allow_neg_eigval` is set without `use_beta_sigmoid_in_kernel`, or `beta_guard`
                without `use_qk_l2norm_in_kernel`.
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
            inputs = DeltaInputs(
                query_layer,
                key_layer,
                value_layer,
                g,
                beta,
                w,
                a_log=None,
                dt_bias=None,
                initial_state=initial_state,
                cu_seqlens=cu_seqlens,
            )
            options = {
                Option.FINAL_STATE: active["output_final_state"],
                Option.L2_NORM: active["use_qk_l2norm_in_kernel"],
                Option.SIGMOID: active["use_beta_sigmoid_in_kernel"],
                Option.NEGATIVE: active["allow_neg_eigval"],
                Option.GUARD: active["beta_guard"],
            }
            return self._attend(layout, inputs, checkpoint_core_attention, options)
        finally:
            self.end_forward()

    if TYPE_CHECKING:

        @declare_call(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def check_negative_eigenvalues(active: dict[str, bool]) -> None:
    """Raise ValueError for `allow_neg_eigval` without `use_beta_sigmoid_in_kernel`."""
    if active["allow_neg_eigval"] and not active["use_beta_sigmoid_in_kernel"]:
        raise ValueError(
            "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True; scale gates that are not logits by 2 yourself"
        )
