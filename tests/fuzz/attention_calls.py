"""Bad attention calls: sequences, masks, rotations, biases and caches that do not fit the other tensors."""

from __future__ import annotations

from typing import Any

import torch

import transformer_engine.pytorch as te
from tests.fuzz.bad_values import NOT_A_TENSOR, Call, Made
from tests.fuzz.forward_calls import RECIPES, make_forward_call, tensor

TOKENS = 12
OFF: dict[str, Any] = {"attention_dropout": 0.0, "device": "cpu"}


def bounds(*ends: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ends, dtype=dtype)


def masked(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bool)


# Instead of bounds(0, 5, 12) for twelve packed tokens, at most seven per sequence.
BOUNDS = (
    *NOT_A_TENSOR,
    [0, 5, 12],
    bounds(0, 5, 12, dtype=torch.int64),
    bounds(0, 5, 12).float(),
    bounds(0, 5, 12).bool(),
    bounds(0, 5, 12).view(1, 3),
    bounds(),
    bounds(0, 8, 5),
    bounds(2, 8, 12),
    bounds(0, 6, 13),
    bounds(0, 4, 12),
    bounds(-1, 5, 12),
    bounds(0, -3, 4),
    torch.empty(3, dtype=torch.int32, device="meta"),
)
# Instead of bounds(0, 6, 12) where the sequences begin, which have five and six tokens.
STARTS = (
    *NOT_A_TENSOR,
    bounds(0, 6, 12, dtype=torch.int64),
    bounds(0, 4, 12),
    bounds(0, 12, 6),
    bounds(1, 6, 12),
    bounds(0, 6, 14),
    bounds(0, 6),
    bounds(0, 6, 9, 12),
)
LONGEST = (2.5, "7", -1, 3, [7])
UNPACKED_MASKS = ("no_mask", "causal", "arbitrary", "causal_bottom_right")
# Instead of masked(2, 1, 1, 4) for two sequences with four tokens.
PADDING = (
    *NOT_A_TENSOR,
    masked(2, 1, 1, 5),
    masked(3, 1, 1, 4),
    masked(4),
    masked(),
    (masked(2, 1, 1, 4),) * 3,
    (masked(2, 1, 1, 4), 3),
)
DENSE_BOUNDS = (
    *BOUNDS[:9],
    bounds(0, 4, 2),
    bounds(1, 2, 4),
    bounds(0, 2, 9),
    bounds(0, 2),
    bounds(0, 1, 2, 3),
)
# Instead of angles [4, 1, 1, 8] for heads with eight features.
ANGLES = (
    tensor(3, 1, 1, 8),
    tensor(4, 1, 1, 16),
    tensor(4, 1, 1, 8, dtype=torch.int64),
    (tensor(4, 1, 1, 8),) * 3,
    (tensor(4, 1, 1, 8), tensor(3, 1, 1, 8)),
    (tensor(4, 1, 1, 8), None),
    tensor(0, 1, 1, 8),
)
# Instead of a bias [1, 4, 4, 4] for four heads and four tokens.
BIASES = (
    *NOT_A_TENSOR,
    None,
    tensor(4, 4),
    tensor(1, 4, 4, 5),
    tensor(1, 3, 4, 4),
    tensor(3, 4, 4, 4),
    tensor(1, 4, 4, 4, dtype=torch.int64),
    tensor(1, 4, 4, 4, device="meta"),
)
SLOPES = (
    *NOT_A_TENSOR,
    tensor(3),
    tensor(4, dtype=torch.int64),
    tensor(3, 4),
    tensor(),
    tensor(2, 2, 4),
    tensor(4, device="meta"),
)


def attention_calls() -> list[Call]:
    """Bad calls to attention alone and to the layers that contain it."""
    calls = [*_packed(), *_padded(), *_cached(), _pre_step()]
    for name in ("high precision", "delayed"):
        calls += _layers(name)
    return calls


def _packed() -> list[Call]:
    def layer() -> te.DotProductAttention:
        return te.DotProductAttention(4, 16, qkv_format="thd", attn_mask_type="padding_causal")

    qkv = {name: tensor(TOKENS, 4, 16) for name in ("query_layer", "key_layer", "value_layer")}
    good = {**qkv, "cu_seqlens_q": bounds(0, 5, 12), "max_seqlen_q": 7, "max_seqlen_kv": 7}
    both = {**good, "cu_seqlens_kv": bounds(0, 5, 12)}
    gaps = {**good, "cu_seqlens_q": bounds(0, 5, 11), "cu_seqlens_q_padded": bounds(0, 6, 12)}
    return [
        make_forward_call(
            "DotProductAttention.forward, packed sequences",
            layer,
            good,
            {
                "cu_seqlens_q": (*BOUNDS, None),
                "max_seqlen_q": LONGEST,
                "max_seqlen_kv": LONGEST,
                "attn_mask_type": UNPACKED_MASKS,
                "qkv_format": ("sbhd", "bshd"),
            },
        ),
        make_forward_call(
            "DotProductAttention.forward, packed keys",
            layer,
            both,
            {"cu_seqlens_kv": (*BOUNDS, bounds(0, 12), bounds(0, 4, 8, 12))},
        ),
        make_forward_call(
            "DotProductAttention.forward, gaps", layer, gaps, {"cu_seqlens_q_padded": STARTS}
        ),
    ]


def _padded() -> list[Call]:
    def layer() -> te.DotProductAttention:
        return te.DotProductAttention(4, 16)

    qkv = {name: tensor(4, 2, 4, 16) for name in ("query_layer", "key_layer", "value_layer")}
    padding = {**qkv, "attn_mask_type": "padding"}
    arbitrary = (
        *NOT_A_TENSOR,
        None,
        tensor(1, 1, 4, 4),
        masked(3, 1, 4, 4),
        masked(1, 1, 4, 5),
        masked(1, 1, 1, 4, 4),
    )
    return [
        make_forward_call(
            "DotProductAttention.forward, padding mask",
            layer,
            {**padding, "attention_mask": masked(2, 1, 1, 4)},
            {"attention_mask": (*PADDING, None)},
        ),
        make_forward_call(
            "DotProductAttention.forward, lengths",
            layer,
            {**padding, "cu_seqlens_q": bounds(0, 3, 5)},
            {"cu_seqlens_q": (*DENSE_BOUNDS, None), "cu_seqlens_kv": DENSE_BOUNDS},
        ),
        make_forward_call(
            "DotProductAttention.forward, arbitrary mask",
            layer,
            {**qkv, "attn_mask_type": "arbitrary", "attention_mask": masked(1, 1, 4, 4)},
            {"attention_mask": arbitrary},
        ),
    ]


def _cached() -> list[Call]:
    calls = []
    for paged in (False, True):

        def make(paged: bool = paged) -> Made:
            cache = te.InferenceParams(2, 16, 4, 16, torch.float32, is_paged=paged, device="cpu")
            cache.allocate_memory(1)
            cache.pre_step({0: 2, 1: 2})
            layer = te.DotProductAttention(4, 16, layer_number=1, qkv_format="bshd")
            new = {
                name: tensor(2, 2, 4, 16) for name in ("query_layer", "key_layer", "value_layer")
            }
            return Made(layer, {**new, "inference_params": cache}, [layer, cache])

        shapes = (tensor(3, 2, 4, 16), tensor(2, 1, 4, 16), tensor(2, 2, 3, 16), tensor(2, 2, 4, 8),
                  tensor(2, 2, 4, 16, dtype=torch.float64), tensor(2, 2, 4, 16, device="meta"),
                  *NOT_A_TENSOR)  # fmt: skip
        no_room = te.InferenceParams(2, 16, 2, 16, torch.float32, device="cpu")
        other = te.InferenceParams(2, 16, 4, 16, torch.bfloat16, device="cpu")
        bad = {
            "query_layer": (shapes[0], *shapes[2:]),
            "key_layer": shapes,
            "value_layer": shapes,
            "attn_mask_type": ("arbitrary", "causl", 3),
            "qkv_format": ("sbh", 3, "thd"),
            "inference_params": (3, {}, no_room, other),
            "num_splits": (-1, "2"),
        }
        calls.append(
            Call(f"DotProductAttention.forward, cache, {paged=}", make, bad, stateful=True),
        )
    return calls


def _pre_step() -> Call:
    def make() -> Made:
        cache = te.InferenceParams(2, 16, 4, 16, torch.float32, max_ctx_len=8, device="cpu")
        return Made(cache.pre_step, {"step_dict": {0: 2, 1: 2}}, [cache])

    steps = (
        3,
        "ab",
        None,
        [2, 2],
        {0: 1, 1: 1, 2: 1},
        {0: -1},
        {0: 9},
        {0: 1.5},
        {0: "2"},
        {0: None},
        {0: [2]},
        {0: 2, 1: 2.5},
    )
    return Call("InferenceParams.pre_step", make, {"step_dict": steps}, stateful=True)


def _layers(name: str) -> list[Call]:
    x, under = {"hidden_states": tensor(4, 2, 32)}, RECIPES[name]
    biased = {
        **x,
        "core_attention_bias_type": "post_scale_bias",
        "core_attention_bias": tensor(1, 4, 4, 4),
    }
    sloped = {**x, "core_attention_bias_type": "alibi", "alibi_slopes": tensor(4)}
    transposed = {**x, "rotary_pos_emb": tensor(4, 1, 1, 8)}
    calls = []
    for kind, mask, layer in (
        (
            "MultiheadAttention",
            "attn_mask_type",
            lambda **o: te.MultiheadAttention(32, 4, **OFF, **o),
        ),
        (
            "TransformerLayer",
            "self_attn_mask_type",
            lambda **o: te.TransformerLayer(32, 32, 4, hidden_dropout=0.0, **OFF, **o),
        ),
    ):
        padding = {**x, mask: "padding"}
        calls += [
            make_forward_call(
                f"{kind}.forward, bias, {name}",
                layer,
                biased,
                {"core_attention_bias": BIASES},
                under=under,
            ),
            make_forward_call(
                f"{kind}.forward, slopes, {name}",
                layer,
                sloped,
                {"alibi_slopes": SLOPES},
                under=under,
            ),
            make_forward_call(
                f"{kind}.forward, rotation, {name}",
                layer,
                transposed,
                {"rotary_pos_emb": ANGLES},
                under=under,
            ),
            make_forward_call(
                f"{kind}.forward, padding mask, {name}",
                layer,
                {**padding, "attention_mask": masked(2, 1, 1, 4)},
                {"attention_mask": (*PADDING, None)},
                under=under,
            ),
            make_forward_call(
                f"{kind}.forward, lengths, {name}",
                layer,
                {**padding, "cu_seqlens_q": bounds(0, 3, 5)},
                {"cu_seqlens_q": (*DENSE_BOUNDS, None)},
                under=under,
            ),
        ]
    packed = {
        "hidden_states": tensor(TOKENS, 32),
        "cu_seqlens_q": bounds(0, 5, 12),
        "max_seqlen_q": 7,
        "max_seqlen_kv": 7,
        "rotary_pos_emb": tensor(7, 1, 1, 8),
    }
    calls.append(
        make_forward_call(
            f"MultiheadAttention.forward, packed sequences, {name}",
            lambda: te.MultiheadAttention(
                32, 4, qkv_format="thd", attn_mask_type="padding_causal", **OFF
            ),
            packed,
            {
                "cu_seqlens_q": (*BOUNDS, None),
                "max_seqlen_q": LONGEST,
                "attn_mask_type": UNPACKED_MASKS,
                "rotary_pos_emb": (tensor(6, 1, 1, 8), *ANGLES[1:3]),
                "hidden_states": (tensor(TOKENS, 31), tensor(TOKENS, 1, 32), tensor(11, 32)),
            },
            under=under,
        )
    )
    return calls
