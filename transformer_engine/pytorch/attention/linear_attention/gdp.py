"""GatedDeltaProductAttention: linear attention with several Householder updates per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.checks import check_option, suggests_keywords
from ...compat.argument_orders import declare_call
from ...primitives.linear_attention.request import DeltaInputs, Option, Rule
from ...runtime import checks
from .base import DeltaRule, LinearAttentionBase, flags, householders, missing_gates
from .gdn2 import check_negative_eigenvalues
from .inputs import PARAMETER_DTYPES, CallLayout, check_dtype

GATE_DOMAINS = ("log", "linear")


class GatedDeltaProductAttention(LinearAttentionBase):
    """Gated DeltaProduct: per head, with the state S [dk, dv] in float32 and n = num_householder,

    S <- alpha_t S; for j = 0 .. n - 1: S <- S + beta_tj k_tj (v_tj - S^T k_tj)^T; o_t = scale * S^T q_t.

    Args:
        num_attention_heads: Heads on all ranks of `tp_group`.
        kv_channels: Head size, or a pair (query and key size, value size); each 64 or 128.
        num_householder: Updates per token.

    The other arguments are as in `GatedDeltaNetAttention`.

    Raises:
        TypeError: `num_householder` is not a whole number.
        ValueError: `tp_size` does not divide the heads, a head size is neither 64 nor 128, or another setting is
            outside its limits.
    """

    rule = Rule.GDP
    adapter = "gdp_attention"
    gdp_attention: DeltaRule
    sizes = (64, 128)

    @suggests_keywords
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_householder: int = 1,
        qkv_format: str = "sbhd",
        tp_size: int = 1,
        tp_group: Any = None,
        layer_number: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(
            num_attention_heads, kv_channels, qkv_format, tp_size, tp_group, layer_number, scale
        )
        self.num_householder = householders(num_householder)

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
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "log",
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the output [.., h * dv], or (output, final state) with `output_final_state`.

        Args:
            query_layer: Queries [.., h, dk], bfloat16 or float16; float32 and float64 run in torch operations.
            key_layer: Keys [.., n, h, dk].
            value_layer: Values [.., n, h, dv].
            g: Decay gates [.., h], float32 or the queries' dtype: log decays log(alpha), the decays
                alpha themselves with gate_domain="linear", or logits with `safe_gate`.
            beta: Update strengths [.., n, h], float32 or the queries' dtype, or their logits.
            use_beta_sigmoid_in_kernel: `beta` contains logits; the strengths are their sigmoid.
            allow_neg_eigval: Strengths are 2 * sigmoid(beta).
            safe_gate: alpha = exp(-exp(a_log) * softplus(g + dt_bias)).
            gate_domain: "log", or "linear": alpha = max(g, 0) + 1e-10.
            a_log: Log amplitude of a safe gate [h], zeros by default.
            dt_bias: Safe gate bias [h], zeros by default.

        The other arguments are as in `GatedDeltaNetAttention.forward`.

        Raises:
            TypeError: A tensor has an unsupported dtype.
            ValueError: A gate is missing, keys or values have another dtype than the queries, a tensor has another
                shape or device than they require, `allow_neg_eigval` without `use_beta_sigmoid_in_kernel`, another
                `gate_domain`, `safe_gate` with "linear", or `a_log` or `dt_bias` without `safe_gate`.
            RuntimeError: `tp_size` > 1, and no tensor-parallel group was set.
        """
        self.prepare_forward(query_layer, allow_non_contiguous=True)
        try:
            updates = (self.num_householder,)
            layout = self._call_layout(query_layer, key_layer, value_layer, qkv_format, updates)
            missing_gates(g=g, beta=beta)
            assert g is not None and beta is not None
            layout.check("g", g, layout.heads)
            layout.check("beta", beta, *updates, layout.heads)
            for name, gate in (("g", g), ("beta", beta)):
                check_dtype(name, gate, query_layer, (torch.float32, query_layer.dtype))
            active = flags(
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
                allow_neg_eigval=allow_neg_eigval,
                safe_gate=safe_gate,
            )
            check_negative_eigenvalues(active)
            _check_decay(layout, query_layer, active["safe_gate"], gate_domain, a_log, dt_bias)
            inputs = DeltaInputs(
                query_layer,
                key_layer,
                value_layer,
                g,
                beta,
                None,
                a_log,
                dt_bias,
                initial_state,
                cu_seqlens,
            )
            options = {
                Option.FINAL_STATE: active["output_final_state"],
                Option.L2_NORM: active["use_qk_l2norm_in_kernel"],
                Option.SIGMOID: active["use_beta_sigmoid_in_kernel"],
                Option.NEGATIVE: active["allow_neg_eigval"],
                Option.SAFE_GATE: active["safe_gate"],
                Option.LINEAR_GATE: gate_domain == "linear",
            }
            return self._attend(layout, inputs, checkpoint_core_attention, options)
        finally:
            self.end_forward()

    if TYPE_CHECKING:

        @declare_call(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def _check_decay(
    layout: CallLayout,
    query: Tensor,
    safe_gate: bool,
    gate_domain: str,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    """Raise an error unless the decay gate options fit together."""
    check_option("gate_domain", gate_domain, GATE_DOMAINS)
    if safe_gate and gate_domain == "linear":
        raise ValueError(
            "safe_gate=True computes the logarithm of the decay; leave gate_domain='log'"
        )
    for name, x in (("a_log", a_log), ("dt_bias", dt_bias)):
        if x is None:
            continue
        checks.tensor(name, x)
        if not safe_gate:
            raise ValueError(
                f"{name} is a parameter of the safe gate; set safe_gate=True, or leave it None"
            )
        if tuple(x.shape) != (layout.heads,):
            raise ValueError(
                f"{name} is {list(x.shape)}; give one value per head of this rank, [{layout.heads}]"
            )
        check_dtype(name, x, query, PARAMETER_DTYPES)
