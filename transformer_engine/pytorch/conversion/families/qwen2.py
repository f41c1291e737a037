"""Qwen2 and 2.5: Llama whose queries, keys and values have a bias, with windows in the upper layers where asked for."""

from __future__ import annotations

from ..decoder_config import DecoderConfig
from .family import LLAMA_ROWS, Family
from .settings import Settings, llama_like, windows


def upper_windows(settings: Settings) -> tuple[int | None, ...]:
    """A window in the layers from max_window_layers on, if use_sliding_window says so."""
    layers = settings.integer("num_hidden_layers")
    if not settings.switch("use_sliding_window", False) or settings.content.get("sliding_window") is None:
        return (None,) * layers
    window = settings.integer("sliding_window")
    if settings.content.get("layer_types") is not None:
        return windows(settings, window, layers)
    first = settings.integer("max_window_layers", layers)
    return tuple(window if layer >= first else None for layer in range(layers))


def _settings(settings: Settings) -> DecoderConfig:
    return llama_like(settings, qkv_bias=True, windows=upper_windows(settings))


FAMILY = Family("qwen2", _settings, LLAMA_ROWS)
