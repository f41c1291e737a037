"""Attention calls with arguments in another form or without effect, each paired with the plain call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex

from .accepted_forms import (
    BATCH,
    HEADS,
    HIDDEN,
    OFF,
    TOKENS,
    Pair,
    hidden,
    outcome,
    sample,
    sample_heads,
)

# 1 = masked: the last two tokens of the first sequence
LAST_TWO = torch.tensor([[0] * 6 + [1] * 2, [0] * 8])
PADDING = LAST_TWO.view(BATCH, 1, 1, TOKENS)
DIAGONAL = torch.ones(1, 1, TOKENS, TOKENS).triu(1)  # 1 = masked
ADDITIVE = DIAGONAL.masked_fill(DIAGONAL.bool(), float("-inf"))

# Masks in other forms, with the type that reads them and the equivalent bool mask; None: the type reads none.
MASKS: dict[str, tuple[str, Any, Any]] = {
    "causal, additive float": ("causal", ADDITIVE, None),
    "causal, float padding": ("causal", PADDING.float(), None),
    "causal, uint8": ("causal", DIAGONAL.to(torch.uint8), None),
    "causal, bool": ("causal", DIAGONAL.bool(), None),
    "causal, list": ("causal", [PADDING, PADDING], None),
    "causal, ndarray": ("causal", numpy.zeros((2, 1, 1, 8)), None),
    "no_mask, float": ("no_mask", PADDING.float(), None),
    "causal_bottom_right, int64": ("causal_bottom_right", PADDING, None),
    "padding, uint8": ("padding", PADDING.to(torch.uint8), PADDING.bool()),
    "padding, int64": ("padding", PADDING, PADDING.bool()),
    "padding, float": ("padding", PADDING.float(), PADDING.bool()),
    "padding, additive": ("padding", PADDING.float() * -10000.0, PADDING.bool()),
    "padding, list of two": (
        "padding",
        [PADDING.bool(), PADDING.bool()],
        (PADDING.bool(), PADDING.bool()),
    ),
    "padding_causal, uint8 tuple": (
        "padding_causal",
        (PADDING.byte(), PADDING.byte()),
        PADDING.bool(),
    ),
    "arbitrary, uint8": ("arbitrary", DIAGONAL.to(torch.uint8), DIAGONAL.bool()),
    "arbitrary, int32": ("arbitrary", DIAGONAL.int(), DIAGONAL.bool()),
}

# Options for DotProductAttention.forward, and the options for the same call in plain spelling.
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"core_attention_bias": sample(1, HEADS, TOKENS, TOKENS)}, {}),
    ({"alibi_slopes": torch.ones(HEADS)}, {}),
    ({"max_seqlen_q": 8.0, "max_seqlen_kv": numpy.int32(8)}, {}),
    ({"max_seqlen_q": torch.tensor(8), "max_seqlen_kv": torch.tensor(8.0)}, {}),
    ({"num_splits": torch.tensor(2)}, {"num_splits": 2}),
    ({"window_size": torch.tensor([3, 0])}, {"window_size": (3, 0)}),
    ({"window_size": [3.0, 0.0]}, {"window_size": (3, 0)}),
    ({"pad_between_seqs": 0}, {"pad_between_seqs": False}),
    ({"checkpoint_core_attention": torch.tensor(True)}, {"checkpoint_core_attention": True}),
    ({"fast_zero_fill": False}, {}),
    ({"fp8_output": 0}, {}),
]


def mask_pairs() -> Iterator[Pair]:
    """Yield attention and layer calls with a mask in another form."""
    for name, (kind, argument, plain) in MASKS.items():
        yield Pair(
            f"DotProductAttention, {name}",
            lambda kind=kind, value=argument: outcome(
                lambda: te.DotProductAttention(4, 16),
                *sample_heads(),
                attention_mask=value,
                attn_mask_type=kind,
            ),
            lambda kind=kind, plain=plain: outcome(
                lambda: te.DotProductAttention(4, 16),
                *sample_heads(),
                attention_mask=plain,
                attn_mask_type=kind,
            ),
        )
        yield Pair(
            f"TransformerLayer, {name}",
            lambda kind=kind, value=argument: outcome(
                lambda: te.TransformerLayer(HIDDEN, 96, HEADS, self_attn_mask_type=kind, **OFF),
                hidden(),
                attention_mask=value,
            ),
            lambda kind=kind, plain=plain: outcome(
                lambda: te.TransformerLayer(HIDDEN, 96, HEADS, self_attn_mask_type=kind, **OFF),
                hidden(),
                attention_mask=plain,
            ),
        )


def option_pairs() -> Iterator[Pair]:
    """Yield DotProductAttention calls with numbers and flags in other forms."""
    for number, (argument, plain) in enumerate(OPTIONS):
        yield Pair(
            f"{number} DotProductAttention.forward({', '.join(argument)})",
            lambda options=argument: outcome(
                lambda: te.DotProductAttention(4, 16), *sample_heads(), **options
            ),
            lambda plain=plain: outcome(
                lambda: te.DotProductAttention(4, 16), *sample_heads(), **plain
            ),
        )


def angles(tokens: int = TOKENS, **options: Any) -> torch.Tensor:
    return te.RotaryPositionEmbedding(16, **options)(tokens).cpu()


def layer_pairs() -> Iterator[Pair]:
    """Yield attention layer calls with arguments that they do not read, or in another form."""

    def mha(**options: Any) -> te.MultiheadAttention:
        return te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, device="cpu", **options)

    def layer(**options: Any) -> te.TransformerLayer:
        return te.TransformerLayer(HIDDEN, 96, HEADS, **{**OFF, **options})

    x = hidden()
    yield Pair(
        "MultiheadAttention self, encoder_output",
        lambda: outcome(mha, x, encoder_output=x),
        lambda: outcome(mha, x),
    )
    yield Pair(
        "TransformerLayer encoder, encoder_output",
        lambda: outcome(layer, x, encoder_output=x, enc_dec_attn_mask=PADDING.float()),
        lambda: outcome(layer, x),
    )
    yield Pair(
        "MultiheadAttention, list of rotary tables",
        lambda: outcome(mha, x, rotary_pos_emb=[angles(), angles()]),
        lambda: outcome(mha, x, rotary_pos_emb=(angles(), angles())),
    )
    yield Pair(
        "TransformerLayer in evaluation, drop_path_rate=1.0",
        lambda: layer_in_evaluation(drop_path_rate=1.0),
        lambda: layer_in_evaluation(),
    )
    yield Pair(
        "TransformerLayer in evaluation, every dropout 1.0",
        lambda: layer_in_evaluation(hidden_dropout=1, attention_dropout=1.0),
        lambda: layer_in_evaluation(hidden_dropout=0.0, attention_dropout=0.0),
    )


def layer_in_evaluation(**options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    return te.TransformerLayer(HIDDEN, 96, HEADS, **{**OFF, **options}).eval()(hidden())


def rotary_pairs() -> Iterator[Pair]:
    """Yield rotary embeddings constructed and called with numbers in other forms."""
    for name, make, max_seq_len, offset in (
        ("0-d tensor", lambda: te.RotaryPositionEmbedding(16), torch.tensor(8), 0),
        (
            "int32 0-d tensor",
            lambda: te.RotaryPositionEmbedding(16.0),
            torch.tensor(8, dtype=torch.int32),
            0,
        ),
        (
            "numpy",
            lambda: te.RotaryPositionEmbedding(numpy.int64(16)),
            numpy.int64(8),
            numpy.int64(0),
        ),
        ("float", lambda: te.RotaryPositionEmbedding(16, rotary_percent=1), 8.0, torch.tensor(0)),
        (
            "base tensor",
            lambda: te.RotaryPositionEmbedding(16, rotary_base=torch.tensor(10000)),
            8,
            0.0,
        ),
        ("percent above 1", lambda: te.RotaryPositionEmbedding(16, rotary_percent=1.5), 8, 0),
    ):
        yield Pair(
            f"RotaryPositionEmbedding, {name}",
            lambda make=make, n=max_seq_len, offset=offset: make()(n, offset=offset),
            lambda: te.RotaryPositionEmbedding(16)(8),
        )
    yield Pair(
        "apply_fused_qkv_rotary_pos_emb, numpy sizes",
        lambda: te.attention.rope.apply_fused_qkv_rotary_pos_emb(
            sample(8, 2, 4, 48),
            angles(),
            angles(),
            numpy.array([16, 16, 16]),
            interleaved=0,
            cp_size=1.0,
        ),
        lambda: te.attention.rope.apply_fused_qkv_rotary_pos_emb(
            sample(8, 2, 4, 48), angles(), angles(), [16, 16, 16]
        ),
    )


def cached_steps(cache: te.InferenceParams, tokens: Any) -> torch.Tensor:
    """Outputs from two steps, with `tokens` and 1 new tokens per sequence."""
    layer = te.DotProductAttention(
        HEADS, 16, layer_number=1, qkv_format="bshd", attn_mask_type="causal"
    )
    outputs = []
    for new, seed in ((tokens, 1), (1, 4)):
        cache.pre_step({0: new, 1: new})
        q, k, v = (sample(BATCH, int(new), HEADS, 16, seed=seed + i) for i in range(3))
        outputs.append(layer(q, k, v, inference_params=cache))
    return torch.cat(outputs, dim=1)


def cache_pairs() -> Iterator[Pair]:
    """Yield caches with sizes in other forms."""
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    for name, sizes, tokens in (
        (
            "numpy",
            (numpy.int64(2), numpy.int32(16), numpy.int64(4), numpy.int64(16)),
            numpy.int64(3),
        ),
        ("0-d tensors", tuple(map(torch.tensor, (2, 16, 4, 16))), torch.tensor(3)),
        ("floats", (2.0, 16.0, 4.0, 16.0), 3.0),
    ):
        yield Pair(
            f"InferenceParams, {name}",
            lambda sizes=sizes, tokens=tokens: cached_steps(
                te.InferenceParams(*sizes, **options), tokens
            ),
            lambda: cached_steps(te.InferenceParams(2, 16, 4, 16, **options), 3),
        )


def extension_pairs() -> Iterator[Pair]:
    """Yield extension functions with numbers and flags in other forms."""
    scores, triangle, masked = (
        sample(2, 4, 8, 8),
        sample(8, 8, 8),
        torch.zeros(2, 1, 8, 8, dtype=torch.bool),
    )
    for name, inputs in (
        ("scaled_softmax_forward", (scores,)),
        ("scaled_masked_softmax_forward", (scores, masked)),
        ("scaled_upper_triang_masked_softmax_forward", (triangle,)),
    ):
        yield Pair(
            f"tex.{name}",
            lambda name=name, inputs=inputs: getattr(tex, name)(*inputs, torch.tensor(0.5)),
            lambda name=name, inputs=inputs: getattr(tex, name)(*inputs, 0.5),
        )
    yield Pair(
        "tex.fused_qkv_rope_forward",
        lambda: tex.fused_qkv_rope_forward(
            sample(8, 2, 4, 48),
            angles(),
            angles(),
            None,
            [16.0, 16.0, 16.0],
            tex.NVTE_QKV_Format.NVTE_SBHD,
            0,
            1.0,
            False,
        ),
        lambda: tex.fused_qkv_rope_forward(
            sample(8, 2, 4, 48),
            angles(),
            angles(),
            None,
            [16, 16, 16],
            tex.NVTE_QKV_Format.NVTE_SBHD,
            False,
            1,
            0,
        ),
    )


def all_attention_pairs() -> list[Pair]:
    return [
        *mask_pairs(),
        *option_pairs(),
        *layer_pairs(),
        *rotary_pairs(),
        *cache_pairs(),
        *extension_pairs(),
    ]
