"""The layers of an 8-billion-parameter Llama as models in bfloat16, and how each is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import transformer_engine.pytorch as te

BF16 = torch.bfloat16
TOKENS, HIDDEN, INNER, HEADS, GROUPS, HEAD = 8192, 4096, 14336, 32, 8, 128
QKV = (HEADS + 2 * GROUPS) * HEAD


class Model(NamedTuple):
    """Layer constructor on a device, and its input and output features."""

    make: Callable[[str], nn.Module]
    inputs: int = HIDDEN
    outputs: int = HIDDEN


def _linear(inputs: int, outputs: int) -> Model:
    return Model(
        lambda device: te.Linear(inputs, outputs, bias=False, params_dtype=BF16, device=device),
        inputs,
        outputs,
    )


def _layernorm_linear(device: str) -> nn.Module:
    return te.LayerNormLinear(
        HIDDEN, QKV, bias=False, normalization="RMSNorm", params_dtype=BF16, device=device
    )


def _mlp(activation: str) -> Model:
    gated = activation == "swiglu"
    options = {"bias": not gated, "normalization": "RMSNorm" if gated else "LayerNorm"}
    return Model(
        lambda device: te.LayerNormMLP(
            HIDDEN, INNER, activation=activation, params_dtype=BF16, device=device, **options
        )
    )


def _layer(device: str) -> nn.Module:
    return te.TransformerLayer(
        HIDDEN,
        INNER,
        HEADS,
        num_gqa_groups=GROUPS,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=BF16,
        self_attn_mask_type="causal",
        device=device,
    )


MODELS = {
    "linear 4096x28672": _linear(HIDDEN, 2 * INNER),
    "linear 14336x4096": _linear(INNER, HIDDEN),
    "layernorm_linear rms 4096x6144": Model(_layernorm_linear, HIDDEN, QKV),
    "layernorm_mlp swiglu 4096x14336": _mlp("swiglu"),
    "layernorm_mlp gelu 4096x14336": _mlp("gelu"),
    "layer llama8b": Model(_layer),
}
