"""A function between scores and softmax: its values, its gradients, and the settings that it excludes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import values_and_gradients
from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    SequenceDescriptor,
    fused_attn,
    fused_attn_thd,
)


def data():
    q, k, v, dy = jax.random.normal(jax.random.key(0), (4, 2, 6, 4, 8))
    return q, k[:, :, :2], v[:, :, :2], dy


def attend(q, k, v, **options):
    fixed = {
        "bias": None, "sequence_descriptor": None, "seed": None, "attn_bias_type": AttnBiasType.NO_BIAS,
        "attn_mask_type": AttnMaskType.NO_MASK, "qkv_layout": QKVLayout.BSHD_BSHD_BSHD,
        "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX, "scaling_factor": 0.3, "dropout_probability": 0.0,
        "is_training": True,
    }  # fmt: skip
    return fused_attn((q, k, v), **(fixed | options))


def capped(scores, tensors):
    """Soft-capped scores with a slope a head, as several models have them."""
    return tensors["cap"] * jnp.tanh(scores / tensors["cap"]) + tensors["slope"]


def tensors():
    places = jnp.arange(6.0)
    slopes = -jnp.abs(places[:, None] - places)[None] * jnp.linspace(0.1, 0.4, 4)[:, None, None]
    return {"cap": jnp.asarray(2.0), "slope": slopes}


def plain(q, k, v, tensors):
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    scores = capped(0.3 * jnp.einsum("bqhd,bkhd->bhqk", q, k), tensors)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def test_a_function_of_scores_and_all_its_gradients():
    q, k, v, dy = data()

    def ours(q, k, v, tensors):
        return attend(q, k, v, score_mod=capped, score_mod_tensors=tensors)

    found = values_and_gradients(ours, dy, q, k, v, tensors())
    want = values_and_gradients(plain, dy, q, k, v, tensors())
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_gradient_of_ones_own_takes_the_place_of_jaxs():
    q, k, v, dy = data()

    def halved(gradient, scores, factor):
        return factor * gradient * (1 - jnp.tanh(scores / 2.0) ** 2)

    def gradients(factor):
        return values_and_gradients(
            lambda q: attend(
                q, k, v, score_mod=capped, score_mod_tensors=tensors(), score_mod_bprop=halved,
                score_mod_bprop_tensors=factor,
            ), dy, q,
        )[1]  # fmt: skip

    want = values_and_gradients(lambda q: plain(q, k, v, tensors()), dy, q)[1]
    np.testing.assert_allclose(gradients(1.0), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients(0.5), want / 2, rtol=1e-4, atol=1e-5)


def test_modules_hand_it_on():
    q, k, v, _ = data()
    module = te_flax.DotProductAttention(
        8, 4, 2, attn_mask_type="no_mask", scale_factor=0.3, score_mod=capped
    )
    y = module.apply({}, q, k, v, deterministic=True, score_mod_tensors=tensors())
    np.testing.assert_allclose(y, plain(q, k, v, tensors()), rtol=1e-4, atol=1e-5)
    layer = te_flax.TransformerLayer(
        hidden_size=16, mlp_hidden_size=16, num_attention_heads=4, self_attn_mask_type="no_mask",
        enable_relative_embedding=False, score_mod=capped,
    )  # fmt: skip
    x = jnp.ones((2, 6, 16))
    layer.init(jax.random.key(0), x, deterministic=True, score_mod_tensors=tensors())


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"attn_mask_type": AttnMaskType.CAUSAL_MASK}, ValueError, "set it to NO_MASK"),
        ({"softmax_type": AttnSoftmaxType.OFF_BY_ONE_SOFTMAX}, ValueError, "set it to VANILLA_SOFTMAX"),
        ({"window_size": (2, 0)}, ValueError, "window_size"),
        ({"dropout_probability": 0.5, "seed": jax.random.key}, ValueError, "dropout_probability"),
        ({"score_mod": None, "score_mod_bprop": capped}, ValueError, "give both"),
        ({"score_mod": 3}, TypeError, "score_mod"),
        ({"score_mod": lambda graph, score, tensors: score}, NotImplementedError, "jnp operations"),
    ],
)
def test_what_does_not_go_with_it_is_rejected(options, error, sentence):
    q, k, v, _ = data()
    if "seed" in options:
        options = options | {"seed": jax.random.key(0)}
    with pytest.raises(error, match=sentence):
        attend(q, k, v, **({"score_mod": capped} | options))


def test_the_older_call_of_packed_rows_is_the_newer_one():
    q, k, v, _ = data()
    lengths, offsets = jnp.asarray([[2, 3], [4, -1]]), jnp.asarray([[0, 2, 5], [0, 4, -1]])
    kinds = (AttnBiasType.NO_BIAS, AttnMaskType.PADDING_CAUSAL_MASK, QKVLayout.THD_THD_THD)
    rest = (*kinds, AttnSoftmaxType.VANILLA_SOFTMAX, 0.3, 0.0, True, 2)
    old = fused_attn_thd((q, k, v), None, lengths, lengths, offsets, offsets, None, *rest)
    descriptor = SequenceDescriptor.from_seqlens_and_offsets(lengths, offsets)
    np.testing.assert_array_equal(old, fused_attn((q, k, v), None, descriptor, None, *rest))
    with pytest.raises(ValueError, match="call fused_attn"):
        fused_attn_thd(
            (q, k, v), None, lengths, lengths, offsets, offsets, None, kinds[0], kinds[1],
            QKVLayout.BSHD_BSHD_BSHD, *rest[3:],
        )  # fmt: skip
