"""Sixty random encoder and decoder layers with dropout against a plain Flax layer: outputs and every gradient.

Both layers draw their random numbers from the same modules and streams, so that the same keys drop the same elements.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import normal
from tests.jax.plain_layers import PLAIN, Buckets
from tests.jax.test_module_fields import EXCLUDED, OF_A_LAYER, SIZES, keys
from tests.jax.test_transformer import DECODER, HEADS, data

COUNT = 60
RATES = {
    "hidden_dropout": (0.0, 0.1, 0.4),
    "attention_dropout": (0.0, 0.1, 0.4),
    "intermediate_dropout": (0.0, 0.25),
    "drop_path": (0.0, 0.0, 0.4),
}


def draw_fields(seed: int) -> dict[str, Any]:
    """Random non-default layer fields and random dropout rates."""
    draw = random.Random(seed)
    names = [
        name for name in OF_A_LAYER if name not in (*RATES, "layer_type") and draw.random() < 0.4
    ]
    for excluded in EXCLUDED:
        if excluded <= set(names):
            names.remove(draw.choice(sorted(excluded)))
    fields = {
        name: value
        for argument in names
        for name, value in draw.choice(OF_A_LAYER[argument]).items()
    }
    fields |= {name: draw.choice(rates) for name, rates in RATES.items()}
    return fields | (DECODER if seed % 2 else {}) | SIZES


def test_the_layers_cover_dropout_in_decoders_with_rope_windows_and_drop_path():
    decoders = [draw_fields(seed) for seed in range(COUNT) if "layer_type" in draw_fields(seed)]
    assert len(decoders) == COUNT // 2
    for name in (
        "enable_rotary_pos_emb",
        "window_size",
        "drop_path",
        "attention_dropout",
        "num_gqa_groups",
    ):
        assert sum(bool(fields.get(name)) for fields in decoders) >= 5, name


# Every run compares a decoder with every kind of dropout; test_transformer.py compares encoders.
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed == 3 else [pytest.mark.slow]) for seed in range(COUNT)],
)
def test_a_random_layer_equals_the_reference_layer_with_the_same_keys(seed):
    fields = draw_fields(seed)
    x, encoded, mask, cross_mask = data(fields)
    if fields.get("transpose_batch_sequence"):
        x, encoded = (
            None if array is None else jnp.swapaxes(array, 0, 1) for array in (x, encoded)
        )
    model = te_flax.TransformerLayer(**fields)
    own_biases = {"relative_embedding": Buckets(HEADS)} if "relative_embedding" in fields else {}
    plain = PLAIN[te_flax.TransformerLayer](**(fields | own_biases))
    shapes = jax.eval_shape(lambda: model.init(keys(1), x, encoded, mask, cross_mask))
    params = jax.tree.map(
        lambda leaf: np.float32(0.15) * np.asarray(normal(jax.random.key(leaf.size), leaf.shape)),
        nn.meta.unbox(shapes)["params"],
    )
    dy = normal(jax.random.key(3), x.shape)

    def loss(layer, params, x, encoded):
        y = layer.apply(
            {"params": params}, x, encoded, mask, cross_mask, deterministic=False, rngs=keys(4)
        )
        return (y * dy).sum(), y

    @jax.jit
    def both(params, x, encoded):
        places = (0, 1) if encoded is None else (0, 1, 2)
        return [
            jax.value_and_grad(functools.partial(loss, layer), places, has_aux=True)(
                params, x, encoded
            )
            for layer in (model, plain)
        ]

    ((_, got), actual), ((_, reference), expected_value) = both(params, x, encoded)
    np.testing.assert_allclose(got, reference, atol=1e-4 * float(np.abs(reference).max()), rtol=0)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected_value))
    for (path, gradient), expected in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected_value), strict=True
    ):
        # A key bias shifts all scores for a query equally, so its gradient is zero up to rounding.
        scale = max(float(np.abs(expected).max()), 1e-2 * largest)
        got, reference = np.asarray(gradient) / scale, np.asarray(expected) / scale
        np.testing.assert_allclose(got, reference, atol=2e-4, rtol=0, err_msg=str(path))
