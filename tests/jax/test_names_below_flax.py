"""Public names below Flax that are in no other test: each computes what its documentation states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_engine.jax import ep

TOKENS, EXPERTS, WIDTH = 6, 4, 8


@pytest.fixture
def bootstrapped():
    yield ep.ep_bootstrap(1, 0, EXPERTS, TOKENS, 64, WIDTH)
    ep.ep_finalize()


def routed():
    """Tokens [T, H], two different experts for each, and weights [T, 2]."""
    tokens = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH))
    chosen = jnp.asarray([[0, 1], [1, 3], [0, 3], [3, 1], [1, 0], [3, 0]], jnp.int32)
    return tokens, chosen, jax.random.uniform(jax.random.key(1), (TOKENS, 2))


@pytest.mark.parametrize("alignment", [0, 1, 4])
def test_layer_config_uses_the_experts_of_the_bootstrap(bootstrapped, alignment):
    tokens, chosen, weights = routed()
    cfg = ep.EpLayerConfig(2, alignment)
    rows, of_rows, handle, counts, total = ep.ep_dispatch(cfg, chosen, tokens, weights, 32)
    of_experts = np.bincount(np.asarray(chosen).ravel(), minlength=EXPERTS)
    step = max(alignment, 1)
    padded = -(-of_experts // step) * step
    assert rows.shape == (32, WIDTH) and int(total) == 2 * TOKENS
    np.testing.assert_array_equal(counts, padded)
    starts = np.cumsum(padded) - padded
    for expert in range(EXPERTS):
        (sources, places) = np.nonzero(np.asarray(chosen) == expert)
        end = starts[expert] + len(sources)
        np.testing.assert_array_equal(rows[starts[expert] : end], np.asarray(tokens)[sources])
        np.testing.assert_array_equal(of_rows[starts[expert] : end], np.asarray(weights)[sources, places])
        np.testing.assert_array_equal(rows[end : starts[expert] + padded[expert]], 0)
    y = ep.ep_combine(cfg, handle, counts, rows * of_rows[:, None], TOKENS)
    np.testing.assert_allclose(y, tokens * weights.sum(1, keepdims=True), rtol=1e-5)


def test_layer_config_and_placement_dispatch_the_same_rows(bootstrapped):
    tokens, chosen, weights = routed()
    first = ep.ep_dispatch(ep.EpLayerConfig(top_k=2), chosen, tokens, weights, 7)
    second = ep.ep_dispatch(bootstrapped, chosen, tokens, weights, 7)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert int(first[3].sum()) == 7  # the rows within the capacity


def test_bad_layer_configs_are_rejected():
    tokens, chosen, weights = routed()
    with pytest.raises(RuntimeError, match="call ep_bootstrap first"):
        ep.ep_dispatch(ep.EpLayerConfig(2), chosen, tokens, weights, 8)
    with pytest.raises(TypeError, match="cfg=3 is a int; pass an EpLayerConfig"):
        ep.ep_dispatch(3, chosen, tokens, weights, 8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="top_k=0 is below 1"):
        ep.EpLayerConfig(0)
    with pytest.raises(ValueError, match="dispatch_output_per_expert_alignment=-1 is below 0"):
        ep.EpLayerConfig(1, -1)
    ep.ep_bootstrap(1, 0, EXPERTS, TOKENS, 64, WIDTH)
    try:
        with pytest.raises(ValueError, match=r"topk_idx has 2 columns; EpLayerConfig\(top_k=3\) requires 3"):
            ep.ep_dispatch(ep.EpLayerConfig(3), chosen, tokens, weights, 8)
    finally:
        ep.ep_finalize()
