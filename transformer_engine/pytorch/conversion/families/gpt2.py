"""GPT-2: LayerNorm, biases everywhere, embedded positions, and weights [in, out] of a library that computes x @ w."""

from __future__ import annotations

import re

from ..decoder_config import DecoderConfig
from .family import MLP, PROJECTION, QKV, Family, Row, grouped_in_one, transposed
from .settings import Settings

_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
_THEIRS = "transformer.h.{i}."


def _settings(settings: Settings) -> DecoderConfig:
    hidden, heads, layers = (settings.integer(name) for name in ("n_embd", "n_head", "n_layer"))
    settings.demand("scale_attn_by_inverse_layer_idx", (False,), "all layers scale alike here")
    settings.demand("scale_attn_weights", (True,), "scores are scaled by sqrt(head size) here")
    settings.demand("add_cross_attention", (False,), "decoders without an encoder are converted")
    return DecoderConfig(
        vocabulary=settings.integer("vocab_size"),
        hidden=hidden,
        feed_forward=settings.integer("n_inner", 4 * hidden),
        layers=layers,
        heads=heads,
        groups=heads,
        head_size=hidden // max(1, heads),
        positions=settings.integer("n_positions"),
        norm="LayerNorm",
        epsilon=settings.number("layer_norm_epsilon", 1e-5),
        activation=settings.choice("activation_function", "gelu_new", _ACTIVATIONS),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        windows=(None,) * layers,
        tied=settings.switch("tie_word_embeddings", True),
    )


def _both(ours: str, theirs: str, between: str = "", layout=transposed) -> tuple[Row, Row]:
    """The rows of a weight and its bias."""
    return (
        Row(f"{ours}{between}weight", (f"{_THEIRS}{theirs}.weight",), layout),
        Row(f"{ours}{between}bias", (f"{_THEIRS}{theirs}.bias",), layout),
    )


FAMILY = Family(
    "gpt2",
    _settings,
    (
        Row("embedding.weight", ("transformer.wte.weight",)),
        Row("position_embedding.weight", ("transformer.wpe.weight",)),
        *_both(QKV, "ln_1", "layer_norm_"),
        *_both(QKV, "attn.c_attn", layout=grouped_in_one),
        *_both(PROJECTION, "attn.c_proj"),
        *_both(MLP, "ln_2", "layer_norm_"),
        *_both(MLP, "mlp.c_fc", "fc1_"),
        *_both(MLP, "mlp.c_proj", "fc2_"),
        Row("norm.weight", ("transformer.ln_f.weight",)),
        Row("norm.bias", ("transformer.ln_f.bias",)),
        Row("head.weight", ("lm_head.weight",)),
    ),
    prefix="transformer.",
    derived=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),
)
