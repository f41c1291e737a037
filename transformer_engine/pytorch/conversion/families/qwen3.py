"""Qwen3: Llama with queries and keys normalized by heads before they turn."""

from __future__ import annotations

from ..decoder_config import DecoderConfig
from .family import LLAMA_ROWS, Family, Row
from .qwen2 import upper_windows
from .settings import Settings, llama_like


def _settings(settings: Settings) -> DecoderConfig:
    bias = settings.switch("attention_bias", False)
    return llama_like(
        settings,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        head_size=settings.integer("head_dim", 128),
        windows=upper_windows(settings),
    )


FAMILY = Family(
    "qwen3",
    _settings,
    (
        *LLAMA_ROWS,
        Row("layers.{i}.self_attention.q_norm.weight", ("model.layers.{i}.self_attn.q_norm.weight",)),
        Row("layers.{i}.self_attention.k_norm.weight", ("model.layers.{i}.self_attn.k_norm.weight",)),
    ),
)
