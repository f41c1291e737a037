"""Attention: y [s, b, h] = proj(core(q, k, v)), what self- and cross-attention share, with Megatron-core's calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ...attention.rope import apply_fused_qkv_rotary_pos_emb
from ...distributed import checkpoint
from .cached_attention import Rows, attend, of_pages, packed_core
from .equivalents import (
    AttnMaskType,
    MegatronModule,
    built,
    process_groups,
    ranks_of,
    rng_tracker,
    setting,
)
from .rotation import rotated, rotated_by_tables
from .submodules import CrossAttentionSubmodules, SelfAttentionSubmodules


class Attention(MegatronModule, ABC):
    """(y [s, b, h], bias) of hidden states [s, b, h]; the caller adds the bias of the output projection.

    layer_number     counted from 1; pp_layer_offset: how many layers earlier pipeline stages have
    attn_mask_type   which keys a query sees where no cache says otherwise
    pg_collection    its tp and cp groups; None: Megatron's, or none
    """

    linear_proj: Any
    core_attention: Any

    def __init__(
        self, config: Any, submodules: SelfAttentionSubmodules | CrossAttentionSubmodules,
        layer_number: int, attn_mask_type: Any, attention_type: str, cp_comm_type: str | None = None,
        pg_collection: Any = None, pp_layer_offset: int | None = None, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        self.config = config
        self.layer_number, self._pp_layer_offset = layer_number, pp_layer_offset
        self.attn_mask_type, self.attention_type = attn_mask_type, attention_type
        self.pg_collection = process_groups(pg_collection)
        self.world_size = ranks_of(self.pg_collection.tp)
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
            # The core attention keeps its output for its own backward; a quantized copy beside it would be one more.
            save_original_input(self.linear_proj)

    def _projection(
        self, spec: Any, name: str | None, part: str, inputs: int, outputs: int, bias: bool | None = None
    ) -> Any:
        """A linear layer of the attention; `part` "proj" is the one behind the core."""
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
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Any, ...]:
        """(q [s, b, heads, size], k, v [s, b, groups, size][, gate]); unsplit: (all of them, sizes of the parts)"""

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, key_value_states: Tensor | None = None,
        inference_context: Any = None, rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        rotary_pos_cos: Tensor | None = None, rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None, attention_bias: Tensor | None = None,
        packed_seq_params: Any = None, sequence_len_offset: Tensor | int | None = None, *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """(y [s, b, h], bias or None)

        attention_mask      True: masked out
        key_value_states    cross-attention: what keys and values are made of
        rotary_pos_emb      angles [s, 1, 1, d], of queries and keys or one for each; with caches those of all positions
        rotary_pos_cos, rotary_pos_sin    [positions, d / 2], under flash_decode
        rotary_pos_cos_sin  [positions, d], for contexts that turn queries and keys by themselves
        packed_seq_params   where packed sequences begin; hidden_states are [t, 1, h] then
        sequence_len_offset int32 [b] tokens in the caches, under flash_decode
        """
        context = inference_context if inference_params is None else inference_params
        config = self.config
        if config.no_rope_freq and config.no_rope_freq[self.layer_number - 1]:
            rotary_pos_emb = None
        if rotary_pos_emb is not None and not isinstance(rotary_pos_emb, tuple):
            rotary_pos_emb = (rotary_pos_emb, rotary_pos_emb)
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        gates = setting(config, "attention_output_gate", False)
        if self._rotates_unsplit(rotary_pos_emb, context, packed):
            assert rotary_pos_emb is not None
            mixed, sizes = self.get_query_key_value_tensors(hidden_states, key_value_states, split_qkv=False)
            query, key, value = apply_fused_qkv_rotary_pos_emb(
                mixed, *rotary_pos_emb, sizes, interleaved=config.rotary_interleaved
            )
            gate, mask_type, table, rotary_pos_emb = None, self.attn_mask_type, None, None
        else:
            query, key, value, *rest = self.get_query_key_value_tensors(
                hidden_states, key_value_states, output_gate=gates
            )
            gate = rest[0] if rest else None
            if context is not None and config.flash_decode and context.is_decode_only():
                tables = rotary_pos_cos, rotary_pos_sin
                return self._decoded(context, query, key, value, tables, sequence_len_offset, gate)
            query, key, value, rotary_pos_emb, mask_type, table = self._adjust_key_value_for_inference(
                context, query, key, value, rotary_pos_emb, rotary_pos_cos, rotary_pos_sin, rotary_pos_cos_sin,
                sequence_len_offset,
            )  # fmt: skip
        if packed:
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        if rotary_pos_emb is not None:
            query, key = self._rotated(
                query, key, rotary_pos_emb, context, packed_seq_params if packed else None
            )
        if context is not None and not context.is_static_batching():
            out = self._attended_in_pages(context, query, key, value, table)
        elif self.checkpoint_core_attention and self.training:
            out = self._checkpointed_attention_forward(
                query, key, value, attention_mask, None, mask_type, attention_bias, packed_seq_params
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

    def _rotates_unsplit(self, rotary_pos_emb: Any, context: Any, packed: bool) -> bool:
        """Are queries and keys turned on their way out of the projection?"""
        if not setting(self.config, "fused_single_qkv_rope", False) or self.attention_type == "cross":
            return False
        if rotary_pos_emb is None or context is not None or packed:
            raise ValueError(
                "fused_single_qkv_rope=True needs rotary_pos_emb, and neither a cache nor packed sequences; turn it off"
            )
        return True

    def _rotated(
        self, query: Tensor, key: Tensor, embeddings: Any, context: Any, packed: Any
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys turned, each by its embedding, where it has one."""
        config, (of_query, of_key) = self.config, embeddings
        if context is not None and not context.is_static_batching():
            cp_group = self.pg_collection.cp
            query = context.apply_rotary_emb_query(query, of_query, config, None, cp_group)
            return query, key  # the cache holds keys that are turned
        size = ranks_of(self.pg_collection.cp)
        cp = (size, 0 if size == 1 else torch.distributed.get_rank(self.pg_collection.cp))
        bounds = (None, None) if packed is None else _bounds(packed)
        if of_query is not None:
            query = rotated(query, of_query, config.rotary_interleaved, cu_seqlens=bounds[0], cp=cp)
        if of_key is not None:
            key = rotated(key, of_key, config.rotary_interleaved, cu_seqlens=bounds[1], cp=cp)
        return query, key

    def _checkpointed_attention_forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, rotary_pos_emb: Any = None,
        attn_mask_type: Any = None, attention_bias: Tensor | None = None, packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        """The core attention, computed again in the backward pass; only its inputs are kept."""
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

    def _allocate_memory(
        self, inference_max_sequence_length: int, batch_size: int, dim: int, dtype: torch.dtype
    ) -> Tensor:
        """A cache [longest, batch, groups of this rank, dim]."""
        device = next(self.linear_proj.parameters()).device
        shape = (inference_max_sequence_length, batch_size, self.num_query_groups_per_partition, dim)
        return torch.empty(shape, dtype=dtype, device=device)

    def _get_pp_layer_offset_for_inference(self) -> int:
        """Layers of earlier pipeline stages, so that a stage's caches begin with its own first layer."""
        if self._pp_layer_offset is not None:
            return self._pp_layer_offset
        pp = getattr(self.pg_collection, "pp", None)
        if ranks_of(pp) == 1:
            return 0
        if self.config.num_layers % ranks_of(pp):
            raise ValueError(
                f"{ranks_of(pp)} stages do not divide num_layers={self.config.num_layers}; give pp_layer_offset"
            )
        return torch.distributed.get_rank(pp) * (self.config.num_layers // ranks_of(pp))

    def _adjust_key_value_for_inference(
        self, inference_context: Any, query: Tensor, key: Tensor, value: Tensor, rotary_pos_emb: Any,
        rotary_pos_cos: Tensor | None = None, rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None, sequence_len_offset: Any = None, *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Any, Any, Tensor | None]:  # fmt: skip
        """(query, key, value, rotary_pos_emb, mask type, page table): keys and values of all tokens so far.

        New ones are written to the context's caches. Of static caches they come back with the embeddings of their
        positions, of pages as the pages themselves and their table.
        """
        context = inference_context if inference_params is None else inference_params
        if context is None:
            return query, key, value, rotary_pos_emb, self.attn_mask_type, None
        if context.is_static_batching():
            return self._in_static_cache(
                context, query, key, value, rotary_pos_emb, (rotary_pos_cos, rotary_pos_sin)
            )
        if context.use_flashinfer_fused_rope and rotary_pos_cos_sin is not None:
            query, key = context.apply_fused_qk_rotary_emb(query, key, rotary_pos_cos_sin, self.config)
            rotary_pos_emb = None
        elif rotary_pos_emb is not None:
            of_query, of_key = rotary_pos_emb
            key = context.apply_rotary_emb_key(key, of_key, self.config, self.pg_collection.cp)
            rotary_pos_emb = (of_query, None)
        layer = self.layer_number - self._get_pp_layer_offset_for_inference()
        context.append_key_value_cache(layer, key, value)
        key, value, table = context.key_value_cache(layer)
        return query, key, value, rotary_pos_emb, AttnMaskType.no_mask, table

    def _in_static_cache(
        self, context: Any, query: Tensor, key: Tensor, value: Tensor, rotary_pos_emb: Any, tables: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any, Any, None]:
        begin, first = context.sequence_len_offset, context.batch_size_offset
        end, last = begin + key.shape[0], first + key.shape[1]
        keys, values = self._static_caches(context, key, value)
        if end > keys.shape[0] or last > keys.shape[1]:
            raise ValueError(
                f"tokens {begin}:{end} of sequences {first}:{last} do not fit caches of {keys.shape[0]} tokens and "
                f"{keys.shape[1]} sequences; make the context larger"
            )
        if self.config.flash_decode and tables[0] is not None:
            cos, sin = (table[begin:end, None, None] for table in tables)
            query, key = (
                rotated_by_tables(x, cos, sin, self.config.rotary_interleaved) for x in (query, key)
            )
        with torch.no_grad():
            keys[begin:end, first:last], values[begin:end, first:last] = key, value
        mask_type = self.attn_mask_type
        if begin and not self.training:
            # One query sees every key; of several each sees those up to its own position.
            mask_type = AttnMaskType.no_mask if query.shape[0] == 1 else AttnMaskType.causal_bottom_right
        if rotary_pos_emb is not None:
            rotary_pos_emb = (rotary_pos_emb[0][begin:end], rotary_pos_emb[1][:end])
        return query, keys[:end, first:last], values[:end, first:last], rotary_pos_emb, mask_type, None

    def _static_caches(self, context: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        memory = context.key_value_memory_dict
        if self.layer_number not in memory:
            longest, batch = context.max_sequence_length, context.max_batch_size
            memory[self.layer_number] = (
                self._allocate_memory(longest, batch, self.key_hidden_size, key.dtype),
                self._allocate_memory(longest, batch, self.val_hidden_size, value.dtype),
            )
        return memory[self.layer_number]

    def _decoded(
        self, context: Any, query: Tensor, key: Tensor, value: Tensor, tables: Any, offset: Any, gate: Any
    ) -> tuple[Tensor, Tensor | None]:
        """A decoding step of static caches: one call that turns, writes and attends."""
        keys, values = self._static_caches(context, key, value)
        if not isinstance(offset, Tensor):
            begin = context.sequence_len_offset if offset is None else offset
            offset = torch.full((query.shape[1],), begin, dtype=torch.int32, device=query.device)
        out = self.flash_decode(
            offset, query, key, value, keys, values, *tables, self.config.rotary_interleaved
        )
        out = out.transpose(0, 1).flatten(-2)
        return self.linear_proj(out if gate is None else _gated(out, gate))

    def flash_decode(
        self, sequence_len_offset: Tensor, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor,
        inference_key_memory: Tensor, inference_value_memory: Tensor, rotary_cos: Tensor | None,
        rotary_sin: Tensor | None, rotary_interleaved: bool = False,
    ) -> Tensor:  # fmt: skip
        """out [b, s, heads, size]: q and k turned by their positions, k and v written behind what is cached, attention.

        sequence_len_offset   int32 [b] tokens in the caches [longest, b, groups, size]; nothing waits for it
        rotary_cos, rotary_sin   [positions, d / 2]
        """
        new, batch = query_layer.shape[:2]
        positions = sequence_len_offset.long() + torch.arange(new, device=query_layer.device)[:, None]
        if rotary_cos is not None and rotary_sin is not None:
            tables = (table[positions][:, :, None] for table in (rotary_cos, rotary_sin))
            cos, sin = tables
            query_layer, key_layer = (
                rotated_by_tables(x, cos, sin, rotary_interleaved) for x in (query_layer, key_layer)
            )
        rows = torch.arange(batch, device=query_layer.device).expand(new, batch)
        with torch.no_grad():
            inference_key_memory[positions, rows] = key_layer.to(inference_key_memory.dtype)
            inference_value_memory[positions, rows] = value_layer.to(inference_value_memory.dtype)
        cu_queries = torch.arange(batch + 1, dtype=torch.int32, device=query_layer.device) * new
        lengths = (sequence_len_offset + new).int()
        out = attend(
            self._packed_core(),
            query_layer.transpose(0, 1).flatten(0, 1),
            inference_key_memory[:, :batch].transpose(0, 1),
            inference_value_memory[:, :batch].transpose(0, 1),
            Rows(cu_queries, new, lengths, inference_key_memory.shape[0]),
        )
        return out.view(batch, new, *out.shape[1:])

    def flash_decode_and_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, seqlens_k: Tensor, block_table: Tensor,
        is_decode_only: bool = False, softmax_offset: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """out [t, 1, heads, size] of queries [t, 1, heads, size] over keys in pages, prompts and single tokens mixed.

        k, v            [pages, page_size, groups, size]; block_table int32 [requests, pages of a request]
        seqlens_k       int32 [requests] keys of each; softmax_offset   [heads], a logit of the denominator alone
        """
        if self.training:
            raise RuntimeError("caches in pages serve inference; call eval() on the layer first")
        keys, values = of_pages(k, block_table), of_pages(v, block_table)
        rows = Rows(cu_seqlens_q.int(), max_seqlen_q, seqlens_k.int(), keys.shape[1])
        core = self._packed_core()
        if softmax_offset is not None and core.softmax_offset is not None:
            core.softmax_offset.data = softmax_offset.detach().float().reshape(core.softmax_offset.shape)
        return attend(core, q.squeeze(1), keys, values, rows).unsqueeze(1)

    def _attended_in_pages(
        self, context: Any, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None
    ) -> Tensor:
        assert table is not None
        cu_queries, longest_query = context.cu_query_lengths()
        cu_keys, lengths, longest_key = context.cu_kv_lengths()
        out = self.flash_decode_and_prefill(
            query, key, value, longest_query, longest_key, cu_queries, cu_keys, lengths, table,
            context.is_decode_only(), self._softmax_offset(),
        ).flatten(-2)  # fmt: skip
        if self.config.fp8 or setting(self.config, "fp4"):
            out[context.padding_slice] = 0.0  # what lies there must not enter a maximum
        return out

    def _softmax_offset(self) -> Tensor | None:
        return getattr(self.core_attention, "softmax_offset", None)

    def _packed_core(self) -> Any:
        """The attention over caches; it has no parameters, and is no child: checkpoints do not know it."""
        core = self.__dict__.get("_core_of_caches")
        if core is None:
            core = packed_core(
                self.config,
                self.num_attention_heads_per_partition,
                self.num_query_groups_per_partition,
                self._window(),
                self.config.softmax_scale,
            ).to(next(self.linear_proj.parameters()).device)
            self.__dict__["_core_of_caches"] = core
        return core

    def _window(self) -> tuple[int, int] | None:
        """This layer's sliding window: every so many layers see everything."""
        window = self.config.window_size
        skip = setting(self.config, "window_attn_skip_freq")
        if window is None or skip is None:
            return window
        if isinstance(skip, int):
            return None if self.layer_number % skip == 0 else window
        return window if skip[self.layer_number - 1] else None

    def set_for_recompute_input_layernorm(self) -> None:
        """Keep the norm's input for a norm that is computed again, instead of quantized codes."""
        raise NotImplementedError(f"{type(self).__name__} has no norm of its input; use SelfAttention")

    def clip_qk(self) -> None:
        """Scale the projections of queries and keys so that logits stay below qk_clip_threshold."""
        raise NotImplementedError(f"{type(self).__name__} does not clip; use SelfAttention")


def save_original_input(linear: Any) -> None:
    """Have a linear layer keep its input as it came; ValueError for one that cannot."""
    if not hasattr(linear, "save_original_input"):
        raise ValueError(f"{type(linear).__name__} has no save_original_input; use this package's Linear")
    linear.save_original_input = True


def _gated(out: Tensor, gate: Tensor) -> Tensor:
    """out * sigmoid(gate), the sigmoid in float32."""
    return (out * torch.sigmoid(gate.reshape(out.shape).float())).to(out.dtype)


def _bounds(packed: Any) -> tuple[Tensor, Tensor]:
    """Where packed queries and keys begin, the padding between sequences included."""
    queries, keys = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
    return (
        packed.cu_seqlens_q if queries is None else queries,
        packed.cu_seqlens_kv if keys is None else keys,
    )
