"""A function between scores and softmax in three contracts: values, gradients, and the settings that it excludes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import array, draw_variables, normal, ones, values_and_gradients
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
    q, k, v, dy = normal(jax.random.key(0), (4, 2, 6, 4, 8))
    return q, k[:, :, :2], v[:, :, :2], dy


def attend(q, k, v, **options):
    fixed = {
        "bias": None,
        "sequence_descriptor": None,
        "seed": None,
        "attn_bias_type": AttnBiasType.NO_BIAS,
        "attn_mask_type": AttnMaskType.NO_MASK,
        "qkv_layout": QKVLayout.BSHD_BSHD_BSHD,
        "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX,
        "scaling_factor": 0.3,
        "dropout_probability": 0.0,
        "is_training": True,
    }
    return fused_attn((q, k, v), **(fixed | options))


def cap_scores(scores, tensors):
    """Soft-capped scores with a slope per head, as in several models."""
    return tensors["cap"] * jnp.tanh(scores / tensors["cap"]) + tensors["slope"]


def tensors():
    places = jnp.arange(6.0)
    slopes = -jnp.abs(places[:, None] - places)[None] * jnp.linspace(0.1, 0.4, 4)[:, None, None]
    return {"cap": jnp.asarray(2.0), "slope": slopes}


def plain(q, k, v, tensors):
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    scores = cap_scores(0.3 * jnp.einsum("bqhd,bkhd->bhqk", q, k), tensors)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def test_a_function_of_scores_and_all_its_gradients():
    q, k, v, dy = data()

    def ours(q, k, v, tensors):
        return attend(q, k, v, score_mod=cap_scores, score_mod_tensors=tensors)

    actual = values_and_gradients(ours, dy, q, k, v, tensors())
    reference = values_and_gradients(plain, dy, q, k, v, tensors())
    for got, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_custom_score_gradient_replaces_jax_differentiation():
    q, k, v, dy = data()

    def halve(gradient, scores, factor):
        return factor * gradient * (1 - jnp.tanh(scores / 2.0) ** 2)

    def gradients(factor):
        return values_and_gradients(
            lambda q: attend(
                q,
                k,
                v,
                score_mod=cap_scores,
                score_mod_tensors=tensors(),
                score_mod_bprop=halve,
                score_mod_bprop_tensors=factor,
            ),
            dy,
            q,
        )[1]

    expected = values_and_gradients(lambda q: plain(q, k, v, tensors()), dy, q)[1]
    np.testing.assert_allclose(gradients(1.0), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients(0.5), expected / 2, rtol=1e-4, atol=1e-5)


def test_modules_pass_on_a_score_mod():
    q, k, v, _ = data()
    module = te_flax.DotProductAttention(
        8, 4, 2, attn_mask_type="no_mask", scale_factor=0.3, score_mod=cap_scores
    )
    apply = functools.partial(module.apply, {}, deterministic=True)
    y = jax.jit(apply)(q, k, v, score_mod_tensors=tensors())
    np.testing.assert_allclose(y, plain(q, k, v, tensors()), rtol=1e-4, atol=1e-5)
    layer = te_flax.TransformerLayer(
        hidden_size=16,
        mlp_hidden_size=16,
        num_attention_heads=4,
        self_attn_mask_type="no_mask",
        enable_relative_embedding=False,
        score_mod=cap_scores,
    )
    x = ones((2, 6, 16))
    draw_variables(layer, x, deterministic=True, score_mod_tensors=tensors())


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"attn_mask_type": AttnMaskType.CAUSAL_MASK}, ValueError, "set it to NO_MASK"),
        (
            {"softmax_type": AttnSoftmaxType.OFF_BY_ONE_SOFTMAX},
            ValueError,
            "set it to VANILLA_SOFTMAX",
        ),
        ({"window_size": (2, 0)}, ValueError, "window_size"),
        ({"dropout_probability": 0.5, "seed": jax.random.key}, ValueError, "dropout_probability"),
        ({"score_mod": None, "score_mod_bprop": cap_scores}, ValueError, "give both"),
        ({"score_mod": 3}, TypeError, "score_mod"),
        ({"score_mod": lambda a, b, c, d: a}, TypeError, "score_mod has 4 required parameters"),
        (
            {"score_mod_bprop": lambda gradient, score, b, h, q, kv: gradient},
            TypeError,
            r"give a function of \(gradient, scores, tensors\)",
        ),
        (
            {"score_mod": lambda graph, score, tensors: graph.matmul(score, score)},
            NotImplementedError,
            "graph.matmul",
        ),
        (
            {"score_mod": lambda graph, score, tensors: score, "score_mod_tensors": ones(())},
            TypeError,
            "is not a mapping",
        ),
        (
            {
                "score_mod": lambda graph, score, tensors: score,
                "score_mod_tensors": {"slope": ones((4,))},
            },
            ValueError,
            r"score_mod_tensors\['slope'\] is \[4\]; give one element, or 4 dimensions",
        ),
    ],
)
def test_incompatible_settings_are_rejected(options, error, sentence):
    q, k, v, _ = data()
    if "seed" in options:
        options = options | {"seed": jax.random.key(0)}
    with pytest.raises(error, match=sentence):
        attend(q, k, v, **({"score_mod": cap_scores} | options))


def softcap_graph(graph, score, tensors):
    """The original's contract: a softcap, a slope per head, and causality, in operations of a graph."""
    capped = graph.mul(graph.tanh(graph.div(score, tensors["cap"])), tensors["cap"])
    query, key = graph.gen_index(input=score, axis=2), graph.gen_index(score, 3, name="key")
    sloped = graph.add(capped, graph.mul(a=tensors["slope"], b=graph.sub(key, query)))
    return graph.binary_select(sloped, tensors["hidden"], graph.cmp_le(input=key, comparison=query))


def causal_slope_scores(score, b, h, q, kv, *, cap, slope, hidden):
    sloped = cap * jnp.tanh(score / cap) + slope[b * 0, h, 0, 0] * (kv - q)
    return jnp.where(kv <= q, sloped, hidden)


def float64_oracle(q, k, v, dy, cap, slope):
    """Output and gradients for q, k, v, cap and slope in float64, by formulas."""
    q, k, v, dy, cap, slope = (np.asarray(x, np.float64) for x in (q, k, v, dy, cap, slope))
    groups = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    distance = np.arange(k.shape[1]) - np.arange(q.shape[1])[:, None]
    ratio = 0.3 * np.einsum("bqhd,bkhd->bhqk", q, k) / cap
    scores = np.where(distance <= 0, cap * np.tanh(ratio) + slope * distance, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    dweights = np.einsum("bqhd,bkhd->bhqk", dy, v)
    dmodified = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True))
    slant = 1.0 - np.tanh(ratio) ** 2
    dscores = 0.3 * dmodified * slant
    per_group = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(axis=3)  # noqa: E731
    return (
        np.einsum("bhqk,bkhd->bqhd", weights, v),
        np.einsum("bhqk,bkhd->bqhd", dscores, k),
        per_group(np.einsum("bhqk,bqhd->bkhd", dscores, q)),
        per_group(np.einsum("bhqk,bqhd->bkhd", weights, dy)),
        (dmodified * (np.tanh(ratio) - ratio * slant)).sum().reshape(cap.shape),
        (dmodified * distance).sum(axis=(0, 2, 3), keepdims=True),
    )


@pytest.mark.parametrize("function", [softcap_graph, causal_slope_scores])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.04)])
def test_graphs_and_functions_of_indices_equal_float64(function, dtype, tolerance):
    q, k, v, dy = (x[:, :n].astype(dtype) for x, n in zip(data(), (3, 5, 5, 3), strict=True))
    slope, hidden = jnp.linspace(0.1, 0.4, 4).reshape(1, 4, 1, 1), jnp.full((1, 1, 1, 1), -1e9)

    def ours(q, k, v, cap, slope):
        named = {"cap": cap, "slope": slope, "hidden": hidden}
        return attend(q, k, v, score_mod=function, score_mod_tensors=named)

    cap = jnp.full((1, 1, 1, 1), 0.7)
    actual = values_and_gradients(ours, dy, q, k, v, cap, slope)
    for got, expected in zip(actual, float64_oracle(q, k, v, dy, cap, slope), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float64),
            expected,
            rtol=tolerance,
            atol=tolerance * abs(expected).max(),
        )


class CappedGraph:
    """A softcap as a graph, whose gradient reads an array that the function computed."""

    ratio = None

    def forward(self, graph, score, tensors):
        self.ratio = graph.div(score, tensors["cap"])
        return graph.mul(graph.tanh(self.ratio), tensors["cap"])

    def backward(self, graph, gradient, tensors):
        return graph.mul(graph.tanh_backward(loss=gradient, input=self.ratio), tensors["factor"])


def softcap_by_index(score, b, h, q, kv, *, cap):
    return cap * jnp.tanh(score / cap)


def softcap_by_index_gradient(gradient, score, b, h, q, kv, factor):
    return factor * gradient * (1.0 - jnp.tanh(score / 0.7) ** 2)


GRAPH = CappedGraph()


@pytest.mark.parametrize(
    ("function", "gradient"),
    [(GRAPH.forward, GRAPH.backward), (softcap_by_index, softcap_by_index_gradient)],
)
def test_user_score_gradients_replace_jax_differentiation(function, gradient):
    q, k, v, dy = data()

    def ours(q, k, v, cap, factor):
        return attend(
            q,
            k,
            v,
            score_mod=function,
            score_mod_tensors={"cap": cap},
            score_mod_bprop=gradient,
            score_mod_bprop_tensors={"factor": factor},
        )

    actual = values_and_gradients(ours, dy, q, k, v, jnp.asarray(0.7), jnp.asarray(0.5))
    reference = values_and_gradients(
        lambda q, k, v, cap: attend(
            q, k, v, score_mod=softcap_by_index, score_mod_tensors={"cap": cap}
        ),
        dy,
        q,
        k,
        v,
        jnp.asarray(0.7),
    )
    for got, expected, factor in zip(actual, reference[:4], (1.0, 0.5, 0.5, 1.0), strict=False):
        np.testing.assert_allclose(got, factor * expected, rtol=1e-4, atol=1e-6)
    # with a user-defined gradient, a score_mod's arrays have no gradient
    assert actual[4] == actual[5] == 0.0


def test_the_former_packed_call_equals_the_current_call():
    q, k, v, _ = data()
    lengths, offsets = array([[2, 3], [4, -1]]), array([[0, 2, 5], [0, 4, -1]])
    kinds = (AttnBiasType.NO_BIAS, AttnMaskType.PADDING_CAUSAL_MASK, QKVLayout.THD_THD_THD)
    rest = (*kinds, AttnSoftmaxType.VANILLA_SOFTMAX, 0.3, 0.0, True, 2)
    old = fused_attn_thd((q, k, v), None, lengths, lengths, offsets, offsets, None, *rest)
    descriptor = SequenceDescriptor.from_seqlens_and_offsets(lengths, offsets)
    np.testing.assert_array_equal(old, fused_attn((q, k, v), None, descriptor, None, *rest))
    with pytest.raises(ValueError, match="call fused_attn"):
        fused_attn_thd(
            (q, k, v),
            None,
            lengths,
            lengths,
            offsets,
            offsets,
            None,
            kinds[0],
            kinds[1],
            QKVLayout.BSHD_BSHD_BSHD,
            *rest[3:],
        )
