"""_MoEBlock: a router and its experts, as the MLP of a Transformer layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from ...common.checks import suggests_keywords, whole
from ...common.recipe import Recipe
from ..moe import moe
from .base import (
    Axes,
    Initializer,
    TransformerEngineBase,
    check_call,
    kernel_initializer,
    parameter,
)


@suggests_keywords
class _MoEBlock(TransformerEngineBase):
    """Mixture of experts: (y [b, s, h], the balancing loss or None, received rows), in x's dtype.

    The variables are gate_kernel [h, E], wi [E, h, 2 f] and wo [E, f, h]; with use_ffn_bias also wi_bias and wo_bias;
    with use_expert_routing_bias also expert_bias [E] in float32. The former variables wi_0 and wi_1 [E, h, f], the two
    halves of wi, are read if present.

    Args:
        num_experts: Number E of experts.
        num_experts_per_tok: Experts per token.
        intermediate_size: Number f of hidden features.
        activation_type: Activation for the first f hidden features, which multiplies the other f.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        use_pre_softmax: Take the weights from a softmax over all experts.
        num_groups: Expert groups; None or a number below 1 disables the limit.
        group_topk: Groups that the experts of a token come from.
        scaling_factor: Factor of the weights.
        use_expert_routing_bias: Learn a bias for the scores that are compared.
        aux_loss_coeff: Factor for the balancing loss; 0 returns None.
        use_ffn_bias: Add biases.
        apply_topk_weights_early: Multiply the hidden features by the weights of a token, not the output.
        kernel_init: Kernel initializer.
        bias_init: Bias initializer.
        input_axes: Logical axis names of x.
        gate_kernel_axes: Logical axis names of gate_kernel.
        wi_kernel_axes: Logical axis names of wi.
        wo_kernel_axes: Logical axis names of wo.
        ep_axis: Mesh axis over which experts are sharded.
        data_parallelism_axes: Further mesh axes over which tokens are sharded.
        dtype: Parameter dtype.
        quantization_checkpoint_name: Quantized-tensor name for recomputation policies.
        recv_capacity_per_rank: Rows in a device's receive buffer; see `moe`.
        quantization_recipe: Recipe for the products instead of autocast's.
    """

    num_experts: int = 8
    num_experts_per_tok: int = 2
    intermediate_size: int = 2048
    activation_type: str = "silu"
    score_function: str = "softmax"
    use_pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float = 1.0
    use_expert_routing_bias: bool = False
    aux_loss_coeff: float = 0.0
    use_ffn_bias: bool = False
    apply_topk_weights_early: bool = False
    kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros
    input_axes: Axes = ()
    gate_kernel_axes: Axes = ()
    wi_kernel_axes: Axes = ("exp", "embed", "mlp")
    wo_kernel_axes: Axes = ("exp", "mlp", "embed")
    ep_axis: str | None = None
    data_parallelism_axes: tuple[str, ...] = ()
    dtype: Any = jnp.float32
    quantization_checkpoint_name: str | None = None
    recv_capacity_per_rank: int | None = None
    quantization_recipe: Recipe | None = None

    def __post_init__(self) -> None:
        self.kernel_init = kernel_initializer(self.kernel_init, self.dtype)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array) -> tuple[Array, Array | None, Array]:
        """Compute the output, the balancing loss or None, and the received rows.

        Args:
            inputs: Inputs [b, s, h].
        """
        assert self.kernel_init is not None, "__post_init__ sets it"
        check_call(self, inputs=inputs)
        for name in ("num_experts", "num_experts_per_tok", "intermediate_size"):
            whole(name, getattr(self, name))
        count, width, inner = self.num_experts, inputs.shape[-1], self.intermediate_size
        # Axes [E, in, out]: the fan-in of an expert is the fan-in of its own matrix.
        init: Any = self.kernel_init
        gate = parameter(
            self, "gate_kernel", init, self.gate_kernel_axes, (width, count), self.dtype
        )
        shapes = {"wi": (count, width, 2 * inner), "wo": (count, inner, width)}
        if self.has_variable("params", "wi_0"):
            shapes = {
                "wi_0": (count, width, inner),
                "wi_1": (count, width, inner),
                "wo": shapes["wo"],
            }
        kernels, biases, sets = {}, {}, []
        for index, (name, shape) in enumerate(shapes.items()):
            axes = self.wo_kernel_axes if name == "wo" else self.wi_kernel_axes
            kernels[name] = parameter(self, name, _init_by_expert(init), axes, shape, self.dtype)
            bias = None
            if self.use_ffn_bias:
                bias_axes = (axes[0], axes[-1]) if axes else ()
                bias = parameter(
                    self, f"{name}_bias", self.bias_init, bias_axes, (count, shape[-1]), self.dtype
                )
            biases[f"{name}_bias"] = bias
            sets.append(
                self.generate_quantizer_set(
                    f"_{index}",
                    None,
                    self.quantization_checkpoint_name,
                    self.quantization_recipe,
                    count,
                )
            )
        bias = None
        if self.use_expert_routing_bias:
            bias = parameter(
                self,
                "expert_bias",
                nn.initializers.zeros,
                self.gate_kernel_axes[1:],
                (count,),
                jnp.float32,
            )
        routing = {
            name: getattr(self, name)
            for name in (
                "num_experts_per_tok",
                "activation_type",
                "score_function",
                "use_pre_softmax",
                "num_groups",
                "group_topk",
                "scaling_factor",
                "aux_loss_coeff",
                "apply_topk_weights_early",
            )
        }
        return moe(
            inputs,
            gate,
            **kernels,
            **biases,
            expert_bias=bias,
            num_experts=count,
            ep_axis=self.ep_axis,
            data_parallelism_axes=self.data_parallelism_axes,
            input_axes=self.input_axes,
            gate_kernel_axes=self.gate_kernel_axes,
            wi_kernel_axes=self.wi_kernel_axes,
            wo_kernel_axes=self.wo_kernel_axes,
            quantizer_sets=tuple(sets),
            recv_capacity_per_rank=self.recv_capacity_per_rank,
            **routing,
        )


def _init_by_expert(init: Initializer) -> Initializer:
    """Draw [E, in, out] expert by expert."""

    def draw(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        keys = jax.random.split(key, shape[0])
        return jnp.stack([init(one, shape[1:], dtype) for one in keys])

    return draw
