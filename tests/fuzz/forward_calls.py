"""Bad calls to constructed layers: their forward passes, with and without recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

import transformer_engine.pytorch as te
from tests.fuzz.bad_values import FLAG, NAME, NAN, NOT_A_TENSOR, WINDOW, WORD, Call, Made
from transformer_engine.common import recipe
from transformer_engine.pytorch.attention.qk_norm import L2Normalization
from transformer_engine.pytorch.module.softmax import FusedScaleMaskSoftmax
from transformer_engine.pytorch.transformer import DropPath

RECIPES: dict[str, recipe.Recipe | None] = {
    "high precision": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
ATTENTION_RECIPE = recipe.DelayedScaling(amax_history_len=4, fp8_dpa=True)


def tensor(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Values that do not depend on the random state."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return (torch.arange(count, device=device) % 7).reshape(shape).to(dtype)


def _dtypes(*shape: int) -> tuple[torch.Tensor, ...]:
    kinds = (torch.int64, torch.bool, torch.complex64, torch.float64, torch.uint8)
    return tuple(tensor(*shape, dtype=kind) for kind in kinds)


WRONG_KIND = (*NOT_A_TENSOR, None)
ROWS = (
    *WRONG_KIND,
    *_dtypes(32, 32),
    tensor(32, 31),
    tensor(32, 64),
    tensor(),
    tensor(32, 0),
    tensor(32, 32, dtype=torch.bfloat16),
    tensor(32, 32, device="meta"),
)
SWITCHES = {"is_first_microbatch": FLAG}
RESULTS = {"fp8_output": FLAG, "fp8_grad": FLAG}


def make_forward_call(
    name: str,
    layer: Callable[[], torch.nn.Module],
    arguments: dict[str, Any],
    *bad: Mapping[str, Sequence[Any]],
    under: recipe.Recipe | None = None,
) -> Call:
    def make() -> Made:
        module = layer()
        return Made(module, arguments, [module])

    joint = {argument: values for part in bad for argument, values in part.items()}
    context = nullcontext if under is None else lambda: te.autocast(recipe=under)
    return Call(name, make, joint, context, stateful=True)


def forward_calls() -> list[Call]:
    """Calls to every layer; layers with matrix products under every recipe."""
    calls = [*_norms(), *_dot_product_attention(), *_inference(), *_composites()]
    for name, under in RECIPES.items():
        calls += _products(name, under)
    return calls


def _products(name: str, under: recipe.Recipe | None) -> list[Call]:
    x = {"inp": tensor(32, 32)}
    splits = (
        None,
        3,
        [32],
        [16, 15],
        [-1, 33],
        [16.5, 15.5],
        "22",
        torch.tensor([16.5, 15.5]),
        [16, 16, 0],
        torch.tensor([[16, 16]]),
        {"a": 32},
    )
    return [
        make_forward_call(
            f"Linear, {name}",
            lambda: te.Linear(32, 32, device="cpu"),
            x,
            {"inp": ROWS},
            SWITCHES,
            RESULTS,
            under=under,
        ),
        make_forward_call(
            f"LayerNormLinear, {name}",
            lambda: te.LayerNormLinear(32, 32, device="cpu"),
            x,
            {"inp": ROWS},
            SWITCHES,
            RESULTS,
            under=under,
        ),
        make_forward_call(
            f"LayerNormMLP, {name}",
            lambda: te.LayerNormMLP(32, 32, device="cpu"),
            x,
            {"inp": ROWS},
            SWITCHES,
            under=under,
        ),
        make_forward_call(
            f"GroupedLinear, {name}",
            lambda: te.GroupedLinear(2, 32, 32, device="cpu"),
            {**x, "m_splits": [16, 16]},
            {"inp": (*ROWS, tensor(32, 32).to_sparse()), "m_splits": splits},
            SWITCHES,
            under=under,
        ),
    ]


def _norms() -> list[Call]:
    inputs = (
        *WRONG_KIND,
        tensor(4, 32, dtype=torch.int64),
        tensor(4, 32, dtype=torch.bool),
        tensor(4, 31),
        tensor(4, 32, dtype=torch.complex64),
        tensor(),
        tensor(4, 0),
        tensor(4, 32, device="meta"),
    )
    names = {"LayerNorm": te.LayerNorm, "RMSNorm": te.RMSNorm}
    scores = (*WRONG_KIND, tensor(4), tensor(1, 2, 4, 4, dtype=torch.int64))
    masks = (*NOT_A_TENSOR, tensor(3, 3).bool(), tensor(1, 1, 5, 4).bool())
    return [
        *(
            make_forward_call(
                f"{name}.forward",
                lambda kind=kind: kind(32, device="cpu"),
                {"input": tensor(4, 32)},
                {"input": inputs},
            )
            for name, kind in names.items()
        ),
        make_forward_call(
            "L2Normalization.forward",
            L2Normalization,
            {"x": tensor(4, 32)},
            {"x": (*WRONG_KIND, tensor(4, 32, dtype=torch.int64))},
        ),
        make_forward_call(
            "DropPath.forward",
            lambda: DropPath(0.5),
            {"hidden_state": tensor(4, 4, 32)},
            {"hidden_state": (*WRONG_KIND, tensor(4), tensor(4, 4, 32, dtype=torch.int64))},
        ),
        make_forward_call(
            "FusedScaleMaskSoftmax.forward",
            lambda: FusedScaleMaskSoftmax(torch.add),
            {"inp": tensor(1, 2, 4, 4), "mask": None, "attn_mask_type": "causal"},
            {
                "inp": scores,
                "mask": masks,
                "attn_mask_type": (*NAME, None),
                "scale": ("1", NAN, [1.0]),
            },
        ),
        make_forward_call(
            "RotaryPositionEmbedding.forward",
            lambda: te.RotaryPositionEmbedding(16),
            {"max_seq_len": 8},
            {"max_seq_len": (-1, 2.5, "8", None), "offset": (NAN, "8", None)},
        ),
    ]


HEADS = tensor(4, 2, 4, 16)  # sbhd
BIAS = tensor(1, 4, 4, 4)
QUERIES = (*NOT_A_TENSOR, None, tensor(4, 2, 3, 16), tensor(4, 2, 4, 15), tensor(2, 4, 16), tensor(),
           tensor(4, 2, 4, 16, dtype=torch.int64), tensor(4, 2, 4, 16, dtype=torch.bool),
           tensor(4, 2, 4, 16, device="meta"))  # fmt: skip
CALL = {
    "attn_mask_type": NAME,
    "window_size": (*WINDOW[:-1], (-3, 5)),
    "bottom_right_diagonal": FLAG,
    "checkpoint_core_attention": FLAG,
    "core_attention_bias_type": (*NAME, None, "post_scale_bias", "pre_scale_bias"),
    "inference_params": (3, "cache", {}),
    "max_seqlen_q": (2.5, "8"),
    "max_seqlen_kv": (2.5, "8"),
    "pad_between_seqs": FLAG,
    "softcap": (-1.0, NAN, float("inf"), "big", [1.0], True),
}


def _dot_product_attention() -> list[Call]:
    def layer() -> te.DotProductAttention:
        return te.DotProductAttention(4, 16)

    qkv = {"query_layer": HEADS, "key_layer": HEADS.clone(), "value_layer": HEADS.clone()}
    packed = tensor(4, 2, 3, 4, 16)
    biased = {**qkv, "core_attention_bias_type": "post_scale_bias", "core_attention_bias": BIAS}
    sloped = {**qkv, "core_attention_bias_type": "alibi", "alibi_slopes": tensor(4)}
    local = {
        **dict.fromkeys(qkv, QUERIES),
        "qkv_format": NAME,
        "fp8_output": (*FLAG, True),
        "num_splits": (-1, 2.5, "2"),
        "bf16_backward": FLAG,
        "score_mod": (3, "alibi"),
        "score_mod_bprop": (print,),
        "qkv_layer": (packed,),
        "kv_layer": (tensor(4, 2, 2, 4, 16),),
    }
    calls = [
        make_forward_call("DotProductAttention.forward", layer, qkv, local, CALL),
        make_forward_call("DotProductAttention.forward, fp8", layer, qkv,
                 {name: values for name, values in {**local, **CALL}.items() if name != "fp8_output"},
                 under=ATTENTION_RECIPE),
        make_forward_call("DotProductAttention.forward, bias", layer, biased,
                 {"core_attention_bias": (*NOT_A_TENSOR, None, tensor(4, 4), tensor(1, 4, 4, 5), tensor(1, 3, 4, 4),
                                          tensor(1, 4, 4, 4, dtype=torch.int64),
                                          tensor(1, 4, 4, 4, dtype=torch.bool), tensor(1, 4, 4, 4, device="meta"))}),
        make_forward_call("DotProductAttention.forward, slopes", layer, sloped,
                 {"alibi_slopes": (*NOT_A_TENSOR, tensor(3), tensor(4, dtype=torch.int64), tensor(3, 4), tensor(),
                                   tensor(4, dtype=torch.bool), tensor(4, device="meta"))}),
        make_forward_call("DotProductAttention.forward, packed", layer, {"qkv_layer": packed},
                 {"qkv_layer": (*NOT_A_TENSOR, tensor(4, 2, 2, 4, 16), tensor(4, 16), tensor()),
                  "query_layer": (HEADS,), "key_layer": (HEADS,), "value_layer": (HEADS,),
                  "kv_layer": (tensor(4, 2, 2, 4, 16),), "qkv_interleave_dim": (0, 5, "3", -1, None, 2.5)}),
        make_forward_call("DotProductAttention.forward, kv packed", layer,
                 {"query_layer": HEADS, "kv_layer": tensor(4, 2, 2, 4, 16)},
                 {"kv_layer": (*NOT_A_TENSOR, tensor(4, 2, 3, 4, 16), tensor()), "key_layer": (HEADS,),
                  "query_layer": (*NOT_A_TENSOR, None), "value_layer": (HEADS,)}),
    ]  # fmt: skip
    return calls


def _inference() -> list[Call]:
    def make() -> Made:
        cache = te.InferenceParams(2, 8, 4, 16, torch.float32)
        cache.pre_step({0: 2, 1: 2})
        keys = tensor(2, 2, 4, 16)
        arguments = {"layer_number": 1, "new_k": keys, "new_v": keys.clone(), "qkv_format": "bshd"}
        cache.allocate_memory(1)
        return Made(cache.step, arguments, [cache])

    def allocation() -> Made:
        cache = te.InferenceParams(2, 8, 4, 16, torch.float32)
        return Made(cache.allocate_memory, {"layer_number": 1}, [cache])

    tensors = (
        *NOT_A_TENSOR,
        None,
        tensor(2, 2, 3, 16),
        tensor(2, 2, 4, 15),
        tensor(3, 2, 4, 16),
        tensor(),
    )
    return [
        Call(
            "InferenceParams.step",
            make,
            {
                "new_k": tensors,
                "new_v": tensors,
                "qkv_format": (*NAME, None),
                "layer_number": (2.5, "1", None),
            },
        ),
        Call("InferenceParams.allocate_memory", allocation, {"layer_number": (2.5, "1", None)}),
    ]


def _composites() -> list[Call]:
    x = tensor(4, 2, 32)
    inputs = (
        *WRONG_KIND,
        tensor(4, 2, 31),
        tensor(),
        *_dtypes(4, 2, 32),
        tensor(4, 2, 32, device="meta"),
    )
    shared = {
        **CALL,
        "is_first_microbatch": FLAG,
        "rotary_pos_emb": (3, "rope", [1.0], (tensor(4, 1, 1, 8),)),
    }
    layer = {
        **shared,
        "self_attn_mask_type": shared["attn_mask_type"],
        "enc_dec_attn_mask_type": (WORD, 3),
        "enc_dec_window_size": (5, "ab"),
    }
    del layer["attn_mask_type"]
    off = {"attention_dropout": 0.0, "device": "cpu"}
    calls = []
    for name, under in (("high precision", None), ("delayed", RECIPES["delayed"])):
        calls += [
            make_forward_call(
                f"MultiheadAttention.forward, {name}",
                lambda: te.MultiheadAttention(32, 4, **off),
                {"hidden_states": x},
                shared,
                {"hidden_states": inputs},
                under=under,
            ),
            make_forward_call(
                f"MultiheadAttention.forward, cross, {name}",
                lambda: te.MultiheadAttention(32, 4, attention_type="cross", **off),
                {"hidden_states": x, "encoder_output": x.clone()},
                {"encoder_output": inputs, "hidden_states": inputs},
                under=under,
            ),
            make_forward_call(
                f"TransformerLayer.forward, {name}",
                lambda: te.TransformerLayer(32, 32, 4, hidden_dropout=0.0, **off),
                {"hidden_states": x},
                layer,
                {"hidden_states": inputs},
                under=under,
            ),
            make_forward_call(
                f"TransformerLayer.forward, decoder, {name}",
                lambda: te.TransformerLayer(
                    32, 32, 4, layer_type="decoder", hidden_dropout=0.0, **off
                ),
                {"hidden_states": x, "encoder_output": x.clone()},
                {"encoder_output": inputs, "hidden_states": inputs},
                under=under,
            ),
        ]
    return calls
