"""Attention: y [s, b, h] = proj(core(q, k, v)), the base of self- and cross-attention, with Megatron-core's calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ...attention.rope import apply_fused_qkv_rotary_pos_emb
from ...distributed import checkpoint
from .cached import CachedAttention
from .equivalents import (
    CrossAttentionSubmodules,
    SelfAttentionSubmodules,
    built,
    count_ranks,
    process_groups,
    rng_tracker,
    setting,
)
from .rotation import Forms, check_reach, concentration, rotate, unpack_embeddings


class Attention(CachedAttention, ABC):
    """Attention that returns (y [s, b, h], bias); the caller adds the output projection bias.

    Args:
        config: A `TransformerConfig`, or Megatron-core's.
        submodules: How the parts are constructed.
        layer_number: Layer number, from 1.
        attn_mask_type: Keys that a query attends to, unless a cache determines them.
        attention_type: "self" or "cross".
        cp_comm_type: Context parallelism algorithm, such as "p2p".
        pg_collection: Process groups `tp` and `cp`; None is Megatron's, or none.
        pp_layer_offset: Layer count in earlier pipeline stages.
        name: Prefix of the names of the linear layers.
    """

    def __init__(
        self,
        config: Any,
        submodules: SelfAttentionSubmodules | CrossAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        if setting(config, "fine_grained_activation_offloading", False):
            ours = sorted(
                {"qkv_linear", "core_attn", "attn_proj"} & set(config.offload_modules or ())
            )
            if ours:
                raise ValueError(
                    f"offload_modules={ours} under fine_grained_activation_offloading: this layer does not offload "
                    "them; leave them out, or use Megatron-core's SelfAttention"
                )
        self.config = config
        self.layer_number, self._pp_layer_offset = layer_number, pp_layer_offset
        self.attn_mask_type, self.attention_type = attn_mask_type, attention_type
        self.pg_collection = process_groups(pg_collection)
        self.world_size = count_ranks(self.pg_collection.tp)
        heads, groups = config.num_attention_heads, config.num_query_groups
        for label, count in (("num_attention_heads", heads), ("num_query_groups", groups)):
            if count % self.world_size:
                raise ValueError(
                    f"{self.world_size} tensor-parallel ranks do not divide {label}={count}; choose fewer ranks"
                )
        self.hidden_size_per_attention_head = config.kv_channels
        self.query_projection_size = config.kv_channels * heads
        self.kv_projection_size = config.kv_channels * groups
        self.num_attention_heads_per_partition = heads // self.world_size
        self.num_query_groups_per_partition = groups // self.world_size
        self.key_hidden_size = self.val_hidden_size = config.kv_channels
        self.core_attention = built(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            cp_comm_type=cp_comm_type,
            softmax_scale=config.softmax_scale,
            pg_collection=self.pg_collection,
        )
        self.checkpoint_core_attention = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )
        self.linear_proj = self._projection(
            submodules.linear_proj, name, "proj", self.query_projection_size, config.hidden_size
        )
        if (config.fp8 and config.fp8_recipe != "delayed") or setting(config, "fp4"):
            # The core attention keeps its output for its own backward pass; a quantized copy would be an additional
            # tensor.
            save_original_input(self.linear_proj)

    def _projection(
        self,
        spec: Any,
        name: str | None,
        part: str,
        inputs: int,
        outputs: int,
        bias: bool | None = None,
    ) -> Any:
        """Construct a linear layer for the attention; `part` "proj" is the output projection."""
        config, last = self.config, part == "proj"
        kind: dict[str, Any] = {"input_is_parallel": True} if last else {"gather_output": False}
        return built(
            spec,
            inputs,
            outputs,
            config=config,
            init_method=config.output_layer_init_method if last else config.init_method,
            bias=config.add_bias_linear if bias is None else bias,
            skip_bias_add=last,
            is_expert=False,
            tp_comm_buffer_name=part,
            tp_group=self.pg_collection.tp,
            name=None if name is None else f"{name}.linear_{part}",
            **kind,
        )

    @abstractmethod
    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        split_qkv: bool = True,
        output_gate: bool = False,
    ) -> tuple[Any, ...]:
        """Return q [s, b, heads, size], k and v [s, b, groups, size] and a gate; unsplit all and the sizes."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        sequence_len_offset: Tensor | int | None = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (y [s, b, h], bias or None).

        Args:
            attention_mask: True: masked out.
            key_value_states: Cross-attention: input for keys and values.
            rotary_pos_emb: Angles [s, 1 | b, 1, d] for queries and keys, or a pair; with caches, for all positions.
                Context-parallel ranks pass angles for their tokens, or for whole sequences if these are packed.
            rotary_pos_cos: [positions, d / 2], under flash_decode.
            rotary_pos_sin: [positions, d / 2], under flash_decode.
            rotary_pos_cos_sin: [positions, d], for contexts that rotate queries and keys themselves.
            packed_seq_params: Packed sequence starts; hidden_states are [t, 1, h] then.
            sequence_len_offset: int32 [b] tokens in the caches, under flash_decode.
        """
        context = self._find_cache(
            inference_context if inference_params is None else inference_params
        )
        config = self.config
        if config.no_rope_freq and config.no_rope_freq[self.layer_number - 1]:
            rotary_pos_emb = rotary_pos_cos = rotary_pos_sin = rotary_pos_cos_sin = None
        if rotary_pos_emb is not None and not isinstance(rotary_pos_emb, tuple):
            rotary_pos_emb = (rotary_pos_emb, rotary_pos_emb)
        forms = Forms(rotary_pos_emb, (rotary_pos_cos, rotary_pos_sin), rotary_pos_cos_sin)
        rotary_pos_emb = unpack_embeddings(forms, context, config.flash_decode)
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        gates = setting(config, "attention_output_gate", False)
        if self._rotates_unsplit(rotary_pos_emb, context, packed):
            assert rotary_pos_emb is not None
            of_query, of_key = rotary_pos_emb
            mixed, sizes = self.get_query_key_value_tensors(
                hidden_states, key_value_states, split_qkv=False
            )
            query, key, value = apply_fused_qkv_rotary_pos_emb(
                mixed, of_query, of_key, sizes, interleaved=config.rotary_interleaved
            )
            gate, mask_type, table, rotary_pos_emb = None, self.attn_mask_type, None, None
        else:
            query, key, value, *rest = self.get_query_key_value_tensors(
                hidden_states, key_value_states, output_gate=gates
            )
            gate = rest[0] if rest else None
            if context is not None and config.flash_decode and context.is_decode_only():
                tables = rotary_pos_cos, rotary_pos_sin
                return self._decode_step(
                    context, query, key, value, tables, sequence_len_offset, gate
                )
            query, key, value, rotary_pos_emb, mask_type, table = (
                self._adjust_key_value_for_inference(
                    context,
                    query,
                    key,
                    value,
                    rotary_pos_emb,
                    rotary_pos_cos,
                    rotary_pos_sin,
                    rotary_pos_cos_sin,
                    sequence_len_offset,
                )
            )
        if packed:
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        if rotary_pos_emb is not None:
            query, key = self._rotated(
                query, key, rotary_pos_emb, context, packed_seq_params if packed else None
            )
        if context is not None and not context.is_static_batching():
            out = self._attend_in_pages(context, query, key, value, table)
        elif self.checkpoint_core_attention and self.training:
            out = self._checkpointed_attention_forward(
                query,
                key,
                value,
                attention_mask,
                None,
                mask_type,
                attention_bias,
                packed_seq_params,
            )
        else:
            out = self.core_attention(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
            )
        if packed:
            out = out.reshape(out.shape[0], 1, -1)
        return self.linear_proj(out if gate is None else _gated(out, gate))

    def _find_cache(self, context: Any) -> Any:
        """Return the context to which this layer writes its keys; None if its keys are the keys of its call.

        Cross-attention has the same keys in every step, and its entry in a static context belongs to self-attention.
        """
        if context is None or self.attention_type != "cross":
            return context
        if not context.is_static_batching():
            raise ValueError(
                "cross-attention with a paged context: its queries are packed, request by request, but keys and "
                "values are not; give a static context, or none"
            )
        return None

    def _rotates_unsplit(self, rotary_pos_emb: Any, context: Any, packed: bool) -> bool:
        """Return whether queries and keys are rotated before they are split."""
        if (
            not setting(self.config, "fused_single_qkv_rope", False)
            or self.attention_type == "cross"
        ):
            return False
        turns = rotary_pos_emb is not None and all(part is not None for part in rotary_pos_emb)
        norms = (getattr(self, "q_layernorm", None), getattr(self, "k_layernorm", None))
        has_norms = any(norm is not None and type(norm).__name__ != "IdentityOp" for norm in norms)
        plain = not has_norms and concentration(self.config) == 1.0
        if not turns or context is not None or packed or not plain:
            raise ValueError(
                "fused_single_qkv_rope=True needs rotary_pos_emb of queries and of keys, and neither norms of them "
                "(qk_layernorm, qk_l2_norm), YaRN's factor, a cache nor packed sequences; turn it off"
            )
        return True

    def _rotated(
        self, query: Tensor, key: Tensor, embeddings: Any, context: Any, packed: Any
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys, each rotated by its embedding, if it has one."""
        config, (of_query, of_key) = self.config, embeddings
        mscale = concentration(config)
        if context is not None and not context.is_static_batching():
            if of_query is not None:  # the cache contains rotated keys
                group = self.pg_collection.cp
                query = context.apply_rotary_emb_query(
                    query, of_query, config, None, group, mscale=mscale
                )
            return query, key
        # The angles belong to the rank's own tokens; packed sequences have the angles of whole sequences.
        size = 1 if packed is None else count_ranks(self.pg_collection.cp)
        cp = (size, 0 if size == 1 else torch.distributed.get_rank(self.pg_collection.cp))
        bounds = (None, None) if packed is None else _bounds(packed)
        if of_query is not None:
            query = rotate(query, of_query, config.rotary_interleaved, mscale, bounds[0], cp)
        if of_key is not None:
            key = rotate(key, of_key, config.rotary_interleaved, mscale, bounds[1], cp)
        return query, key

    def _checkpointed_attention_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        rotary_pos_emb: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return the core attention, which is recomputed in the backward pass; only its inputs are saved."""
        return checkpoint(
            self.core_attention,
            query,
            key,
            value,
            attention_mask,
            get_rng_state_tracker=rng_tracker(),
            attn_mask_type=self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
        )

    def _decode_step(
        self,
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tables: Any,
        offset: Any,
        gate: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return a decoding step over static caches: one call that rotates, writes and attends."""
        # Offsets in a tensor stay on its device; the context has equal ones.
        begin = offset if isinstance(offset, int) else context.sequence_len_offset
        tokens, rows = self._places(context, key, begin)
        check_reach(tables, tokens.stop)
        keys, values = (cache[:, rows] for cache in self._static_caches(context, key, value))
        if not isinstance(offset, Tensor):
            offset = torch.full((query.shape[1],), begin, dtype=torch.int32, device=query.device)
        out = self.flash_decode(
            offset,
            query,
            key,
            value,
            keys,
            values,
            tables[0],
            tables[1],
            self.config.rotary_interleaved,
        )
        out = out.transpose(0, 1).flatten(-2)
        return self.linear_proj(out if gate is None else _gated(out, gate))

    def _attend_in_pages(
        self, context: Any, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None
    ) -> Tensor:
        assert table is not None
        cu_queries, longest_query = context.cu_query_lengths()
        cu_keys, lengths, longest_key = context.cu_kv_lengths()
        out = self.flash_decode_and_prefill(
            query,
            key,
            value,
            longest_query,
            longest_key,
            cu_queries,
            cu_keys,
            lengths,
            table,
            context.is_decode_only(),
            getattr(self.core_attention, "softmax_offset", None),
        ).flatten(-2)
        if self.config.fp8 or setting(self.config, "fp4"):
            out[context.padding_slice] = 0.0  # these rows must not contribute to a maximum
        return out

    def set_for_recompute_input_layernorm(self) -> None:
        """Save the norm's input instead of quantized codes, for a norm that is recomputed."""
        raise NotImplementedError(
            f"{type(self).__name__} has no norm of its input; use SelfAttention"
        )

    def clip_qk(self) -> None:
        """Scale the query and key projections so that logits stay below qk_clip_threshold."""
        raise NotImplementedError(f"{type(self).__name__} does not clip; use SelfAttention")


def save_original_input(linear: Any) -> None:
    """Make a linear layer save its unquantized input; raise ValueError for a layer that cannot."""
    if not hasattr(linear, "save_original_input"):
        raise ValueError(
            f"{type(linear).__name__} has no save_original_input; use this package's Linear"
        )
    linear.save_original_input = True


def _gated(out: Tensor, gate: Tensor) -> Tensor:
    """Return out * sigmoid(gate), with the sigmoid in float32."""
    return (out * torch.sigmoid(gate.reshape(out.shape).float())).to(out.dtype)


def _bounds(packed: Any) -> tuple[Tensor, Tensor]:
    """Return packed query and key starts, including the padding between sequences."""
    queries, keys = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
    return (
        packed.cu_seqlens_q if queries is None else queries,
        packed.cu_seqlens_kv if keys is None else keys,
    )
