"""CrossAttention: queries from hidden states, keys and values from another sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...functions.split_heads import SplitAlongDim
from .attention import Attention
from .equivalents import AttnMaskType, CrossAttentionSubmodules


class CrossAttention(Attention):
    """(y [s, b, h], bias) from x [s, b, h] and key_value_states [s_kv, b, h]; key and query head counts are equal."""

    linear_q: Any
    linear_kv: Any

    def __init__(
        self,
        config: Any,
        submodules: CrossAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        name: str | None = None,
        pp_layer_offset: int | None = None,
    ) -> None:
        if config.num_query_groups != config.num_attention_heads:
            raise ValueError(
                f"num_query_groups={config.num_query_groups}, num_attention_heads={config.num_attention_heads}: "
                "cross-attention has no groups; make them equal"
            )
        super().__init__(
            config,
            submodules,
            layer_number,
            attn_mask_type,
            "cross",
            cp_comm_type,
            pg_collection,
            pp_layer_offset,
            name,
        )
        hidden = config.hidden_size
        self.linear_q = self._projection(
            submodules.linear_q, name, "q", hidden, self.query_projection_size
        )
        self.linear_kv = self._projection(
            submodules.linear_kv, name, "kv", hidden, 2 * self.kv_projection_size
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        split_qkv: bool = True,
        output_gate: bool = False,
    ) -> tuple[Any, ...]:
        if key_value_states is None:
            raise ValueError(
                "key_value_states is None; give the sequence that keys and values are made of"
            )
        if output_gate or not split_qkv:
            raise ValueError(
                f"output_gate={output_gate}, split_qkv={split_qkv}: cross-attention has two projections; "
                "leave them False and True"
            )
        size, heads = self.hidden_size_per_attention_head, self.num_attention_heads_per_partition
        mixed, _ = self.linear_kv(key_value_states)
        mixed = mixed.view(*mixed.shape[:-1], heads, 2 * size)
        key, value = SplitAlongDim.apply(mixed, 3, size)
        query, _ = self.linear_q(hidden_states)
        return query.view(*query.shape[:-1], heads, size), key, value
