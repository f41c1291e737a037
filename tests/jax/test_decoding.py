"""Decoding token by token with a cache of keys and values equals one pass over the whole sequence."""

from __future__ import annotations

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import array, draw_unboxed_variables, draw_variables, normal, ones
from transformer_engine.common import recipe

TOKENS, HIDDEN = 6, 16
FIELDS = {
    "relative": {},
    "rope-gqa": {
        "enable_rotary_pos_emb": True,
        "enable_relative_embedding": False,
        "num_gqa_groups": 2,
    },
    "window-transposed": {
        "window_size": (2, 0),
        "transpose_batch_sequence": True,
        "enable_relative_embedding": False,
    },
    "decoder": {"layer_type": te_flax.TransformerLayerType.DECODER},
}


def layer(**fields) -> te_flax.TransformerLayer:
    return te_flax.TransformerLayer(
        hidden_size=HIDDEN,
        mlp_hidden_size=24,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **fields,
    )


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.sampled(2)
def test_steps_equal_the_rows_of_the_full_pass(name):
    model = layer(**FIELDS[name])
    axis = 0 if "transposed" in name else 1
    shape = (TOKENS, 2, HIDDEN) if axis == 0 else (2, TOKENS, HIDDEN)
    x = normal(jax.random.key(0), shape)
    encoded = normal(jax.random.key(1), (2, 3, HIDDEN)) if name == "decoder" else None
    variables = draw_unboxed_variables(
        model, x, encoded, deterministic=True, decode=True, max_decode_length=TOKENS
    )
    rest, cache = flax.core.pop(variables, "cache")
    full = jax.jit(lambda x: model.apply(rest, x, encoded, deterministic=True))(x)
    layouts = {k[-1]: v.shape for k, v in flax.traverse_util.flatten_dict(cache).items()}
    saved = [*shape[:2], 2 if "gqa" in name else 4, 4]
    assert layouts == {"cached_key": tuple(saved), "cached_value": tuple(saved), "cache_index": ()}

    @jax.jit
    def step(cache, token):
        y, changed = model.apply(
            {**rest, "cache": cache},
            token,
            encoded,
            deterministic=True,
            decode=True,
            max_decode_length=TOKENS,
            mutable=["cache"],
        )
        return y, changed["cache"]

    rows = []
    for token in np.split(np.asarray(x), TOKENS, axis):
        y, cache = step(cache, token)
        rows.append(y)
    np.testing.assert_allclose(np.concatenate(rows, axis), full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "window"),
    [("padding_causal", None), ("causal", (3, 0)), ("causal", None), ("causal", (-1, -1))],
)
@pytest.mark.sampled(2)
def test_steps_read_a_mask_exactly_when_the_full_pass_does(kind, window):
    model = te_flax.MultiHeadAttention(
        4, 4, attn_mask_type=kind, window_size=window, fuse_qkv_params=False
    )
    x = normal(jax.random.key(0), (2, TOKENS, HIDDEN))
    mask = jnp.arange(TOKENS) == 1
    mask = mask[None, None, None] & array([True, False])[:, None, None, None]
    variables = draw_unboxed_variables(model, x, x, decode=True, deterministic=True)
    params, cache = {"params": variables["params"]}, variables["cache"]
    apply = jax.jit(lambda x, *masks: model.apply(params, x, x, *masks, deterministic=True)[0])
    full, unmasked = np.asarray(apply(x, mask)), np.asarray(apply(x))
    reads = kind == "padding_causal" or window == (3, 0)
    assert bool(np.abs(full - unmasked).max() > 1e-3) is reads

    @jax.jit
    def step(cache, token):
        argument = params | {"cache": cache}
        (y, _), changed = model.apply(
            argument, token, token, mask, decode=True, deterministic=True, mutable=["cache"]
        )
        return y, changed["cache"]

    rows = []
    for token in np.split(np.asarray(x), TOKENS, 1):
        y, cache = step(cache, token)
        rows.append(y)
    np.testing.assert_allclose(np.concatenate(rows, 1), full, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_quantized_layer_decodes_close_to_the_full_pass():
    model = layer(enable_relative_embedding=False)
    x = normal(jax.random.key(0), (2, TOKENS, HIDDEN))
    with te.autocast(True, recipe.MXFP8BlockScaling()):
        variables = draw_unboxed_variables(model, x, deterministic=True, decode=True)
        full = model.apply({"params": variables["params"]}, x, deterministic=True)
        first, _ = model.apply(
            variables, x[:, :1], deterministic=True, decode=True, mutable=["cache"]
        )
    np.testing.assert_array_equal(first, full[:, :1])


def test_tokens_that_exceed_the_cache_are_rejected_with_the_remedy():
    model = te_flax.MultiHeadAttention(4, 4)
    x = ones((2, 2, HIDDEN))
    variables = draw_variables(model, x, x, decode=True, deterministic=True)
    with pytest.raises(ValueError, match="a step has one token"):
        model.apply(variables, x, x, decode=True, deterministic=True, mutable=["cache"])
    full = {**variables, "cache": variables["cache"] | {"cache_index": jnp.asarray(2)}}
    token = x[:, :1]
    with pytest.raises(ValueError, match="cache of 2 tokens is full"):
        model.apply(full, token, token, decode=True, deterministic=True, mutable=["cache"])
    with pytest.raises(ValueError, match="give the tokens that the cache is made for"):
        layer().init(jax.random.key(0), x, decode=True, deterministic=True)
