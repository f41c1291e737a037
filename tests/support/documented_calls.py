"""Calls as the original's and its clients' documentation write them, each paired with plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import transformer_engine.pytorch as te

from .accepted_forms import HEADS, HIDDEN, OFF, hidden, sample, sample_heads


class Documented(NamedTuple):
    """A documented call, and the same result by plain PyTorch."""

    name: str
    given: Callable[[], Any]
    oracle: Callable[[], Any]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any = None, scale: Any = None
) -> torch.Tensor:
    """softmax(scale * q k^T + bias) v for q, k, v [b, s, h, d], as [b, s, h * d]."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


def band(size: int, left: int) -> torch.Tensor:
    """Bias for a causal mask in which a query sees `left` earlier keys; -1 = all."""
    hidden_keys = torch.ones(size, size).triu(1).bool()
    if left >= 0:
        hidden_keys |= torch.ones(size, size).tril(-left - 1).bool()
    return torch.zeros(size, size).masked_fill(hidden_keys, float("-inf"))


def bshd(groups: int = HEADS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        sample(2, 8, HEADS, 16, seed=1),
        sample(2, 8, groups, 16, seed=2),
        sample(2, 8, groups, 16, seed=3),
    )


def randomize_parameters(layer: torch.nn.Module) -> torch.nn.Module:
    """The layer, with parameters that differ from their defaults."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return layer


def linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, layer.weight, layer.bias if layer.use_bias else None)


LINEAR = randomize_parameters(te.Linear(16, 32, bias=True, device="cpu"))
NO_BIAS = randomize_parameters(te.Linear(16, 32, bias=False, init_method=None, device="cpu"))
RETURNED: Any = randomize_parameters(te.Linear(16, 32, return_bias=True, device="cpu"))
SPLIT: Any = randomize_parameters(
    te.Linear(16, 24, parameters_split=("q", "k_", "v"), device="cpu")
)
SIZED: Any = randomize_parameters(
    te.Linear(16, 24, parameters_split={"q": 16, "kv": 8}, device="cpu")
)
NORM: Any = randomize_parameters(
    te.LayerNorm(
        normalized_shape=16,
        eps=1e-3,
        sequence_parallel=False,
        zero_centered_gamma=True,
        device="cpu",
    )
)
RMS: Any = randomize_parameters(te.RMSNorm(16, eps=1e-6, dtype=torch.float32, device="cpu"))
NORM_LINEAR: Any = randomize_parameters(
    te.LayerNormLinear(16, 48, bias=False, init_method=None, device="cpu")
)
NORM_OUT: Any = randomize_parameters(
    te.LayerNormLinear(16, 32, normalization="RMSNorm", return_layernorm_output=True, device="cpu")
)
SWIGLU: Any = randomize_parameters(
    te.LayerNormMLP(
        hidden_size=16,
        ffn_hidden_size=32,
        bias=False,
        activation="swiglu",
        init_method=None,
        output_layer_init_method=None,
        device="cpu",
    )
)
MLP: Any = randomize_parameters(te.LayerNormMLP(hidden_size=16, ffn_hidden_size=32, device="cpu"))
GROUPED: Any = randomize_parameters(
    te.GroupedLinear(
        num_gemms=3,
        in_features=16,
        out_features=32,
        bias=True,
        params_dtype=torch.float32,
        device="cpu",
    )
)
ROWS = sample(8, 16)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def layer_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], module.layer_norm_weight, module.layer_norm_bias, 1e-5)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = F.linear(layer_norm(SWIGLU, x), SWIGLU.fc1_weight).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * value, SWIGLU.fc2_weight)


def mlp(x: torch.Tensor) -> torch.Tensor:
    inner = F.gelu(F.linear(layer_norm(MLP, x), MLP.fc1_weight, MLP.fc1_bias), approximate="tanh")
    return F.linear(inner, MLP.fc2_weight, MLP.fc2_bias)


def grouped_linear(rows: list[int]) -> torch.Tensor:
    parts = ROWS.split(rows)
    return torch.cat(
        [
            F.linear(x, getattr(GROUPED, f"weight{i}"), getattr(GROUPED, f"bias{i}"))
            for i, x in enumerate(parts)
        ]
    )


_LAYERS: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
    (
        "README: te.Linear(in_features, out_features, bias=True)",
        lambda: LINEAR(ROWS),
        lambda: linear(LINEAR, ROWS),
    ),
    (
        "page of Linear: leading dimensions",
        lambda: LINEAR(hidden().view(8, 8, 16)),
        lambda: linear(LINEAR, hidden().view(8, 8, 16)),
    ),
    (
        "page of Linear: is_first_microbatch",
        lambda: LINEAR(ROWS, is_first_microbatch=True),
        lambda: linear(LINEAR, ROWS),
    ),
    (
        "ESM: te.Linear(d, d, bias=False, init_method=None)",
        lambda: NO_BIAS(ROWS),
        lambda: linear(NO_BIAS, ROWS),
    ),
    (
        "Megatron: TELinear with return_bias",
        lambda: RETURNED(ROWS),
        lambda: (F.linear(ROWS, RETURNED.weight), RETURNED.bias),
    ),
    (
        "page of Linear: parameters_split as a tuple",
        lambda: SPLIT(ROWS),
        lambda: torch.cat(
            [
                F.linear(ROWS, getattr(SPLIT, f"{n}_weight"), getattr(SPLIT, f"{n}_bias"))
                for n in "qkv"
            ],
            -1,
        ),
    ),
    (
        "page of Linear: parameters_split as a dict",
        lambda: SIZED(ROWS),
        lambda: torch.cat(
            [
                F.linear(ROWS, SIZED.q_weight, SIZED.q_bias),
                F.linear(ROWS, SIZED.kv_weight, SIZED.kv_bias),
            ],
            -1,
        ),
    ),
    (
        "Megatron: TENorm with zero_centered_gamma",
        lambda: NORM(ROWS),
        lambda: F.layer_norm(ROWS, (16,), 1 + NORM.weight, NORM.bias, 1e-3),
    ),
    ("cosmos: RMSNorm(n, eps=)", lambda: RMS(ROWS), lambda: rms(ROWS, RMS.weight, 1e-6)),
    (
        "ESM: LayerNormLinear(d, 3d, bias=False)",
        lambda: NORM_LINEAR(ROWS),
        lambda: F.linear(layer_norm(NORM_LINEAR, ROWS), NORM_LINEAR.weight),
    ),
    (
        "page of LayerNormLinear: return_layernorm_output",
        lambda: NORM_OUT(ROWS),
        lambda: (
            F.linear(rms(ROWS, NORM_OUT.layer_norm_weight), NORM_OUT.weight, NORM_OUT.bias),
            rms(ROWS, NORM_OUT.layer_norm_weight),
        ),
    ),
    ("ESM: LayerNormMLP with swiglu", lambda: SWIGLU(ROWS), lambda: swiglu(ROWS)),
    (
        "llm-foundry: LayerNormMLP(hidden_size=, ffn_hidden_size=)",
        lambda: MLP(ROWS),
        lambda: mlp(ROWS),
    ),
    (
        "Megatron: TEGroupedLinear with m_splits",
        lambda: GROUPED(ROWS, [3, 0, 5]),
        lambda: grouped_linear([3, 0, 5]),
    ),
    (
        "AutoModel: GroupedLinear.forward through the class",
        lambda: te.GroupedLinear.forward(GROUPED, ROWS, torch.tensor([1, 3, 4])),
        lambda: grouped_linear([1, 3, 4]),
    ),
    (
        "Megatron: Fp8Padding(1) in inference",
        lambda: te.Fp8Padding(1, 16)(ROWS, [8]),
        lambda: (F.pad(ROWS, (0, 0, 0, 8)), [16]),
    ),
    (
        "Megatron: Fp8Unpadding",
        lambda: te.Fp8Unpadding(1, 16)(F.pad(ROWS, (0, 0, 0, 8)), [8]),
        lambda: ROWS,
    ),
    (
        "lightning: te.Linear(in, out, bias=bool) with swapped data",
        lambda: linear_with_replaced_data(ROWS),
        lambda: F.linear(ROWS, torch.eye(16), torch.ones(16)),
    ),
]


def linear_with_replaced_data(x: torch.Tensor) -> torch.Tensor:
    layer = te.Linear(16, 16, bias=True)
    layer.weight.data, layer.bias.data = torch.eye(16), torch.ones(16)
    return layer(x)


def dpa(*qkv: torch.Tensor, call: dict[str, Any] | None = None, **options: Any) -> Any:
    return te.DotProductAttention(HEADS, 16, **options)(*qkv, **(call or {}))


def automodel(groups: int, left: int, scale: float | None = None, **call: Any) -> torch.Tensor:
    module = te.attention.DotProductAttention(
        num_attention_heads=HEADS,
        kv_channels=(16, 16),
        attn_mask_type="causal",
        qkv_format="bshd",
        softmax_scale=scale,
        num_gqa_groups=groups,
        window_size=(left, 0),
    )
    return module(*bshd(groups), **call)


BOUNDS, PADDED = (
    torch.tensor([0, 3, 5, 9], dtype=torch.int32),
    torch.tensor([0, 4, 8, 13], dtype=torch.int32),
)


def packed(
    bounds: torch.Tensor, lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
    """Packed q = k = v [t, h, d], and the sequence positions in it."""
    x = sample(int(bounds[-1]), HEADS, 16, seed=7)
    places = [slice(begin, begin + n) for begin, n in zip(bounds.tolist(), lengths, strict=False)]
    return x, torch.zeros(x.shape[0], HEADS * 16), places


def one_by_one(bounds: torch.Tensor) -> torch.Tensor:
    """Causal attention on the sequences with lengths 3, 2, 4 that begin at the bounds."""
    x, out, places = packed(bounds, [3, 2, 4])
    for index in places:
        q = x[index][None]
        out[index] = attention(q, q, q, band(q.shape[1], -1))[0]
    return out


def thd(**padded: torch.Tensor) -> torch.Tensor:
    x = packed(padded.get("cu_seqlens_q_padded", BOUNDS), [3, 2, 4])[0]
    call = {"cu_seqlens_q": BOUNDS, "cu_seqlens_kv": BOUNDS, **padded}
    return dpa(x, x, x, qkv_format="thd", attn_mask_type="padding_causal", call=call)


def padded_batch(given_as_mask: bool) -> torch.Tensor:
    """The page's example: sequences with 3, 2 and 4 tokens, padded to 4."""
    x = sample(3, 4, HEADS, 16, seed=8)
    masked = torch.arange(4)[None] >= torch.tensor([3, 2, 4])[:, None]
    call = (
        {"attention_mask": masked[:, None, None]}
        if given_as_mask
        else {"cu_seqlens_q": BOUNDS, "cu_seqlens_kv": BOUNDS}
    )
    out = dpa(x, x, x, qkv_format="bshd", attn_mask_type="padding", call=call)
    return out.masked_fill(masked[..., None], 0.0)


def padded_oracle() -> torch.Tensor:
    x = sample(3, 4, HEADS, 16, seed=8)
    masked = torch.arange(4)[None] >= torch.tensor([3, 2, 4])[:, None]
    bias = torch.zeros(3, 1, 1, 4).masked_fill(masked[:, None, None], float("-inf"))
    return attention(x, x, x, bias).masked_fill(masked[..., None], 0.0)


def off_by_one() -> torch.Tensor:
    q, k, v = bshd()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4.0
    weights = scores.exp() / (1.0 + scores.exp().sum(-1, keepdim=True))
    return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


def sbhd_oracle(bias: Any) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1) for x in sample_heads())
    return attention(q, k, v, bias).transpose(0, 1)


def max_logit() -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = bshd()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4.0
    return attention(q, k, v), scores.amax(dim=(0, 2, 3))


BIAS = sample(1, HEADS, 8, 8, seed=9)
NO_MASK: dict[str, Any] = {"attn_mask_type": "no_mask"}

_ATTENTION: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
    ("AutoModel: causal", lambda: automodel(HEADS, -1), lambda: attention(*bshd(), band(8, -1))),
    (
        "AutoModel: grouped heads and a window",
        lambda: automodel(2, 3),
        lambda: attention(*bshd(2), band(8, 3)),
    ),
    (
        "AutoModel: window of one call",
        lambda: automodel(2, -1, attn_mask_type="causal", window_size=(2, 0)),
        lambda: attention(*bshd(2), band(8, 2)),
    ),
    (
        "AutoModel: no_mask of one call",
        lambda: automodel(HEADS, -1, attn_mask_type="no_mask", window_size=(-1, -1)),
        lambda: attention(*bshd()),
    ),
    (
        "AutoModel: softmax_scale",
        lambda: automodel(HEADS, -1, 0.5),
        lambda: attention(*bshd(), band(8, -1), 0.5),
    ),
    ("page of DotProductAttention: packed sequences", lambda: thd(), lambda: one_by_one(BOUNDS)),
    (
        "page of DotProductAttention: tokens between packed sequences",
        lambda: drop_padding(thd(cu_seqlens_q_padded=PADDED, cu_seqlens_kv_padded=PADDED)),
        lambda: drop_padding(one_by_one(PADDED)),
    ),
    (
        "page of DotProductAttention: padded batch by cu_seqlens",
        lambda: padded_batch(False),
        padded_oracle,
    ),
    (
        "page of DotProductAttention: padded batch by attention_mask",
        lambda: padded_batch(True),
        padded_oracle,
    ),
    (
        "page of DotProductAttention: softmax_type off-by-one",
        lambda: dpa(*bshd(), qkv_format="bshd", softmax_type="off-by-one", **NO_MASK),
        off_by_one,
    ),
    (
        "page of DotProductAttention: return_max_logit",
        lambda: dpa(*bshd(), qkv_format="bshd", return_max_logit=True, **NO_MASK),
        max_logit,
    ),
    (
        "page of DotProductAttention: qkv_format of one call",
        lambda: dpa(*bshd(), call={"qkv_format": "bshd"}),
        lambda: attention(*bshd(), band(8, -1)),
    ),
    (
        "Megatron: post_scale_bias",
        lambda: dpa(
            *sample_heads(),
            **NO_MASK,
            call={"core_attention_bias_type": "post_scale_bias", "core_attention_bias": BIAS},
        ),
        lambda: sbhd_oracle(BIAS),
    ),
    (
        "page of DotProductAttention: pre_scale_bias",
        lambda: dpa(
            *sample_heads(),
            **NO_MASK,
            call={"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": BIAS},
        ),
        lambda: sbhd_oracle(BIAS / 4.0),
    ),
    (
        "page of DotProductAttention: arbitrary mask",
        lambda: dpa(
            *sample_heads(),
            attn_mask_type="arbitrary",
            call={"attention_mask": torch.ones(1, 1, 8, 8).triu(1).bool()},
        ),
        lambda: sbhd_oracle(band(8, -1)),
    ),
    (
        "Megatron: attention_mask=None with causal",
        lambda: dpa(*sample_heads(), attn_mask_type="causal", call={"attention_mask": None}),
        lambda: sbhd_oracle(band(8, -1)),
    ),
    (
        "page of RotaryPositionEmbedding: fractional offset",
        lambda: te.RotaryPositionEmbedding(16)(8, offset=0.5)[:, 0, 0].cpu(),
        lambda: angle_table(0.5),
    ),
    (
        "page of RotaryPositionEmbedding: negative offset",
        lambda: te.RotaryPositionEmbedding(16)(8, offset=-2)[:, 0, 0].cpu(),
        lambda: angle_table(-2.0),
    ),
]


def angle_table(offset: float) -> torch.Tensor:
    angles = (torch.arange(8) + offset)[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    return torch.cat((angles, angles), dim=-1)


def drop_padding(x: torch.Tensor) -> torch.Tensor:
    """Sequence rows, without the rows between sequences."""
    return torch.cat([x[0:3], x[4:6], x[8:12]])


def block(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention [b, s, hidden] from a fused, interleaved projection, causal, before the output projection."""
    qkv = x.unflatten(-1, (HEADS, 3, HIDDEN // HEADS))
    return F.linear(
        attention(*qkv.unbind(-2), band(x.shape[1], -1)), layer.proj.weight, layer.proj.bias
    )


MHA: Any = randomize_parameters(
    te.MultiheadAttention(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        qkv_format="bshd",
        fuse_qkv_params=True,
        device="cpu",
    )
)
LAYER: Any = randomize_parameters(
    te.TransformerLayer(
        HIDDEN,
        96,
        HEADS,
        fuse_qkv_params=True,
        attn_input_format="bshd",
        set_parallel_mode=True,
        ub_tp_comm_overlap=False,
        ub_bulk_wgrad=True,
        layer_type="encoder",
        **OFF,
    )
)
PARALLEL: Any = randomize_parameters(
    te.TransformerLayer(
        HIDDEN,
        96,
        HEADS,
        fuse_qkv_params=True,
        attn_input_format="bshd",
        parallel_attention_mlp=True,
        **OFF,
    )
)
BATCHED = sample(2, 8, HIDDEN, seed=11)


def project_and_attend(layer: Any, x: torch.Tensor) -> torch.Tensor:
    self_attention = layer.self_attention
    normed = layer_norm(self_attention.layernorm_qkv, x)
    return block(self_attention, linear(self_attention.layernorm_qkv, normed))


def feed_forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    m = layer.layernorm_mlp
    inner = F.gelu(F.linear(layer_norm(m, x), m.fc1_weight, m.fc1_bias), approximate="tanh")
    return F.linear(inner, m.fc2_weight, m.fc2_bias)


def transformer() -> torch.Tensor:
    h = BATCHED + project_and_attend(LAYER, BATCHED)
    return h + feed_forward(LAYER, h)


_WHOLE: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
    (
        "physicsnemo: MultiheadAttention(hidden_size=, num_attention_heads=, qkv_format=)",
        lambda: MHA(BATCHED),
        lambda: block(MHA, linear(MHA.qkv, BATCHED)),
    ),
    (
        "megatron-bridge: TransformerLayer.forward by keywords",
        lambda: LAYER(
            BATCHED,
            attention_mask=None,
            encoder_output=None,
            enc_dec_attn_mask=None,
            inference_params=None,
            is_first_microbatch=None,
            checkpoint_core_attention=False,
        ),
        transformer,
    ),
    (
        "Hugging Face: TransformerLayer with an additive causal mask",
        lambda: LAYER(
            BATCHED, attention_mask=band(8, -1)[None, None], self_attn_mask_type="causal"
        ),
        transformer,
    ),
    (
        "page of TransformerLayer: parallel_attention_mlp",
        lambda: PARALLEL(BATCHED),
        lambda: BATCHED + project_and_attend(PARALLEL, BATCHED) + feed_forward(PARALLEL, BATCHED),
    ),
    (
        "page of TransformerLayer: checkpoint_core_attention",
        lambda: LAYER(BATCHED, checkpoint_core_attention=True),
        transformer,
    ),
]

DOCUMENTED = [Documented(*call) for call in (*_LAYERS, *_ATTENTION, *_WHOLE)]
