"""Llama 1 to 3.3: RMSNorm, SwiGLU, rotary halves, grouped keys and values."""

from __future__ import annotations

from ..decoder_config import DecoderConfig
from .family import LLAMA_ROWS, Family
from .settings import Settings, llama_like


def _settings(settings: Settings) -> DecoderConfig:
    bias = settings.switch("attention_bias", False)
    return llama_like(settings, qkv_bias=bias, output_bias=bias, mlp_bias=settings.switch("mlp_bias", False))


FAMILY = Family("llama", _settings, LLAMA_ROWS)
