"""Mistral: Llama, each token attending to itself and the window before it."""

from __future__ import annotations

from ..decoder_config import DecoderConfig
from .family import LLAMA_ROWS, Family
from .settings import Settings, llama_like, windows


def _settings(settings: Settings) -> DecoderConfig:
    window = settings.content.get("sliding_window")
    if window is not None:
        window = settings.integer("sliding_window")
    return llama_like(settings, windows=windows(settings, window, settings.integer("num_hidden_layers")))


FAMILY = Family("mistral", _settings, LLAMA_ROWS)
