"""SelfAttention: queries, keys and values from one projection, whose rows are ordered group by group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...functions.split_heads import SplitAlongDim
from ...tensor import QuantizedTensor
from .attention import Attention, save_original_input
from .equivalents import AttnMaskType, SelfAttentionSubmodules, built, count_ranks, setting
from .layers import HeadL2Norm, ProjectionHeads, clip_rows, head_norm


class SelfAttention(Attention):
    """(y [s, b, h], bias) from x [s, b, h].

    The projection's rows are, for each group: its queries (then their gate, if any), its key, its value.
    """

    linear_qkv: Any
    q_layernorm: Any
    k_layernorm: Any

    def __init__(
        self,
        config: Any,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            config,
            submodules,
            layer_number,
            attn_mask_type,
            "self",
            cp_comm_type,
            pg_collection,
            pp_layer_offset,
            name,
        )
        self._gates = bool(setting(config, "attention_output_gate", False))
        rows = self.query_projection_size * (1 + self._gates) + 2 * self.kv_projection_size
        self.linear_qkv_out_dim = rows
        bias = config.add_bias_linear or config.add_qkv_bias
        self.linear_qkv = self._projection(
            submodules.linear_qkv, name, "qkv", config.hidden_size, rows, bias
        )
        self.q_layernorm = self._head_norm("q_layernorm", submodules.q_layernorm)
        self.k_layernorm = self._head_norm("k_layernorm", submodules.k_layernorm)

    def _head_norm(self, name: str, spec: Any) -> Any:
        """Return the norm for each query or key; None if the config has none."""
        config = self.config
        if not (config.qk_layernorm or setting(config, "qk_l2_norm", False)):
            if spec is not None and getattr(spec, "__name__", "") != "IdentityOp":
                raise ValueError(
                    f"{name} is given, qk_layernorm and qk_l2_norm are False; set one, or give no {name}"
                )
            return None
        if spec is None:
            spec = HeadL2Norm if setting(config, "qk_l2_norm", False) else head_norm
        return built(
            spec,
            hidden_size=self.hidden_size_per_attention_head,
            config=config,
            eps=config.layernorm_epsilon,
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        split_qkv: bool = True,
        output_gate: bool = False,
    ) -> tuple[Any, ...]:
        mixed, _ = self.linear_qkv(hidden_states)
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        queries_per_group = self.num_attention_heads_per_partition // groups
        sizes = [
            queries_per_group * size,
            *([queries_per_group * size] if self._gates else ()),
            size,
            size,
        ]
        mixed = mixed.view(*mixed.shape[:-1], groups, sum(sizes))
        if not split_qkv:
            if self._gates:
                raise ValueError(
                    "split_qkv=False with an output gate: the gate is not a query; leave it True"
                )
            return mixed, sizes
        query, *gate, key, value = SplitAlongDim.apply(mixed, 3, sizes)
        query = query.reshape(*query.shape[:2], -1, size)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        if self.config.test_mode:
            self.run_realtime_tests()
        if not output_gate:
            return query, key, value
        return query, key, value, gate[0].reshape(query.shape)

    def run_realtime_tests(self) -> None:
        """Raise RuntimeError if query and key norms differ between ranks that must have the same."""
        if not self.config.qk_layernorm or not torch.distributed.is_initialized():
            return
        parameters = {
            f"{side}_layernorm.{name}": parameter.detach()
            for side, norm in (("q", self.q_layernorm), ("k", self.k_layernorm))
            for name in ("weight", "bias")
            if (parameter := getattr(norm, name, None)) is not None
        }
        local = torch.stack(list(parameters.values()))
        groups = {"tensor": self.pg_collection.tp, "data": getattr(self.pg_collection, "dp", None)}
        for kind, group in groups.items():
            if count_ranks(group) == 1:
                continue
            gathered = [torch.empty_like(local) for _ in range(count_ranks(group))]
            torch.distributed.all_gather(gathered, local, group=group)
            for rank, other in enumerate(gathered):
                wrong = [
                    name
                    for name, a, b in zip(parameters, local, other, strict=True)
                    if not torch.equal(a, b)
                ]
                if wrong:
                    raise RuntimeError(
                        f"{', '.join(wrong)} of {kind}-parallel rank {rank} differ from this rank's; "
                        "load the checkpoint again, and check that rank's hardware"
                    )

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward pass has delayed."""
        self._backward_qkv_proj()
        self._backward_output_proj()

    def _backward_qkv_proj(self) -> None:
        self.linear_qkv.backward_dw()

    def _backward_output_proj(self) -> None:
        self.linear_proj.backward_dw()

    def set_for_recompute_input_layernorm(self) -> None:
        save_original_input(self.linear_qkv)

    def clip_qk(self) -> None:
        """Scale a group's queries and key down if a head's logits exceeded qk_clip_threshold, then reset the logits.

        With factor = threshold / logit, queries are scaled by factor^qk_clip_alpha and keys by
        factor^(1 - qk_clip_alpha), in the weight and in the optimizer's copy (weight.main_param). A quantized weight is
        dequantized, scaled and quantized again. Biases are not scaled, as in Megatron-core.
        """
        config = self.config
        if not config.qk_clip:
            raise ValueError(
                "qk_clip=False in the config; set it, so that the core attention records logits"
            )
        max_logits = self.core_attention.current_max_attn_logits
        if max_logits is None:
            raise ValueError("no logits are recorded; run a forward pass before clip_qk()")
        if max_logits.shape != (self.num_attention_heads_per_partition,):
            raise ValueError(
                f"logits are {list(max_logits.shape)}, one per head would be "
                f"[{self.num_attention_heads_per_partition}]; record return_max_logit of this layer"
            )
        groups = self.num_query_groups_per_partition
        factor = config.qk_clip_threshold / max_logits.view(groups, -1).amax(dim=1).clamp(
            min=config.qk_clip_threshold
        )
        if bool((factor < 1).any()):
            weight = self.linear_qkv.weight
            if hasattr(weight, "main_param"):
                self._clip_linear_qkv(weight.main_param.data, factor)
            self._clip_linear_qkv(weight.data, factor)
        self.core_attention.current_max_attn_logits = None

    def _clip_linear_qkv(self, weight: Tensor, factor: Tensor) -> None:
        groups = self.num_query_groups_per_partition
        queries_per_group = self.num_attention_heads_per_partition // groups
        heads = ProjectionHeads(
            groups,
            queries_per_group,
            queries_per_group * self._gates,
            self.hidden_size_per_attention_head,
        )
        if not isinstance(weight, QuantizedTensor):
            clip_rows(weight, factor, self.config.qk_clip_alpha, heads)
            return
        values = weight.dequantize()
        clip_rows(values, factor, self.config.qk_clip_alpha, heads)
        weight.copy_(values)
