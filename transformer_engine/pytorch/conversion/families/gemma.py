"""Gemma 1: norms multiply by 1 + weight, GeGLU, embeddings times sqrt(hidden), which are the head too."""

from __future__ import annotations

from ..decoder_config import DecoderConfig
from .family import LLAMA_ROWS, Family
from .settings import Settings, llama_like

# Its first files call the activation "gelu" and mean the approximation by tanh, which is the only one here.
_ACTIVATIONS = {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}


def _settings(settings: Settings) -> DecoderConfig:
    bias = settings.switch("attention_bias", False)
    named = "hidden_activation" if settings.content.get("hidden_activation") else "hidden_act"
    return llama_like(
        settings,
        activation=settings.choice(named, "gelu_pytorch_tanh", _ACTIVATIONS),
        head_size=settings.integer("head_dim", 256),
        zero_centered=True,
        qkv_bias=bias,
        output_bias=bias,
        tied=settings.switch("tie_word_embeddings", True),
        embedding_scale=settings.integer("hidden_size") ** 0.5,
    )


FAMILY = Family("gemma", _settings, LLAMA_ROWS)
