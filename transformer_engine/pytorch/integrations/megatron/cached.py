"""CachedAttention: keys and values of earlier tokens, in static caches or in pages, under Megatron's method names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .equivalents import AttnMaskType, MegatronModule, count_ranks, setting
from .packed_core import PackedRows, attend, packed_core
from .rotation import check_reach, concentration, rotate_by_tables


class CachedAttention(MegatronModule):
    """Attention layer methods that use an inference context."""

    config: Any
    layer_number: int
    attn_mask_type: Any
    pg_collection: Any
    core_attention: Any
    linear_proj: Any
    key_hidden_size: int
    val_hidden_size: int
    num_attention_heads_per_partition: int
    num_query_groups_per_partition: int
    _pp_layer_offset: int | None

    def _allocate_memory(
        self, inference_max_sequence_length: int, batch_size: int, dim: int, dtype: torch.dtype
    ) -> Tensor:
        """Return a new cache [longest, batch, groups on this rank, dim]."""
        device = next(self.linear_proj.parameters()).device
        shape = (
            inference_max_sequence_length,
            batch_size,
            self.num_query_groups_per_partition,
            dim,
        )
        return torch.empty(shape, dtype=dtype, device=device)

    def _get_pp_layer_offset_for_inference(self) -> int:
        """Return the layer count in earlier pipeline stages; a stage's caches begin with its own first layer."""
        if self._pp_layer_offset is not None:
            return self._pp_layer_offset
        pp = getattr(self.pg_collection, "pp", None)
        if count_ranks(pp) == 1:
            return 0
        if self.config.num_layers % count_ranks(pp):
            raise ValueError(
                f"{count_ranks(pp)} stages do not divide num_layers={self.config.num_layers}; give pp_layer_offset"
            )
        return torch.distributed.get_rank(pp) * (self.config.num_layers // count_ranks(pp))

    def _adjust_key_value_for_inference(
        self,
        inference_context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary_pos_emb: Any,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        sequence_len_offset: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Any, Any, Tensor | None]:
        """Return (query, key, value, rotary_pos_emb, mask type, page table), with keys and values of all tokens so far.

        New keys and values are written to the context's caches. For static caches, the embeddings
        follow the positions; for pages, keys and values are the pages themselves, with their table.
        """
        context = inference_context if inference_params is None else inference_params
        if context is None:
            return query, key, value, rotary_pos_emb, self.attn_mask_type, None
        if context.is_static_batching():
            return self._attend_in_static_cache(
                context, query, key, value, rotary_pos_emb, (rotary_pos_cos, rotary_pos_sin)
            )
        if context.use_flashinfer_fused_rope and rotary_pos_cos_sin is not None:
            query, key = context.apply_fused_qk_rotary_emb(
                query, key, rotary_pos_cos_sin, self.config
            )
            rotary_pos_emb = None
        elif rotary_pos_emb is not None:
            of_query, of_key = rotary_pos_emb
            if of_key is not None:
                group, mscale = self.pg_collection.cp, concentration(self.config)
                key = context.apply_rotary_emb_key(key, of_key, self.config, group, mscale=mscale)
            rotary_pos_emb = (of_query, None)
        layer = self.layer_number - self._get_pp_layer_offset_for_inference()
        context.append_key_value_cache(layer, key, value)
        key, value, table = context.key_value_cache(layer)
        return query, key, value, rotary_pos_emb, AttnMaskType.no_mask, table

    def _attend_in_static_cache(
        self,
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary_pos_emb: Any,
        tables: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Any, Any, None]:
        tokens, rows = self._places(context, key, context.sequence_len_offset)
        cached_tokens = slice(0, tokens.stop)
        keys, values = self._static_caches(context, key, value)
        if self.config.flash_decode and tables[0] is not None:
            check_reach(tables, tokens.stop)
            cos, sin = (table[tokens, None, None] for table in tables)
            query, key = (
                rotate_by_tables(x, cos, sin, self.config.rotary_interleaved) for x in (query, key)
            )
        with torch.no_grad():
            keys[tokens, rows], values[tokens, rows] = key, value
        mask_type = self.attn_mask_type
        # In training, the caller's own mask is kept (for speculative tokens); the causal mask has the same meaning
        # there.
        if tokens.start and (not self.training or mask_type == AttnMaskType.causal):
            # One query sees every key; one among several queries sees keys up to its own position.
            mask_type = (
                AttnMaskType.no_mask if query.shape[0] == 1 else AttnMaskType.causal_bottom_right
            )
        if rotary_pos_emb is not None:
            parts = zip(rotary_pos_emb, (tokens, cached_tokens), strict=True)
            rotary_pos_emb = tuple(
                None if angles is None else angles[which] for angles, which in parts
            )
        return (
            query,
            keys[cached_tokens, rows],
            values[cached_tokens, rows],
            rotary_pos_emb,
            mask_type,
            None,
        )

    def _places(self, context: Any, key: Tensor, begin: int) -> tuple[slice, slice]:
        """Return (tokens, sequences) of the caches for new keys [s, b, ..]; raise ValueError if they do not fit."""
        first, longest, most = (
            context.batch_size_offset,
            context.max_sequence_length,
            context.max_batch_size,
        )
        end, last = begin + key.shape[0], first + key.shape[1]
        if end > longest or last > most:
            raise ValueError(
                f"tokens {begin}:{end} of sequences {first}:{last} do not fit caches of {longest} tokens and {most} "
                "sequences; make the context larger"
            )
        return slice(begin, end), slice(first, last)

    def _static_caches(self, context: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        memory = context.key_value_memory_dict
        if self.layer_number not in memory:
            longest, batch = context.max_sequence_length, context.max_batch_size
            memory[self.layer_number] = (
                self._allocate_memory(longest, batch, self.key_hidden_size, key.dtype),
                self._allocate_memory(longest, batch, self.val_hidden_size, value.dtype),
            )
        return memory[self.layer_number]

    def flash_decode(
        self,
        sequence_len_offset: Tensor,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        inference_key_memory: Tensor,
        inference_value_memory: Tensor,
        rotary_cos: Tensor | None,
        rotary_sin: Tensor | None,
        rotary_interleaved: bool = False,
    ) -> Tensor:
        """Rotate q and k by their positions, append k and v to the cache, and return out [b, s, heads, size].

        Args:
            sequence_len_offset: int32 [b], tokens in the caches [longest, b, groups, size]; the host does not wait for
                it.
            query_layer: Queries of the new tokens.
            key_layer: Keys of the new tokens.
            value_layer: Values of the new tokens.
            inference_key_memory: Key cache.
            inference_value_memory: Value cache.
            rotary_cos: Cosines [positions, d / 2], or None.
            rotary_sin: Sines [positions, d / 2], or None.
            rotary_interleaved: Features are paired (0, 1), (2, 3), ...
        """
        new, batch = query_layer.shape[:2]
        positions = (
            sequence_len_offset.long() + torch.arange(new, device=query_layer.device)[:, None]
        )
        if rotary_cos is not None and rotary_sin is not None:
            tables = (table[positions][:, :, None] for table in (rotary_cos, rotary_sin))
            cos, sin = tables
            query_layer, key_layer = (
                rotate_by_tables(x, cos, sin, rotary_interleaved) for x in (query_layer, key_layer)
            )
        rows = torch.arange(batch, device=query_layer.device).expand(new, batch)
        with torch.no_grad():
            inference_key_memory[positions, rows] = key_layer.to(inference_key_memory.dtype)
            inference_value_memory[positions, rows] = value_layer.to(inference_value_memory.dtype)
        cu_queries = torch.arange(batch + 1, dtype=torch.int32, device=query_layer.device) * new
        lengths = (sequence_len_offset + new).int()
        out = attend(
            self._packed_core(getattr(self.core_attention, "softmax_offset", None)),
            query_layer.transpose(0, 1).flatten(0, 1),
            inference_key_memory[:, :batch].transpose(0, 1),
            inference_value_memory[:, :batch].transpose(0, 1),
            PackedRows(cu_queries, new, lengths, inference_key_memory.shape[0]),
        )
        return out.view(batch, new, *out.shape[1:])

    def flash_decode_and_prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None,
        seqlens_k: Tensor,
        block_table: Tensor,
        is_decode_only: bool = False,
        softmax_offset: Tensor | None = None,
    ) -> Tensor:
        """Attend from queries to keys in pages, for mixed prompts and single tokens: out [t, 1, heads, size].

        Args:
            q: Queries [t, 1, heads, size].
            k: Keys [pages, page_size, groups, size].
            v: Values, as k.
            max_seqlen_q: Upper bound of the queries of a request.
            max_seqlen_k: Upper bound of the keys of a request.
            cu_seqlens_q: int32 [requests + 1], cumulative queries.
            cu_seqlens_k: Cumulative keys, or None.
            seqlens_k: int32 [requests], keys per request.
            block_table: int32 [requests, pages per request].
            is_decode_only: Every request has one query.
            softmax_offset: [heads], a logit that is added to the denominator only.
        """
        if self.training:
            raise RuntimeError("paged caches are for inference; call eval() on the layer first")
        # [requests, pages per request * page_size, groups, size]
        pages = block_table.long().clamp(min=0)
        keys, values = k[pages].flatten(1, 2), v[pages].flatten(1, 2)
        rows = PackedRows(cu_seqlens_q.int(), max_seqlen_q, seqlens_k.int(), keys.shape[1])
        core = self._packed_core(softmax_offset)
        return attend(core, q.squeeze(1), keys, values, rows).unsqueeze(1)

    def _packed_core(self, softmax_offset: Tensor | None) -> Any:
        """Return the attention over caches, with a logit [heads] in the denominator; not a child, for checkpoints."""
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
        if softmax_offset is not None and core.softmax_offset is not None:
            core.softmax_offset.data = (
                softmax_offset.detach().float().reshape(core.softmax_offset.shape)
            )
        return core

    def _window(self) -> tuple[int, int] | None:
        """Return this layer's sliding window; with a frequency, some layers have none."""
        window = self.config.window_size
        skip = setting(self.config, "window_attn_skip_freq")
        if window is None or skip is None:
            return window
        if isinstance(skip, int):
            return None if self.layer_number % skip == 0 else window
        return window if skip[self.layer_number - 1] else None
