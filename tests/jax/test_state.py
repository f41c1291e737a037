"""Delayed scaling in JAX: module states, calls that share a state, and rejected recipes and states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import array, draw_unboxed_variables, draw_variables, normal, ones, zeros
from tests.jax.test_state_bits import RECIPE, check_same_state, delayed_set
from transformer_engine.common import recipe
from transformer_engine.common.hardware import nvidia
from transformer_engine.jax.dense import dense
from transformer_engine.jax.quantize import (
    AmaxComputeAlgo,
    DelayedScaleQuantizer,
    QuantizerFactory,
    QuantizerSet,
    ScalingMode,
    TensorSource,
    compute_scale_from_amax,
    fan_out,
    get_quantize_config_with_recipe,
    noop_quantizer_set,
    recipes,
)
from transformer_engine.jax.quantize.sharing import share_over_devices


@pytest.mark.parametrize(
    ("amax", "expected"),
    [(2.0, 224.0), (0.0, 3.0), (np.inf, 3.0), (np.nan, 3.0), (1e-44, 3.4028235e38)],
)
def test_a_scale_is_unchanged_for_an_unusable_amax(amax, expected):
    scale = compute_scale_from_amax(array([amax]), jnp.float8_e4m3fn, scale=jnp.full(1, 3.0))
    assert scale.shape == (1,)
    assert np.asarray(scale)[0] == np.float32(expected)


def test_a_step_is_traced_once():
    traces = []
    with te.autocast(True, RECIPE):
        model = te_flax.DenseGeneral(features=8)
        x = ones((4, 16))
        state, params = flax.core.pop(draw_variables(model, x), "params")

        @jax.jit
        def step(params, state, x):
            traces.append(1)
            return jax.grad(lambda p, s: model.apply({"params": p, **s}, x).sum(), argnums=(0, 1))(
                params, state
            )

        for _ in range(4):
            _, state = step(params, state, x)
    assert len(traces) == 1


def test_layers_that_are_scanned_and_recomputed_keep_the_same_state():
    check_same_state((True, True))


def test_a_kernel_used_twice_gets_the_scale_of_its_larger_amax():
    first = normal(jax.random.key(0), (8, 16))
    second = 5.0 * normal(jax.random.key(1), (8, 16))
    kernel = normal(jax.random.key(2), (16, 4))

    def loss(quantizers):
        one, other, _ = fan_out(quantizers, 3)
        return (
            dense(first, kernel, quantizer_set=one).sum()
            + dense(second, kernel, quantizer_set=other).sum()
        )

    following = jax.jit(jax.grad(loss))(delayed_set())
    amax = np.abs(np.asarray(second)).max()
    np.testing.assert_array_equal(np.asarray(following.x.amax_history), [0, 0, 0, amax])
    assert np.asarray(following.x.scale)[0] == np.float32(448) / amax
    kernel_amax = np.abs(np.asarray(kernel)).max()
    assert np.asarray(following.kernel.scale)[0] == np.float32(448) / kernel_amax


class Twice(nn.Module):
    """One layer read twice."""

    @nn.compact
    def __call__(self, x):
        layer = te_flax.DenseGeneral(8, name="dense")
        return layer(x) + layer(5.0 * x)


@pytest.mark.parametrize("read", [(False, True, True), (True, False, False), (False, False, False)])
def test_unread_states_of_devices_are_ignored(read):
    """As with copies from `fan_out`, zeros from a branch that a device does not take are not scales."""
    scales, maxima = (
        np.asarray([[8.0], [2.0], [4.0]], np.float32),
        np.asarray([[1.0], [4.0], [2.0]], np.float32),
    )

    def next_state(scale, amax, reads):
        quantizer = DelayedScaleQuantizer(
            jnp.dtype(jnp.float8_e4m3fn), scale=scale, amax_history=amax
        )
        following = jax.tree.map(lambda leaf: jnp.where(reads, leaf, 0), quantizer)

        def loss(quantizer):
            over = share_over_devices(quantizer, ("devices",), merges=True)
            return sum(
                (a * b).sum()
                for a, b in zip(jax.tree.leaves(over), jax.tree.leaves(following), strict=True)
            )

        return jax.lax.psum(jax.tree.leaves(jax.grad(loss)(quantizer)), "devices")

    actual = jax.vmap(next_state, axis_name="devices")(scales, maxima, np.asarray(read))
    places = [index for index, reads in enumerate(read) if reads]
    expected = (
        scales[places].min(initial=np.inf) if places else 0.0,
        maxima[places].max(initial=0),
    )
    np.testing.assert_array_equal(actual, [[[number]] * 3 for number in expected])


def test_a_module_called_twice_merges_its_states_by_itself():
    x = normal(jax.random.key(0), (16, 32))
    with te.autocast(True, RECIPE):
        model = Twice()
        state, params = flax.core.pop(draw_unboxed_variables(model, x), "params")

        def loss(state, x):
            return (model.apply({"params": params, **state}, x) ** 2).sum()

        following = jax.jit(jax.grad(loss))(state, x)["fp8_metas"]["dense"]
        repeated = jax.grad(loss)(state, x)["fp8_metas"]["dense"]
    amax = np.float32(jnp.abs(5.0 * x).max())
    assert following["x_amax_history"][-1] == amax
    assert following["x_scale"][0] == np.float32(448) / amax
    kernel = np.float32(jnp.abs(params["dense"]["kernel"]).max())
    assert following["kernel_scale"][0] == np.float32(448) / kernel
    jax.tree.map(np.testing.assert_array_equal, following, repeated)


class Shared(nn.Module):
    """One layer, or one block of a layer, called twice, where a lifted transformation surrounds each call."""

    lift: Callable[..., Any]
    within_block: bool

    @nn.compact
    def __call__(self, x):
        if not self.within_block:
            dense = self.lift(te_flax.DenseGeneral)(features=32, use_bias=False, name="dense")
            return dense(x) + dense(jnp.sin(5 * x))
        block = self.lift(Block)(name="block")
        return block(x) + block(jnp.sin(5 * x))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return te_flax.DenseGeneral(features=32, use_bias=False, name="dense")(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lift", "within_block"),
    [
        pytest.param(lambda cls: cls, False, id="plain-False"),
        pytest.param(nn.remat, True, id="remat-True"),
        pytest.param(nn.jit, False, id="jit-False"),
        pytest.param(lambda cls: cls, True, id="plain-True", marks=pytest.mark.slow),
        pytest.param(nn.remat, False, id="remat-False", marks=pytest.mark.slow),
        pytest.param(nn.jit, True, id="jit-True", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_a_module_called_twice_by_a_lifted_transformation_merges_its_states(lift, within_block):
    """Scales follow the larger amax from both calls, in the forward and backward pass."""
    x = normal(jax.random.key(0), (16, 32))
    weights = np.asarray(normal(jax.random.key(2), (16, 32)))
    with te.autocast(True, RECIPE):
        model = Shared(lift, within_block)
        state, params = flax.core.pop(draw_unboxed_variables(model, x), "params")

        def loss(state, x):
            return (weights * model.apply({"params": params, **state}, x)).sum()

        following = jax.jit(jax.grad(loss))(state, x)["fp8_metas"]
        repeated = jax.jit(jax.grad(loss))(replace_metas(state, following), x)["fp8_metas"]
    (kernel,) = jax.tree.leaves(params)
    maxima = {"x": x, "kernel": kernel, "grad": weights}
    maxima["x"] = np.maximum(np.abs(x), np.abs(np.sin(5 * np.asarray(x)))).max(keepdims=True)
    for result in (following, repeated):
        actual = result["block"]["dense"] if within_block else result["dense"]
        for name, values in maxima.items():
            amax = np.float32(np.abs(values).max())
            largest = np.float32(57344 if name == "grad" else 448)
            np.testing.assert_allclose(
                actual[f"{name}_scale"], largest / amax, rtol=1e-6, err_msg=name
            )
            assert actual[f"{name}_amax_history"].max() == amax, name


def replace_metas(state, metas):
    return {**state, "fp8_metas": metas}


class Branch(nn.Module):
    """Two layers; a step may skip the second."""

    @nn.compact
    def __call__(self, x, both=True):
        y = te_flax.DenseGeneral(16, name="always")(x)
        return te_flax.DenseGeneral(8, name="sometimes")(y) if both or self.is_initializing() else y


def branch(x):
    """(loss(state, x, both) for a Branch, its state); called within autocast."""
    model = Branch()
    state, params = flax.core.pop(draw_unboxed_variables(model, x), "params")

    def loss(state, x, both=True):
        return (model.apply({"params": params, **state}, x, both) ** 2).sum()

    return loss, state


def test_a_layer_skipped_by_a_step_restarts_with_a_new_state():
    x = normal(jax.random.key(0), (16, 32))
    with te.autocast(True, RECIPE):
        loss, new = branch(x)
        following = jax.jit(jax.grad(loss), static_argnums=2)(new, x, False)
        layer = following["fp8_metas"]["sometimes"]
        assert layer["x_scale"] == 0.0  # JAX's gradient for a value that was not read
        as_new = {
            "fp8_metas": {**following["fp8_metas"], "sometimes": new["fp8_metas"]["sometimes"]}
        }
        step = jax.jit(jax.value_and_grad(loss))
        got, expected = (step(state, x) for state in (following, as_new))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert np.isfinite(got[0])
    assert got[1]["fp8_metas"]["sometimes"]["x_scale"] > 0


def test_a_state_of_0_equals_a_new_state():
    left_out = DelayedScaleQuantizer(
        q_dtype=jnp.dtype(jnp.float8_e4m3fn), scale=zeros(1), amax_history=zeros(4)
    )
    new = dataclasses.replace(left_out, scale=ones(1))
    for x in (zeros((16, 16)), ones((16, 16))):

        def step(quantizer, x=x):
            tensor, amax = quantizer.encode(x)
            return tensor, quantizer.advanced(amax)

        jax.tree.map(
            np.testing.assert_array_equal, *map(jax.tree.leaves, map(step, (left_out, new)))
        )


def test_groups_with_an_unread_state_begin_anew():
    grouped = te_flax.make_grouped_dense_cls(RECIPE)
    x, kernel = normal(jax.random.key(0), (8, 16)), ones((2, 16, 4))
    arguments = x, kernel, array([3, 5])
    new = draw_variables(grouped, *arguments)
    got = grouped.apply(jax.tree.map(jnp.zeros_like, new), *arguments)
    np.testing.assert_array_equal(got, grouped.apply(new, *arguments))


@pytest.mark.parametrize("uses", ["one after another", "scan", "vmap"])
@pytest.mark.sampled(1)
def test_a_model_applied_to_two_batches_keeps_the_larger_amax_of_every_state(uses):
    x = normal(jax.random.key(0), (16, 32))
    batches = jnp.stack([x, 5.0 * x])
    with te.autocast(True, RECIPE):
        loss, state = branch(x)

        def both(state):
            copies = fan_out(state, 2)
            if uses == "one after another":
                return loss(copies[0], batches[0]) + loss(copies[1], batches[1])
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *copies)
            if uses == "vmap":
                return jax.vmap(loss)(stacked, batches).sum()
            return jax.lax.scan(lambda sum, one: (sum + loss(*one), None), 0.0, (stacked, batches))[
                0
            ]

        following = jax.jit(jax.grad(both))(state)["fp8_metas"]
        alone = [jax.grad(loss)(state, batch)["fp8_metas"] for batch in batches]
    for layer in ("always", "sometimes"):
        for tensor in ("x", "kernel", "grad"):
            scales, histories = (
                [one[layer][f"{tensor}{name}"] for one in alone]
                for name in ("_scale", "_amax_history")
            )
            np.testing.assert_array_equal(following[layer][f"{tensor}_scale"], jnp.minimum(*scales))
            np.testing.assert_array_equal(
                following[layer][f"{tensor}_amax_history"], jnp.maximum(*histories)
            )


@pytest.mark.parametrize("argument", [{"params": {"kernel": np.ones(4, np.float32)}}, [1], None])
def test_fan_out_rejects_objects_without_state(argument):
    with pytest.raises(TypeError, match=r"quantizer_set.* give"):
        fan_out(argument, 2)


def test_a_state_that_no_branch_used_is_unchanged():
    state = delayed_set()
    state.x.scale = jnp.full(1, 7.0)

    def loss(quantizers, selection):
        one, _ = fan_out(quantizers, 2)

        def product(q):
            return dense(ones((8, 16)), ones((16, 4)), quantizer_set=q).sum()

        return jax.lax.cond(selection, product, lambda q: 0.0, one)

    following = jax.jit(jax.grad(loss))
    assert following(state, False).x.scale[0] == 7.0
    assert following(state, True).x.scale[0] == 448.0


def test_a_public_quantizer_advances_itself():
    quantizer = delayed_set().x
    x = normal(jax.random.key(0), (8, 16))
    quantizer.quantize(x)
    amax = np.abs(np.asarray(x)).max()
    np.testing.assert_array_equal(np.asarray(quantizer.amax_history), [0, 0, 0, amax])
    assert np.asarray(quantizer.scale)[0] == np.float32(448) / amax


def test_three_missing_quantizers_are_the_identity_set():
    assert QuantizerSet(x=None, kernel=None, dgrad=None) == noop_quantizer_set
    assert delayed_set() != noop_quantizer_set
    assert QuantizerFactory.create_set() == noop_quantizer_set
    assert QuantizerFactory.create(scaling_mode=ScalingMode.NO_SCALING) is None


def test_autocast_nests_and_is_restored():
    outer, inner = recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling()
    current = te.quantize.get_global_quantize_recipe
    with te.autocast(True, outer):
        with te.autocast(True, inner):
            assert current() is inner
        assert current() is outer
        with te.autocast(False):
            assert current() is None
        with pytest.raises(RuntimeError, match="left"), te.autocast(True, inner):
            raise RuntimeError("left by an error")
        assert current() is outer
        with te.autocast(True):
            assert current() == recipe.DelayedScaling()
    assert current() is None


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        (
            recipe.DelayedScaling(amax_compute_algo=lambda history: history[0]),
            ValueError,
            "'max' or 'most_recent'",
        ),
        (recipe.DelayedScaling(reduce_amax=False), ValueError, "set it to True"),
        (
            recipe.DelayedScaling(scaling_factor_compute_algo=lambda *a: a[1]),
            ValueError,
            "supports None only",
        ),
        (recipe.CustomRecipe(qfactory=lambda role: None), ValueError, "choose one of them"),
        (
            recipe.Float8CurrentScaling(backward_override="high_precision"),
            ValueError,
            "set it to None",
        ),
        (recipe.Float8BlockScaling(backward_override="dequantized"), ValueError, "set it to None"),
        ("DelayedScaling", TypeError, "pass an instance"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_rejected_when_entered(settings, error, sentence):
    with pytest.raises(error, match=sentence), te.autocast(True, settings):
        pytest.fail("the block was entered")


@pytest.mark.parametrize(
    ("settings", "capability", "limit"),
    [
        (recipe.DelayedScaling(), 80, "needs compute capability 8.9, this GPU has 8.0"),
        (recipe.Float8CurrentScaling(), 80, "needs compute capability 8.9, this GPU has 8.0"),
        (recipe.MXFP8BlockScaling(), 90, "needs compute capability 10.0, this GPU has 9.0"),
        (recipe.NVFP4BlockScaling(), 90, "needs compute capability 10.0, this GPU has 9.0"),
    ],
)
def test_a_recipe_that_the_gpu_lacks_is_rejected_with_the_switch_that_emulates_it(
    settings, capability, limit, monkeypatch
):
    monkeypatch.setattr(recipes, "hardware", lambda gpu_id=0: nvidia(*divmod(capability, 10)))
    monkeypatch.setenv("TE_EMULATE", "0")
    with pytest.raises(ValueError, match=f"{limit}; set TE_EMULATE=1"), te.autocast(True, settings):
        pytest.fail("the block was entered")
    assert te.quantize.is_quantize_recipe_supported(type(settings).__name__)[0] is False
    monkeypatch.setenv("TE_EMULATE", "1")
    with te.autocast(True, settings):
        assert te.quantize.get_global_quantize_recipe() is settings


def test_a_recipe_that_cannot_be_followed_is_rejected_without_autocast():
    unsupported = te_flax.make_dot_general_cls(
        recipe.MXFP8BlockScaling(backward_override="dequantized")
    )
    layer = nn.Dense(4, dot_general=unsupported())
    with pytest.raises(ValueError, match="backward_override='dequantized'"):
        jax.eval_shape(layer.init, jax.random.key(0), ones((8, 16)))


def test_the_collection_of_a_module_has_the_names_and_shapes_of_checkpoints():
    def create(settings):
        with te.autocast(True, settings):
            init = te_flax.DenseGeneral(features=8).init
            return jax.eval_shape(init, jax.random.key(0), ones((2, 4)))

    state = create(recipe.DelayedScaling(amax_history_len=16))["fp8_metas"]
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in state.items()} == {
        f"{tensor}_{leaf}": (shape, jnp.float32)
        for tensor in ("x", "kernel", "grad")
        for leaf, shape in (("scale", (1,)), ("amax_history", (16,)))
    }
    for settings in (
        recipe.Float8CurrentScaling(),
        recipe.MXFP8BlockScaling(),
        recipe.Float8BlockScaling(),
    ):
        assert set(create(settings)) == {"params"}


def test_a_model_without_its_state_is_rejected_with_the_remedy():
    x = ones((8, 16))
    model = te_flax.DenseGeneral(features=4)
    variables = draw_variables(model, x)
    with (
        te.autocast(True, RECIPE),
        pytest.raises(ValueError, match=r'"fp8_metas" has no x_scale .* call init'),
    ):
        model.apply(variables, x)


@pytest.mark.parametrize(
    "change, error, said",
    [
        (
            lambda leaf: leaf.astype(jnp.bfloat16),
            TypeError,
            r"x_scale of the model .* is bfloat16; states are",
        ),
        (lambda leaf: leaf.astype(jnp.int32), TypeError, "is int32; states are float32"),
        (lambda leaf: float(leaf.max()), TypeError, "is float; states are float32"),
        (lambda leaf: leaf.max(), ValueError, r"has shape \[\], not \[1\]"),
        (lambda leaf: leaf[None], ValueError, r"has shape \[1, 1\], not \[1\]"),
        (lambda leaf: leaf[:0], ValueError, r"has shape \[0\], not \[1\]"),
    ],
)
def test_a_state_of_another_dtype_or_shape_is_rejected(change, error, said):
    """Without the check, the forward of a tree cast as a whole succeeds, and its gradient fails in a concatenation."""
    x = ones((8, 16))
    model = te_flax.DenseGeneral(features=4)
    with te.autocast(True, RECIPE):
        state, params = flax.core.pop(draw_unboxed_variables(model, x), "params")
        with pytest.raises(error, match=said):
            model.apply({"params": params, **jax.tree.map(change, state)}, x)
        lengthened = {**state["fp8_metas"], "x_amax_history": zeros((4, 1))}
        with pytest.raises(
            ValueError, match=r"x_amax_history of .* has shape \[4, 1\], not \[length\]"
        ):
            model.apply({"params": params, "fp8_metas": lengthened}, x)


def test_collections_are_updated_in_the_type_of_the_original():
    original = flax.core.freeze({"a": 1, "b": 2})
    updated = te.update_collections({"b": 3}, original)
    assert isinstance(updated, flax.core.FrozenDict)
    assert dict(updated) == {"b": 3, "a": 1}
    assert te.update_collections({"b": 3}, {"a": 1}) == {"b": 3, "a": 1}
    with pytest.raises(TypeError, match="pass a dict or a FrozenDict"):
        te.update_collections([1], {})


E4M3, E5M2, E2M1 = (jnp.dtype(x) for x in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn))


@pytest.mark.parametrize(
    ("argument", "dtypes", "modes"),
    [
        (None, (jnp.bfloat16, jnp.bfloat16), ["NO_SCALING"] * 3),
        (recipe.DelayedScaling(), (E4M3, E5M2), ["DELAYED_TENSOR_SCALING"] * 3),
        (
            recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3),
            (E4M3, E4M3),
            ["CURRENT_TENSOR_SCALING"] * 3,
        ),
        (recipe.MXFP8BlockScaling(), (E4M3, E4M3), ["MXFP8_1D_SCALING"] * 3),
        (
            recipe.Float8BlockScaling(),
            (E4M3, E4M3),
            ["BLOCK_1D_SCALING", "BLOCK_2D_SCALING", "BLOCK_1D_SCALING"],
        ),
        (
            recipe.NVFP4BlockScaling(),
            (E2M1, E2M1),
            ["NVFP4_1D_SCALING", "NVFP4_2D_SCALING", "NVFP4_1D_SCALING"],
        ),
    ],
)
def test_a_config_has_the_dtype_and_mode_of_each_tensor(argument, dtypes, modes):
    config = get_quantize_config_with_recipe(argument)
    assert (jnp.dtype(config.FWD_DTYPE), jnp.dtype(config.BWD_DTYPE)) == tuple(
        map(jnp.dtype, dtypes)
    )
    assert [config.get_scaling_mode(source).name for source in TensorSource] == modes
    assert config.is_fp8_enabled() is (argument is not None)
    assert (1024 if isinstance(argument, recipe.DelayedScaling) else 0) == config.AMAX_HISTORY_LEN


def test_a_config_has_the_settings_of_delayed_scaling():
    argument = recipe.DelayedScaling(margin=2, amax_history_len=3, amax_compute_algo="most_recent")
    config = get_quantize_config_with_recipe(argument)
    assert (config.MARGIN, config.AMAX_HISTORY_LEN) == (2.0, 3)
    assert config.AMAX_COMPUTE_ALGO is AmaxComputeAlgo.MOST_RECENT
    assert get_quantize_config_with_recipe(None).AMAX_COMPUTE_ALGO is AmaxComputeAlgo.MAX
