"""Router, permutation and mixtures of experts against loops over tokens in NumPy."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import (
    array,
    draw_unboxed_variables,
    normal,
    ones,
    values_and_gradients,
    zeros,
)
from transformer_engine.common import recipe
from transformer_engine.common.formats import ceil_div, round_up
from transformer_engine.jax import ep, permutation, router
from transformer_engine.jax.cpp_extensions.topk import topk
from transformer_engine.jax.moe import get_moe_recv_capacity_per_rank, moe

T, E, H, F = 24, 8, 16, 12


def logits(seed=0):
    return normal(jax.random.key(seed), (T, E))


def plain_weights(values, k, function="softmax", pre=False, groups=None, bias=None, scale=1.0):
    """One token after the other."""
    out = np.zeros_like(values)
    for t, row in enumerate(values):
        soft = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        scores = 1 / (1 + np.exp(-row)) if function == "sigmoid" else soft if pre else row
        judged = scores + (0 if bias is None else bias)
        if groups is not None:
            count, best = groups
            parts = judged.reshape(count, -1)
            strength = np.sort(parts, axis=1)[:, -(k // best) :].sum(axis=1)
            saved = np.argsort(-strength)[:best]
            judged = np.where(np.isin(np.arange(E) // parts.shape[1], saved), judged, -np.inf)
        chosen = np.argsort(-judged, kind="stable")[:k]
        weights = scores[chosen]
        if function == "softmax" and not pre:
            weights = np.exp(weights) / np.exp(weights).sum()
        if function == "sigmoid" and k > 1:
            weights = weights / weights.sum()
        out[t, chosen] = weights * scale
    return out


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (2, {}),
        (2, {"use_pre_softmax": True, "scaling_factor": 1.5}),
        (1, {"score_function": "sigmoid"}),
        (3, {"score_function": router.ScoreFunction.SIGMOID, "expert_bias": True}),
        (4, {"num_groups": 4, "group_topk": 2, "score_function": "sigmoid"}),
        (2, {"num_groups": 2, "group_topk": 1}),
    ],
)
def test_the_router_matches_a_loop_over_tokens(k, options):
    values = logits()
    bias = jnp.linspace(-1, 1, E) if options.get("expert_bias") else None
    options = options | {"expert_bias": bias}
    probs, chosen = router.fused_topk_with_score_function(values, k, **options)
    sigmoid = options.get("score_function") in ("sigmoid", router.ScoreFunction.SIGMOID)
    groups = (options["num_groups"], options["group_topk"]) if "num_groups" in options else None
    expected = plain_weights(
        np.asarray(values),
        k,
        "sigmoid" if sigmoid else "softmax",
        options.get("use_pre_softmax", False),
        groups,
        None if bias is None else np.asarray(bias),
        options.get("scaling_factor", 1.0),
    )
    np.testing.assert_allclose(probs, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(chosen, expected > 0)
    packed = router.fused_topk_with_score_function(
        values, k, **options, routing_map_format="bitmap_u8"
    )[1]
    np.testing.assert_array_equal(packed, np.packbits(expected > 0, axis=1, bitorder="little"))


def test_router_gradient_matches_finite_differences():
    values, dy = np.asarray(logits(), np.float64)[:3], np.asarray(logits(1))[:3]
    for function in ("softmax", "sigmoid"):

        def loss(x, function=function):
            return (
                router.fused_topk_with_score_function(x, 2, score_function=function)[0] * dy
            ).sum()

        gradient = np.asarray(jax.grad(loss)(jnp.asarray(values, jnp.float32)))
        for t, e in ((0, 1), (1, 3), (2, 7)):
            step = np.zeros_like(values)
            step[t, e] = 1e-6
            ahead, distance = (
                (plain_weights(x, 2, function) * dy).sum() for x in (values + step, values - step)
            )
            assert abs(gradient[t, e] - (ahead - distance) / 2e-6) < 1e-4


def test_the_balancing_loss_matches_its_equation():
    scores, plain = router.fused_topk_with_score_function(logits(), 2, compute_aux_scores=True)
    np.testing.assert_allclose(scores, jax.nn.softmax(logits()), rtol=1e-6)
    counts = plain.sum(axis=0)
    loss = router.fused_moe_aux_loss(scores, counts, 2, 0.1)
    expected = (
        E * 0.1 / (2 * T * T) * sum(float(counts[e]) * float(scores[:, e].sum()) for e in range(E))
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("align", [None, 8])
def test_tokens_are_sorted_by_expert_and_come_back(align):
    x = np.asarray(normal(jax.random.key(2), (T, H)))
    probs, chosen = map(np.asarray, router.fused_topk_with_score_function(logits(), 2))

    @jax.jit
    def there_and_back(x, chosen, probs):
        dispatched = permutation.token_dispatch(x, chosen, 2 * T, probs, align)
        rows, _, row_id_map, pads, _ = dispatched
        combined = (
            permutation.token_combine(rows, row_id_map, merged, pads) for merged in (None, probs)
        )
        return dispatched, *combined

    result, doubled, merged = jax.tree.map(np.asarray, there_and_back(x, chosen, probs))
    rows, weights, row_id_map, _, sizes = result
    begin = 0
    for e, size in enumerate(sizes):
        tokens = np.flatnonzero(chosen[:, e])
        assert size == (len(tokens) if align is None else -(-len(tokens) // align) * align)
        np.testing.assert_array_equal(rows[begin : begin + len(tokens)], x[tokens])
        np.testing.assert_array_equal(weights[begin : begin + len(tokens)], probs[tokens, e])
        assert not rows[begin + len(tokens) : begin + size].any()
        begin += size
    assert row_id_map.shape == (T, 2 * E + 1)
    np.testing.assert_allclose(doubled, 2 * x, rtol=1e-6)
    np.testing.assert_allclose(merged, x * probs.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_permutation_gradients_return_to_their_tokens():
    x, dy = normal(jax.random.key(2), (2, T, H))
    probs, chosen = router.fused_topk_with_score_function(logits(), 2)

    def there_and_back(x, probs):
        rows, weights, row_id_map, pads, _ = permutation.token_dispatch(x, chosen, 2 * T, probs, 4)
        return permutation.token_combine(rows * weights[:, None], row_id_map, None, pads)

    actual = values_and_gradients(there_and_back, dy, x, probs)
    reference = values_and_gradients(
        lambda x, p: x * (p * chosen).sum(axis=1, keepdims=True), dy, x, probs
    )
    for got, expected in zip(actual, reference, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_rows_beyond_the_buffer_are_dropped():
    x = ones((T, H))
    _, chosen = router.fused_topk_with_score_function(logits(), 2)
    rows, _, row_id_map, _, _ = permutation.token_dispatch(x, chosen, 10)
    assert rows.shape == (10, H)
    assert int(row_id_map[:, -1].sum()) == 10
    assert float(permutation.token_combine(rows, row_id_map).sum()) == 10 * H


@pytest.mark.parametrize("align", [0, 4])
@pytest.mark.parametrize("roll", [None, 3])
def test_the_plain_permutation_sorts_and_restores(align, roll):
    x = normal(jax.random.key(2), (T, H))
    probs, chosen = router.fused_topk_with_score_function(logits(), 2)
    picked, weights = permutation.routing_map_to_selected_experts(probs, chosen, 2)
    rows, state, sizes = permutation.pure_jax_token_dispatch(x, picked, E, 2, align, roll)
    first = 0 if roll is None else roll
    count = int(np.asarray(chosen)[:, first].sum())
    np.testing.assert_array_equal(rows[:count], x[np.flatnonzero(np.asarray(chosen)[:, first])])
    assert align == 0 or not (np.asarray(sizes) % align).any()
    y = permutation.pure_jax_token_combine(rows, state, weights, 2)
    np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)


def test_chunks_are_reordered():
    x = jnp.arange(7.0)[:, None]
    rows, goes_to = permutation.sort_chunks_by_index(x, array([2, 1, 3]), array([2, 0, 1]))
    np.testing.assert_array_equal(rows[:, 0], [3, 4, 5, 0, 1, 2, 6])
    np.testing.assert_array_equal(rows[goes_to], x)


def test_ragged_offsets_move_every_row_there_and_back():
    """The four numbers per shard, followed in NumPy."""
    counts = np.random.default_rng(0).integers(0, 4, (4, 8))
    sent = counts.reshape(4, 4, 2).sum(-1)
    contents = [[(s, i) for i in range(sent[s].sum())] for s in range(4)]
    buffers = [[None] * sent[:, d].sum() for d in range(4)]

    def play(compute, source, target):
        for s in range(4):
            begins, sizes, lands, _ = (np.asarray(v) for v in compute(jnp.asarray(counts), s, 4))
            for d in range(4):
                for i in range(sizes[d]):
                    target[d][lands[d] + i] = source[s][begins[d] + i]

    play(permutation.compute_ragged_all_to_all_params, contents, buffers)
    assert all(row is not None for buffer in buffers for row in buffer)
    back = [[None] * len(rows) for rows in contents]
    play(permutation.compute_reverse_ragged_all_to_all_params, buffers, back)
    assert back == contents
    arrived = jnp.arange(float(sent[:, 1].sum()))[:, None]
    rows, sizes, goes_to = permutation.local_permute_after_a2a(arrived, jnp.asarray(counts), 1, 4)
    np.testing.assert_array_equal(sizes, counts[:, 2:4].sum(0))
    np.testing.assert_array_equal(permutation.local_unpermute_before_a2a(rows, goes_to), arrived)


def parameters():
    keys = jax.random.split(jax.random.key(5), 8)
    shapes = {"gate_kernel": (H, E), "wi_0": (E, H, F), "wi_1": (E, H, F), "wo": (E, F, H)}
    return {n: 0.3 * normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=False)}


def plain_moe(p, x, k=2):
    """Every expert for every token, weighted."""
    weights, _ = router.fused_topk_with_score_function(x @ p["gate_kernel"], k)
    hidden = jax.nn.silu(jnp.einsum("th,ehf->tef", x, p["wi_0"])) * jnp.einsum(
        "th,ehf->tef", x, p["wi_1"]
    )
    return jnp.einsum("te,tef,efh->th", weights, hidden, p["wo"])


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_the_mixture_equals_the_weighted_sum_over_experts(early, halves):
    x, dy = 2 * normal(jax.random.key(2), (2, 2, T // 2, H))
    params = parameters()

    def ours(params, x):
        kernels = params["wi_0"], params["wi_1"]
        kernels = kernels if halves else (jnp.concatenate(kernels, axis=-1),)
        return moe(
            x,
            params["gate_kernel"],
            *kernels,
            params["wo"],
            num_experts=E,
            num_experts_per_tok=2,
            apply_topk_weights_early=early,
        )[0]

    actual = values_and_gradients(ours, dy, params, x)
    reference = values_and_gradients(
        lambda p, x: plain_moe(p, x.reshape(-1, H)).reshape(x.shape), dy, params, x
    )
    for got, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_the_block_has_one_state_per_product_and_expert():
    x = normal(jax.random.key(0), (2, T // 2, H))
    model = te_flax._MoEBlock(
        num_experts=E,
        intermediate_size=F,
        use_ffn_bias=True,
        use_expert_routing_bias=True,
        score_function="sigmoid",
        aux_loss_coeff=0.01,
    )
    with te.autocast(True, recipe.DelayedScaling(amax_history_len=4)):
        variables = draw_unboxed_variables(model, x)
        y, loss, received = jax.jit(model.apply)(variables, x)
    assert jax.tree.map(jnp.shape, variables["params"]) == {
        "gate_kernel": (H, E),
        "wi": (E, H, 2 * F),
        "wo": (E, F, H),
        "wi_bias": (E, 2 * F),
        "wo_bias": (E, H),
        "expert_bias": (E,),
    }
    assert variables["fp8_metas"]["kernel_1_scale"].shape == (E,)
    plain, _, _ = jax.jit(model.apply)({"params": variables["params"]}, x)
    assert float(jnp.linalg.norm(y - plain) / jnp.linalg.norm(plain)) < 0.1
    assert loss.shape == () and int(received) == 2 * T


def test_halves_of_the_first_kernels_are_accepted_by_keyword_and_with_biases():
    x, p = normal(jax.random.key(2), (2, T // 2, H)), parameters()
    biases = {f"wi_{half}_bias": normal(jax.random.key(half), (E, F)) for half in (0, 1)}
    options = {"num_experts": E, "num_experts_per_tok": 2}
    fused = {
        "wi": jnp.concatenate((p["wi_0"], p["wi_1"]), axis=-1),
        "wi_bias": jnp.concatenate((biases["wi_0_bias"], biases["wi_1_bias"]), axis=-1),
    }
    expected, _, _ = moe(x, p["gate_kernel"], wo=p["wo"], **fused, **options)
    kernels = {name: p[name] for name in ("wi_0", "wi_1", "wo")}
    for got in (
        moe(x, p["gate_kernel"], **kernels, **biases, **options),
        moe(x, p["gate_kernel"], p["wi_0"], p["wi_1"], p["wo"], *biases.values(), **options),
        moe(x, p["gate_kernel"], p["wi_0"], p["wi_1"], wo=p["wo"], **biases, **options),
    ):
        np.testing.assert_allclose(got[0], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="one of wi_0 and wi_1"):
        moe(x, p["gate_kernel"], wi_0=p["wi_0"], wo=p["wo"], **options)
    with pytest.raises(TypeError, match="each once"):
        moe(x, p["gate_kernel"], wi_0=p["wi_0"], wi_1=p["wi_1"], wo=p["wo"], **fused, **options)
    with pytest.raises(ValueError, match="recv_capacity_per_rank=100 is not a multiple of 128"):
        moe(x, p["gate_kernel"], wo=p["wo"], **fused, **options, recv_capacity_per_rank=100)


def test_a_block_reads_variables_of_both_halves():
    x = normal(jax.random.key(0), (2, T // 2, H))
    model = te_flax._MoEBlock(num_experts=E, intermediate_size=F)
    variables = draw_unboxed_variables(model, x)
    expected, _, _ = jax.jit(model.apply)(variables, x)
    params = dict(variables["params"])
    params["wi_0"], params["wi_1"] = jnp.split(params.pop("wi"), 2, axis=-1)
    y, _, _ = jax.jit(model.apply)({"params": params}, x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_a_recipe_of_the_block_quantizes_its_products():
    x = normal(jax.random.key(0), (2, T // 2, H))
    model = te_flax._MoEBlock(num_experts=E, intermediate_size=F)
    variables = draw_unboxed_variables(model, x)
    with te.autocast(True, recipe.MXFP8BlockScaling()):
        expected, _, _ = jax.jit(model.apply)(variables, x)
    local = te_flax._MoEBlock(
        num_experts=E, intermediate_size=F, quantization_recipe=recipe.MXFP8BlockScaling()
    )
    np.testing.assert_array_equal(jax.jit(local.apply)(variables, x)[0], expected)
    assert (np.asarray(jax.jit(model.apply)(variables, x)[0]) != np.asarray(expected)).any()


@pytest.mark.parametrize("factor", [None, 1.0, 1.3, 100.0])
def test_the_capacity_of_a_receive_buffer_holds_every_routing_of_a_balanced_load(factor):
    random = np.random.default_rng(0)
    for _ in range(200):
        ep_size = int(random.choice((1, 2, 4)))
        experts, tokens = ep_size * int(random.integers(1, 5)), int(random.integers(1, 300))
        k, alignment = int(random.integers(1, experts + 1)), int(random.choice((1, 16, 128)))
        local, everywhere = experts // ep_size, ep_size * tokens
        result = get_moe_recv_capacity_per_rank(
            num_experts=experts,
            num_experts_per_tok=k,
            max_tokens_per_rank=tokens,
            ep_size=ep_size,
            recv_capacity_factor=factor,
            alignment=alignment,
        )
        # The experts of one device share the rows that it receives in every way that fills them unevenly.
        sent = everywhere * min(k, local)
        worst = 0
        for _ in range(20):
            counts = np.minimum(
                random.multinomial(sent, random.dirichlet(np.ones(local))), everywhere
            )
            worst = max(worst, sum(round_up(int(count), alignment) for count in counts))
        assert result % alignment == 0 and result <= local * round_up(everywhere, alignment)
        if factor in (None, 100.0):
            assert worst <= result
        else:
            balanced = local * round_up(ceil_div(tokens * k, local), alignment)
            assert result >= min(balanced, sent)
    with pytest.raises(ValueError, match=r"recv_capacity_factor=0.5 is below 1"):
        get_moe_recv_capacity_per_rank(
            num_experts=8,
            num_experts_per_tok=2,
            max_tokens_per_rank=4,
            ep_size=2,
            recv_capacity_factor=0.5,
        )


def test_scores_of_square_roots_of_softplus_agree_with_float64():
    x = 4 * normal(jax.random.key(1), (T, E))
    x = x.at[0].set(-200.0)  # softplus underflows
    bias = normal(jax.random.key(2), (E,))
    exact = np.sqrt(np.logaddexp(0.0, np.asarray(x, np.float64)))
    for argument in (None, bias):
        weights, chosen = router.fused_topk_with_score_function(
            x, 2, score_function="sqrtsoftplus", expert_bias=argument
        )
        judged = exact if argument is None else exact + np.asarray(argument, np.float64)
        best = np.argsort(-judged, axis=-1, kind="stable")[1:, :2]
        expected = np.zeros(x.shape, bool)
        np.put_along_axis(expected[1:], best, True, axis=-1)
        np.testing.assert_array_equal(np.asarray(chosen)[1:], expected[1:])
        saved = np.where(expected, exact, 0.0)[1:]
        np.testing.assert_allclose(
            weights[1:], saved / saved.sum(axis=-1, keepdims=True), rtol=1e-5
        )
    scores, _ = router.fused_topk_with_score_function(
        x, 2, score_function=router.ScoreFunction.SQRTSOFTPLUS, compute_aux_scores=True
    )
    np.testing.assert_allclose(
        scores[1:], (exact / exact.sum(axis=-1, keepdims=True))[1:], rtol=1e-5
    )

    def score(logits):
        return router.fused_topk_with_score_function(logits, E, score_function="sqrtsoftplus")[0][
            :, 0
        ].sum()

    gradient = np.asarray(jax.jit(jax.grad(score))(x), np.float64)
    assert np.isfinite(gradient).all()
    slope = 1.0 / (1.0 + np.exp(-np.asarray(x, np.float64))) / (2.0 * exact)
    total = exact.sum(axis=-1, keepdims=True)
    first = np.eye(E)[0]
    reference = slope * (first * total - exact[:, :1]) / total**2
    np.testing.assert_allclose(gradient[1:], reference[1:], rtol=1e-4, atol=1e-6)


def test_the_routing_of_a_dispatch_is_prepared_without_the_tokens():
    cfg = ep.EpLayerConfig(2, 16)
    capacity = 2 * T + 16 * E
    placed = ep.ep_bootstrap(
        world_size=None,
        rank=None,
        num_experts=E,
        max_tokens_per_rank=T,
        recv_capacity_per_rank=capacity,
        hidden_dim=H,
    )
    assert placed.devices == jax.device_count()
    probs, chosen = router.fused_topk_with_score_function(logits(), 2)
    picked, weights = permutation.routing_map_to_selected_experts(probs, chosen, 2)
    x = normal(jax.random.key(0), (T, H))
    if placed.devices == 1:
        counts, total, handle = jax.jit(lambda picked: ep.ep_prepare(cfg, picked))(picked)
        rows, _, of_dispatch, *rest = ep.ep_dispatch(cfg, picked, x, weights, capacity)
        for got, expected in zip(
            jax.tree.leaves((handle, counts, total)), [*of_dispatch, *rest], strict=True
        ):
            np.testing.assert_array_equal(got, expected)
        assert ep.ep_handle_mem_size(cfg) == sum(leaf.nbytes for leaf in handle)
        np.testing.assert_allclose(ep.ep_combine(cfg, handle, counts, rows, T), 2 * x, rtol=1e-6)
    with pytest.raises(ValueError, match=r"EpLayerConfig\(top_k=2\) requires 2"):
        ep.ep_prepare(cfg, picked[:, :1])
    ep.ep_finalize()
    with pytest.raises(RuntimeError, match="call ep_bootstrap or set_ep_config first"):
        ep.ep_prepare(cfg, picked)


def test_combined_tokens_have_the_shape_of_the_batch():
    x = normal(jax.random.key(0), (T, H))
    probs, chosen = router.fused_topk_with_score_function(logits(), 2)
    picked, weights = permutation.routing_map_to_selected_experts(probs, chosen, 2)
    rows, state, _ = permutation.pure_jax_token_dispatch(x, picked, E, 2)
    flat = permutation.pure_jax_token_combine(rows, state, weights, 2)
    shaped = permutation.pure_jax_token_combine(rows, state, weights, 2, 2, T // 2)
    np.testing.assert_array_equal(shaped, flat.reshape(2, T // 2, H))
    for sizes in ((2, None), (None, T), (3, T)):
        with pytest.raises(ValueError, match="their product, or neither"):
            permutation.pure_jax_token_combine(rows, state, weights, 2, *sizes)


def test_arrays_of_numpy_are_taken_operation_by_operation():
    x = np.asarray(normal(jax.random.key(0), (2, T // 2, H)))
    model = te_flax._MoEBlock(num_experts=E, intermediate_size=F)
    variables = jax.tree.map(np.asarray, draw_unboxed_variables(model, x))
    expected, _, _ = jax.jit(model.apply)(variables, x)
    y, _, _ = model.apply(variables, x)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_top_elements_of_rows():
    x = normal(jax.random.key(0), (3, 20))
    values, places = topk(x, 5)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(x), np.asarray(places), 1), values)
    np.testing.assert_array_equal(np.sort(values), np.sort(x)[:, -5:])
    with pytest.raises(ValueError, match="at most n"):
        topk(x, 21)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: router.fused_topk_with_score_function(logits(), 9), ValueError, "at most 8"),
        (lambda: router.fused_topk_with_score_function(logits(), 0), ValueError, "topk=0"),
        (
            lambda: router.fused_topk_with_score_function(logits(), 2, expert_bias=zeros(E)),
            ValueError,
            "only 'sigmoid' and 'sqrtsoftplus' use it",
        ),
        (
            lambda: router.fused_topk_with_score_function(logits(), 2, scaling_factor=ones(())),
            TypeError,
            "scaling_factor",
        ),
        (
            lambda: router.fused_topk_with_score_function(logits(), 2, score_function="tanh"),
            ValueError,
            "choose one of",
        ),
        (
            lambda: router.fused_topk_with_score_function(logits(), 2, num_groups=3, group_topk=1),
            ValueError,
            "must divide the experts",
        ),
        (
            lambda: permutation.token_dispatch(ones((T, H)), ones((T, E)), 0),
            ValueError,
            "num_out_tokens=0",
        ),
        (
            lambda: permutation.token_dispatch(ones((3, H)), ones((T, E)), 4),
            ValueError,
            r"give \[T, H\]",
        ),
        (lambda: ep.ep_bootstrap(3, 0, 8, 4, 4, 4), ValueError, "does not divide num_experts"),
        (lambda: ep.ep_bootstrap(2, 2, 8, 4, 4, 4), ValueError, "pass an integer from 0 to 1"),
        (lambda: ep.ep_bootstrap(2, 0, 8, 4, 4, 4, jnp.int32), TypeError, "max_token_dtype"),
    ],
)
def test_a_bad_call_is_rejected_with_value_limit_and_remedy(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()
    ep.ep_finalize()


def test_calls_after_a_bootstrap_must_match_its_sizes():
    cfg = ep.ep_bootstrap(1, 0, E, T, 2 * T, H)
    picked = zeros((T + 1, 2), jnp.int32)
    with pytest.raises(RuntimeError, match="call ep_finalize first"):
        ep.ep_bootstrap(1, 0, E, T, 2 * T, H)
    with pytest.raises(ValueError, match=f"at most {T}; call ep_finalize, then ep_bootstrap for"):
        ep.ep_dispatch(cfg, picked, ones((T + 1, H)), ones((T + 1, 2)), 2 * T)
    ep.ep_finalize()
    x = normal(jax.random.key(0), (T, H))
    probs, chosen = router.fused_topk_with_score_function(logits(), 2)
    picked, weights = permutation.routing_map_to_selected_experts(probs, chosen, 2)
    with pytest.raises(TypeError, match=r"tokens is \[1.0\]; it must hold float32"):
        ep.ep_dispatch(cfg, picked, [1.0], weights, 2 * T)  # pyright: ignore[reportArgumentType]
    rows, _, handle, counts, total = ep.ep_dispatch(cfg, picked, x, weights, 2 * T)
    np.testing.assert_array_equal(counts, chosen.sum(axis=0))
    np.testing.assert_allclose(ep.ep_combine(cfg, handle, counts, rows, T), 2 * x, rtol=1e-6)
    short = ep.ep_dispatch(cfg, picked, x, weights, 5)
    # dropped rows are counted
    assert int(short[3].sum()) == 5 and int(short[4]) == int(total) == 2 * T


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("wi", (4, 16, 23), (4, 16, 24)),
        ("wi", (3, 16, 24), (4, 16, 24)),
        ("wo", (4, 12, 15), (4, 12, 16)),
        ("wo", (4, 11, 16), (4, 11, 16)),
        ("wi_bias", (2, 24), (4, 24)),
        ("wi_bias", (4, 23), (4, 24)),
        ("wo_bias", (4, 17), (4, 16)),
    ],
)
def test_kernels_and_biases_that_do_not_fit_the_experts_are_rejected(name, shape, expected):
    shapes = {"wi": (4, 16, 24), "wo": (4, 12, 16), "wi_bias": (4, 24), "wo_bias": (4, 16)} | {
        name: shape
    }
    arrays = {name: ones(shape) for name, shape in shapes.items()}
    wrong, expected = ("wi", (4, 16, 22)) if shape == expected else (name, expected)
    with pytest.raises(
        ValueError, match=re.escape(f"{wrong} has shape {shapes[wrong]}; it must be {expected}")
    ):
        moe(ones((2, 8, 16)), ones((16, 4)), **arrays, num_experts=4, num_experts_per_tok=2)
