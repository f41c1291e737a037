"""Fifty typical user mistakes: each error message has the value, the limit and the remedy."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import conversion
from transformer_engine.pytorch.quantization.extra_state import ExtraStateError
from transformer_engine_tools.demo.config import resolve

CURRENT = recipes.Float8CurrentScaling()


def linear(**options: Any) -> te.Linear:
    return te.Linear(64, 32, device="cpu", **options)


def call_linear(recipe: Any, tokens: int = 16) -> torch.Tensor:
    with te.autocast(recipe=recipe):
        return linear()(torch.randn(tokens, 64))


def enter_context(context: Any) -> None:
    with context:
        pass


def attention(
    heads: int = 4,
    size: int = 16,
    key_heads: int = 4,
    dtype: torch.dtype | None = None,
    **options: Any,
):
    """Call an attention with 4 heads of size 16 on 8 tokens in 2 sequences."""
    q = torch.randn(8, 2, heads, size)
    k = torch.randn(8, 2, key_heads, 16, dtype=dtype)
    return te.DotProductAttention(4, 16)(q, k, torch.randn(8, 2, key_heads, 16), **options)


def layer(**options: Any) -> te.TransformerLayer:
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4}
    return te.TransformerLayer(**{**sizes, **options}, device="cpu")


def cache(**options: Any) -> te.InferenceParams:
    return te.InferenceParams(2, 16, num_heads_kv=4, head_dim_k=16, **options)


def load_extra_state(data: bytes) -> None:
    state = {
        **linear().state_dict(),
        "_extra_state": torch.frombuffer(bytearray(data), dtype=torch.uint8),
    }
    linear().load_state_dict(state)


def losses(target: torch.Tensor, **options: Any) -> torch.Tensor:
    return te.parallel_cross_entropy(torch.randn(2, 4, 10), target, **options)


def freqs(positions: int) -> torch.Tensor:
    return te.attention.RotaryPositionEmbedding(16)(positions)


# name: (call, error, words that the message contains: the value, the limit or the choices, the remedy)
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    # Linear layers
    "features below 1": (
        lambda: te.Linear(-1, 32),
        ValueError,
        ("in_features=-1", "below 1", "give a whole number"),
    ),
    "features not whole": (
        lambda: te.Linear(64.5, 32),
        TypeError,
        ("in_features=64.5", "whole number", "give an int"),
    ),
    "input of another width": (
        lambda: linear()(torch.randn(16, 48)),
        ValueError,
        ("[16, 48]", "[.., 64]", "must be"),
    ),
    "input of integers": (
        lambda: linear()(torch.ones(16, 64, dtype=torch.int64)),
        TypeError,
        ("torch.int64", "floating-point", "input.float()"),
    ),
    "input of another dtype": (
        lambda: linear(params_dtype=torch.bfloat16)(torch.randn(16, 64)),
        TypeError,
        ("torch.float32", "weight is torch.bfloat16", "convert one of them"),
    ),
    "array instead of a tensor": (
        lambda: linear()(torch.randn(16, 64).numpy()),
        TypeError,
        ("ndarray of shape [16, 64]", "not a torch.Tensor", "torch.as_tensor"),
    ),
    "parallel mode": (
        lambda: linear(parallel_mode="rows"),
        ValueError,
        ("parallel_mode='rows'", '"row" or "column"', "choose"),
    ),
    "features not divisible by ranks": (
        lambda: te.Linear(64, 30, parallel_mode="column", tp_size=4),
        ValueError,
        ("out_features=30", "tp_size=4", "pad it to 32"),
    ),
    "dtype as text": (
        lambda: linear(params_dtype="bf16"),
        TypeError,
        ("params_dtype='bf16'", "torch.bfloat16", "give"),
    ),
    "initialization as text": (
        lambda: linear(init_method="normal"),
        TypeError,
        ("init_method='normal'", "cannot be called", "give a function"),
    ),
    "device that does not exist": (
        lambda: te.Linear(64, 32, device="gpu"),
        ValueError,
        ("device='gpu'", "not a device of torch", "give 'cuda'"),
    ),
    # Recipes and contexts
    "recipe class instead of an instance": (
        lambda: call_linear(recipes.Float8CurrentScaling),
        TypeError,
        ("Float8CurrentScaling", "is a type", "pass an instance"),
    ),
    "recipe as text": (
        lambda: call_linear("fp8"),
        TypeError,
        ("recipe='fp8'", "transformer_engine.common.recipe", "pass an instance"),
    ),
    "recipe as first argument": (
        lambda: te.autocast(CURRENT),
        TypeError,
        ("Float8CurrentScaling", "first argument is a bool", "pass the recipe as a keyword"),
    ),
    "format as text": (
        lambda: recipes.DelayedScaling(fp8_format="E4M3"),
        ValueError,
        ("fp8_format='E4M3'", "must be", "Format.E4M3 or Format.HYBRID"),
    ),
    "E5M2 for all tensors": (
        lambda: recipes.DelayedScaling(fp8_format=recipes.Format.E5M2),
        ValueError,
        ("Format.E5M2", "must be", "Format.HYBRID"),
    ),
    "algorithm of the maximum": (
        lambda: recipes.DelayedScaling(amax_compute_algo="mean"),
        ValueError,
        ("amax_compute_algo='mean'", "'max' or 'most_recent'", "pass a callable"),
    ),
    "history below 0": (
        lambda: recipes.DelayedScaling(amax_history_len=-1),
        ValueError,
        ("amax_history_len=-1", "below 0", "give a whole number"),
    ),
    "history as text": (
        lambda: recipes.DelayedScaling(amax_history_len="many"),
        TypeError,
        ("amax_history_len='many'", "whole number", "give an int"),
    ),
    "history of length 0": (
        lambda: call_linear(recipes.DelayedScaling(amax_history_len=0)),
        ValueError,
        ("amax_history_len=0", "at least 1", "set it"),
    ),
    "format that the machine lacks": (
        lambda: not_emulated(),
        RuntimeError,
        ("MXFP8BlockScaling", "no CUDA device", "TE_EMULATE=1"),
    ),
    "partial block": (
        lambda: te.MXFP8Quantizer(te.DType.kFloat8E4M3)(torch.randn(32, 20)),
        ValueError,
        ("20", "multiple of 32", "pad it to 32"),
    ),
    # Norms and feed-forward layers
    "normalization": (
        lambda: te.LayerNormLinear(64, 32, normalization="layernorm", device="cpu"),
        ValueError,
        ("normalization='layernorm'", "LayerNorm, RMSNorm", "choose"),
    ),
    "activation": (
        lambda: te.LayerNormMLP(64, 128, activation="swish", device="cpu"),
        ValueError,
        ("activation='swish'", "silu, swiglu", "choose"),
    ),
    "epsilon below 0": (
        lambda: te.LayerNorm(64, eps=-1, device="cpu"),
        ValueError,
        ("eps=-1", "below 0", "give a small number"),
    ),
    "input of another size": (
        lambda: te.LayerNorm(64, device="cpu")(torch.randn(4, 32)),
        ValueError,
        ("(4, 32)", "(64,)", "reshape the input"),
    ),
    # Attention
    "mask type": (
        lambda: attention(attn_mask_type="causl"),
        ValueError,
        ("attn_mask_type='causl'", "causal, padding_causal", "choose"),
    ),
    "padding without lengths": (
        lambda: attention(attn_mask_type="padding"),
        ValueError,
        ("are None", "padding mask needs", "cu_seqlens_q, or attention_mask"),
    ),
    "arbitrary mask is missing": (
        lambda: attention(attn_mask_type="arbitrary"),
        ValueError,
        ("it is None", "attn_mask_type='arbitrary'", "needs attention_mask"),
    ),
    "layout": (
        lambda: te.DotProductAttention(4, 16, qkv_format="bhsd"),
        ValueError,
        ("qkv_format='bhsd'", "sbhd, bshd, thd", "choose"),
    ),
    "width of a head": (
        lambda: attention(size=32),
        ValueError,
        ("[8, 2, 4, 32]", "(4, 16)", "reshape it"),
    ),
    "dtypes of query and key": (
        lambda: attention(dtype=torch.float16),
        ValueError,
        ("key_layer is torch.float16", "query_layer torch.float32", "convert one of them"),
    ),
    "dropout above 1": (
        lambda: te.DotProductAttention(4, 16, attention_dropout=1.5),
        ValueError,
        ("attention_dropout=1.5", "[0, 1]", "give the share"),
    ),
    "window of one number": (
        lambda: te.DotProductAttention(4, 16, window_size=5),
        TypeError,
        ("window_size=5", "two numbers", "give (left, right)"),
    ),
    "bias is missing": (
        lambda: attention(core_attention_bias_type="post_scale_bias"),
        ValueError,
        ("post_scale_bias", "None", "match the two"),
    ),
    "context parallelism": (
        lambda: te.DotProductAttention(4, 16, cp_comm_type="ring"),
        ValueError,
        ("cp_comm_type='ring'", "p2p, all_gather, a2a", "choose"),
    ),
    # Transformer layers
    "groups of heads": (
        lambda: layer(num_gqa_groups=3),
        ValueError,
        ("num_gqa_groups=3", "num_attention_heads=4", "choose a divisor"),
    ),
    "type of a layer": (
        lambda: layer(layer_type="dec"),
        ValueError,
        ("layer_type='dec'", "encoder, decoder", "choose"),
    ),
    "hidden states of another size": (
        lambda: layer()(torch.randn(8, 2, 32)),
        ValueError,
        ("[8, 2, 32]", "hidden_size=64", "needs 3 axes"),
    ),
    "too few angles": (
        lambda: layer()(torch.randn(8, 2, 64), rotary_pos_emb=freqs(4)),
        ValueError,
        ("sequence length 8", "4 positions", "at least 8 positions"),
    ),
    "odd width of rotation": (
        lambda: te.attention.RotaryPositionEmbedding(15),
        ValueError,
        ("15", "odd", "choose an even number"),
    ),
    # Experts
    "rows of experts": (
        lambda: te.GroupedLinear(2, 64, 32, device="cpu")(torch.randn(16, 64), [8, 9]),
        ValueError,
        ("m_splits=[8, 9]", "16 rows", "must be 2 numbers"),
    ),
    "routing map of other tokens": (
        lambda: te.moe_permute(torch.randn(16, 64), torch.zeros(8, 2, dtype=torch.int32)),
        ValueError,
        ("[8, 2]", "16 tokens", "give [16, experts]"),
    ),
    "more experts per token than experts": (
        lambda: te.router.fused_topk_with_score_function(
            torch.randn(8, 4), 9, False, None, None, None, "softmax", None
        ),
        ValueError,
        ("topk=9", "4 experts", "choose fewer"),
    ),
    # Losses, optimizers, caches
    "target outside of the vocabulary": (
        lambda: losses(torch.full((2, 4), 10)),
        ValueError,
        ("target 10", "10 ids", "give 0 .. 9"),
    ),
    "targets of another shape": (
        lambda: losses(torch.zeros(2, 5, dtype=torch.long)),
        ValueError,
        ("[2, 5]", "[2, 4]", "give one id"),
    ),
    "targets that are not ids": (
        lambda: losses(torch.zeros(2, 4)),
        TypeError,
        ("torch.float32", "ids of the vocabulary", "target.long()"),
    ),
    "AMSGrad": (
        lambda: te.optimizers.FusedAdam(linear().parameters(), amsgrad=True),
        RuntimeError,
        ("AMSGrad", "FusedAdam has no", "use torch.optim.AdamW"),
    ),
    "too many tokens for a cache": (
        lambda: cache().pre_step({0: 17}),
        ValueError,
        ("17 tokens", "max_ctx_len=16", "raise the limit"),
    ),
    "too many sequences for a cache": (
        lambda: cache().pre_step({0: 1, 1: 1, 2: 1}),
        ValueError,
        ("3 sequences", "max_batch_size=2", "leave some for a later step"),
    ),
    "too few pages": (
        lambda: cache(is_paged=True, page_size=4, total_num_pages=1).pre_step({0: 9}),
        ValueError,
        ("3 pages", "total_num_pages=1", "give more pages"),
    ),
    # Checkpoints and tools
    "damaged extra state": (
        lambda: load_extra_state(b"\x01\x02\x03"),
        ExtraStateError,
        ("extra state", "not a readable pickle", "load an undamaged checkpoint"),
    ),
    "extra state with code": (
        lambda: load_extra_state(pickle.dumps(print)),
        ExtraStateError,
        ("builtins.print", "only recipes, plain containers and tensors", "load that part yourself"),
    ),
    "folder without a checkpoint": (
        lambda: conversion.load_model("absent"),
        ValueError,
        ("absent", "there is no folder", "give one that holds a checkpoint"),
    ),
    "name of a backend": (
        lambda: enter_context(te.use_backend(gemm="cutlass")),
        ValueError,
        ("'cutlass'", "reference", "choose one of"),
    ),
    "class instead of a module": (
        lambda: te.explain(te.Linear, torch.randn(2, 64)),
        TypeError,
        ("class Linear", "cannot be constructed", "construct the module first"),
    ),
    "misspelled name": (
        lambda: te.Lineer,
        AttributeError,
        ("'Lineer'", "has no", "did you mean 'Linear'?"),
    ),
    "text in a Sequential": (
        lambda: te.ops.Sequential("relu"),
        TypeError,
        ("'relu' is a str", "torch.nn.Module", "te.ops.ReLU()"),
    ),
    "width in te train": (
        lambda: resolve("cpu", {"hidden": 100}),
        ValueError,
        ("--hidden 100", "multiple of 32", "try 96"),
    ),
}


def not_emulated() -> None:
    with te.emulate(False):
        call_linear(recipes.MXFP8BlockScaling())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_message_has_the_value_the_limit_and_the_remedy(mistake: str):
    if mistake == "format that the machine lacks" and torch.cuda.is_available():
        pytest.skip("a GPU may have the format")
    call, error, words = MISTAKES[mistake]
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} missing in: {message}"
    assert len(words) == 3


def test_there_are_fifty_mistakes():
    assert len(MISTAKES) >= 50


@pytest.mark.parametrize(
    ("features", "dtype", "message"),
    [
        ("64", "jax", "'64' must be a whole number or several; give an int or a tuple of ints"),
        (
            8,
            "torch",
            "inputs is a Tensor of shape [4, 4] and torch.float32, which JAX does not read",
        ),
    ],
)
def test_a_flax_module_reports_a_wrong_size_and_a_tensor_of_torch(
    features: Any, dtype: str, message: str
):
    pytest.importorskip("flax")
    import jax

    import transformer_engine.jax.flax as te_flax

    inputs: Any = torch.ones(4, 4) if dtype == "torch" else jax.numpy.ones((4, 4))
    with pytest.raises(TypeError) as raised:
        te_flax.DenseGeneral(features=features).init(jax.random.key(0), inputs)
    assert str(raised.value).startswith(message)
