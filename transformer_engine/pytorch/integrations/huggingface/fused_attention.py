"""y [b, s, h] = attention(rotated(norm(x) @ qkv_weight.T)) @ o_weight.T: an attention and the norm before it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...attention.rope import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from ...conversion import DecoderConfig
from ...module.layernorm_linear import LayerNormLinear
from ...module.linear import Linear
from ...module.rmsnorm import RMSNorm
from .convertible import factory_kwargs, leave_unfilled, norm_factory_kwargs, norm_keywords
from .hooks import Turns

# Stock attention attributes that its calls read, and that callers may have set.
SET_BY_CALLERS = ("scaling", "attention_dropout", "is_causal")


class FusedAttention(nn.Module):
    """Queries, keys and values as one product with the norm before it, for a transformers decoder layer.

    The attention function is the one that `config._attn_implementation` names in transformers' registry, and is called
    as in the stock layer. The attributes of a stock layer that such functions and caches read exist here too.
    """

    def __init__(self, stock: Any, decoder: DecoderConfig, index: int):
        super().__init__()
        self.config: Any = stock.config
        self.layer_idx = index
        self.heads, self.groups, self.head_dim = decoder.heads, decoder.groups, decoder.head_size
        self.num_key_value_groups = decoder.heads // decoder.groups
        self.scaling: float
        self.attention_dropout: float
        self.is_causal: bool
        for name in SET_BY_CALLERS:
            setattr(self, name, getattr(stock, name))
        self.sliding_window = decoder.windows[index]
        self.eager: Callable[..., Any] = sys.modules[type(stock).__module__].eager_attention_forward
        attended, grouped = self.heads * self.head_dim, 2 * self.groups * self.head_dim
        place: dict[str, Any] = factory_kwargs(stock.o_proj.weight)
        self.layernorm_qkv = LayerNormLinear(
            decoder.hidden,
            attended + grouped,
            bias=decoder.qkv_bias,
            init_method=leave_unfilled,
            **norm_keywords(decoder),
            **place,
        )
        self.o_proj = Linear(
            attended, decoder.hidden, bias=decoder.output_bias, init_method=leave_unfilled, **place
        )
        if decoder.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(
                    self.head_dim, eps=decoder.epsilon, **norm_factory_kwargs(stock.q_norm.weight)
                )
                for _ in range(2)
            )
        self.qk_norm = decoder.qk_norm

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Turns,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (y, attention weights or None)."""
        parts = self._queries_keys_values(
            self.layernorm_qkv(hidden_states), position_embeddings.angles
        )
        query, key, value = (part.transpose(1, 2) for part in parts)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        library: Any = sys.modules[
            "transformers.modeling_utils"
        ]  # loaded: the stock layer is from transformers
        attention = library.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self.eager
        )
        attended, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling * position_embeddings.scale**2,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        attended = attended.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.o_proj(attended), weights

    def _queries_keys_values(self, qkv: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv [b, s, ..] to [b, s, heads | groups | groups, d]; q and k rotated by angles [1 | b, s, d]."""
        batch, length, _ = qkv.shape
        # positions differ between sequences: treat them as one sequence with all tokens
        if angles.shape[0] > 1:
            qkv = qkv.reshape(1, batch * length, -1)
        table = angles.reshape(-1, 1, 1, self.head_dim)
        qkv = qkv.unflatten(-1, (self.groups, -1))
        sizes = [self.num_key_value_groups * self.head_dim, self.head_dim, self.head_dim]
        if self.qk_norm:
            query, key, value = qkv.split(sizes, dim=-1)
            query = self.q_norm(query.reshape(*qkv.shape[:2], self.heads, self.head_dim))
            query = apply_rotary_pos_emb(query, table, "bshd")
            key = apply_rotary_pos_emb(self.k_norm(key.contiguous()), table, "bshd")
        else:
            query, key, value = apply_fused_qkv_rotary_pos_emb(qkv, table, table, sizes, "bshd")
        shape = (batch, length, -1, self.head_dim)
        return query.reshape(shape), key.reshape(shape), value.reshape(shape)
