"""Kernels that quantize their results give the bytes of separate steps, on a GPU or in the interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.bits import assert_same_bytes, matrix, torch_step
from tests.jax.compiled import array, ones, zeros
from transformer_engine.common.dispatch import observing, use_backend
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, E4M3, E5M2, FLOAT8
from transformer_engine.common.quantize_spec import QuantizeSpec
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.jax.layernorm_dense import layernorm_dense
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.primitives.activation import ActivationParams
from transformer_engine.jax.primitives.activation_codes import (
    activation_backward_codes,
    activation_codes,
)
from transformer_engine.jax.primitives.grouped_quantize import (
    RowCodes,
    quantize_rows,
    quantize_stack,
)
from transformer_engine.jax.primitives.grouped_quantize import triton as grouped_kernels
from transformer_engine.jax.primitives.kernels import call
from transformer_engine.jax.primitives.norm_codes import norm_codes
from transformer_engine.jax.primitives.quantize import OutputCast, quantize
from transformer_engine.jax.primitives.scale_update import ScaleState, advance_states
from transformer_engine.jax.quantize import (
    GroupedQuantizer,
    NVFP4Quantizer,
    QuantizeMeta,
    QuantizeMetaSet,
    QuantizerFactory,
    ScalingMode,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_users_compile")]
SPECS = {
    "delayed": QuantizeSpec(FLOAT8, E4M3, columnwise=True),
    "delayed rows": QuantizeSpec(FLOAT8, E5M2),
    "delayed from 0": QuantizeSpec(FLOAT8, E4M3, columnwise=True),
    "current": QuantizeSpec(FLOAT8, E4M3, columnwise=True),
    "blocks": QuantizeSpec(BLOCK_1D, E4M3, columnwise=True, power_of_two=True),
    "blocks of rows": QuantizeSpec(BLOCK_1D, E4M3, power_of_two=True),
    "squares": QuantizeSpec(BLOCK_2D, E4M3, columnwise=True, power_of_two=True),
}
RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "block": Float8BlockScaling}


def create_cast(name: str) -> OutputCast:
    scale = 0.0 if "from 0" in name else 3.7
    return OutputCast(SPECS[name], jnp.full(1, scale) if "delayed" in name else None)


def both_ways(operation: str, function, *arrays):
    """Result leaves from the fused kernels and from the separate kernels."""
    outputs = []
    for backend in ("triton", "separate"):
        with use_backend(**{operation: backend}):
            outputs.append(jax.tree.leaves(jax.jit(lambda *a: function(*a))(*arrays)))
    return zip(*outputs, strict=True)


def assert_equal(pairs, name: str) -> None:
    for index, (ours, expected) in enumerate(pairs):
        ours, expected = np.asarray(ours), np.asarray(expected)
        assert ours.shape == expected.shape and ours.dtype == expected.dtype, f"{name} {index}"
        np.testing.assert_array_equal(
            ours.astype(np.float32), expected.astype(np.float32), f"{name} {index}"
        )


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(
    "name", ["delayed", "delayed rows", "delayed from 0", "current", "blocks of rows"]
)
def test_fused_norm_codes_equal_quantized_norm_output(name, centered):
    x = jnp.asarray(matrix("normal", (48, 256), "bfloat16")).reshape(4, 12, 256)
    gamma, beta = jnp.linspace(0.5, 1.5, 256), jnp.linspace(-1, 1, 256) if centered else None

    def create(x, gamma, beta):
        return norm_codes(x, gamma, beta, create_cast(name), centered, centered, 1e-5)

    assert_equal(both_ways("jax_norm_codes", create, x, gamma, beta), name)


@pytest.mark.parametrize("names", [("gelu",), ("silu", "linear")])
@pytest.mark.parametrize("name", SPECS)
def test_fused_activation_codes_equal_quantized_activation_output(name, names):
    x = jnp.asarray(matrix("normal", (144, len(names) * 256), "bfloat16")).reshape(
        12, 12, len(names), 256
    )
    dy = jnp.asarray(matrix("normal", (144, 256), "bfloat16", 1)).reshape(12, 12, 256)
    params = ActivationParams()
    result = both_ways(
        "jax_activation_codes", lambda x: activation_codes(x, create_cast(name), names, params), x
    )
    assert_equal(result, f"{name} forward")
    result = both_ways(
        "jax_activation_codes",
        lambda dy, x: activation_backward_codes(dy, x, create_cast(name), names, params, None)[0],
        dy,
        x,
    )
    assert_equal(result, f"{name} backward")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["delayed", "current", "blocks"])
def test_gradient_quantization_returns_column_sums(name, dtype):
    names, params = ("silu", "linear"), ActivationParams()
    x = jnp.asarray(matrix("normal", (144, 512), "bfloat16")).reshape(144, 2, 256)
    dy = jnp.asarray(matrix("normal", (144, 256), "bfloat16", 1))

    def sums(dy, x):
        total = activation_backward_codes(dy, x, create_cast(name), names, params, dtype)[1]
        assert total is not None and total.dtype == dtype
        return total.astype(jnp.float32)

    for ours, expected in both_ways("jax_activation_codes", sums, dy, x):
        np.testing.assert_allclose(
            ours, expected, rtol=2e-2, atol=2e-2 * float(np.abs(expected).max())
        )


@pytest.mark.parametrize("directions", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_stack_has_the_codes_of_its_matrices(dtype, directions):
    x = jnp.stack([jnp.asarray(matrix("normal", (144, 80), dtype, seed)) for seed in range(4)])
    x = x.at[1].set(0).at[2, 3, 4].set(jnp.nan)
    multiplier = array([3.7, 1.0, 0.3, 0.0], jnp.float32)
    outputs = []
    for backend in ("triton", "reference"):
        with use_backend(jax_grouped_quantize=backend):
            outputs.append(jax.jit(lambda x: quantize_stack(x, multiplier, E4M3, *directions))(x))
    assert [one is None for one in outputs[0]] == [one is None for one in outputs[1]]
    assert outputs[0].scale[-1] == 1.0  # for multiplier 0, which is read as 1
    assert_equal(zip(*map(jax.tree.leaves, outputs), strict=True), f"{dtype} {directions}")


@pytest.mark.parametrize("directions", [(True, True), (False, True), (True, False)])
def test_a_multiplier_of_0_is_read_as_1(directions):
    x, spec = (
        jnp.asarray(matrix("normal", (144, 80), "bfloat16")),
        QuantizeSpec(FLOAT8, E4M3, *directions),
    )

    def create(backend: str, multiplier: float):
        with use_backend(jax_quantize=backend):
            return jax.jit(lambda x: quantize(x, spec, multiplier=jnp.full(1, multiplier)))(x)

    expected = create("reference", 1.0)
    for backend in ("triton", "reference"):
        assert_equal(
            zip(*map(jax.tree.leaves, (create(backend, 0.0), expected)), strict=True), backend
        )


def test_a_state_of_0_without_a_maximum_advances_to_1():
    state = ScaleState(zeros(4), zeros(1), zeros(1))
    for backend in ("triton", "reference"):
        with use_backend(jax_scale_update=backend):
            ((history, scale),) = jax.jit(lambda: advance_states([state], "max", (448.0,), 0.0))()
        assert scale == 1.0 and not history.any(), backend


def quantizers(recipe: str):
    metas = [
        QuantizeMeta(scale=jnp.full(1, scale), amax_history=zeros(4))
        if recipe == "delayed"
        else QuantizeMeta()
        for scale in (3.0, 5.0, 7.0)
    ]
    return QuantizerFactory.create_set(
        fp8_recipe=RECIPES[recipe](), quantize_meta_set=QuantizeMetaSet(*metas)
    )


def gradients(function, *arguments):
    y, pullback = jax.vjp(function, *arguments)
    return y, pullback(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_quantized_mlp_has_values_gradients_and_states_of_separate_steps(recipe, biased):
    x = jnp.asarray(matrix("normal", (32, 128), "bfloat16"))
    kernels = [
        jnp.asarray(matrix("normal", s, "bfloat16", 2) * 0.1) for s in ((128, 512), (256, 128))
    ]
    kernels[0] = kernels[0].reshape(128, 2, 256)
    biases = [ones((2, 256), jnp.bfloat16), ones(128, jnp.bfloat16)] if biased else [None, None]
    sets = quantizers(recipe), quantizers(recipe)

    def both(x, gamma, kernels, biases, sets):
        def mlp(x, gamma, kernels, biases, sets):
            return layernorm_mlp(
                x,
                gamma,
                None,
                kernels,
                biases,
                "rmsnorm",
                activation_type=("silu", "linear"),
                quantizer_sets=sets,
            )

        return gradients(mlp, x, gamma, kernels, biases, sets)

    arguments = (x, ones(128), kernels, biases, sets)
    with use_backend(jax_norm_codes="separate", jax_activation_codes="separate"):
        expected = jax.tree.leaves(jax.jit(lambda *a: both(*a))(*arguments))
    for ours, exact in zip(jax.tree.leaves(jax.jit(both)(*arguments)), expected, strict=True):
        exact = np.asarray(exact, np.float64)
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), exact, atol=1e-2 * np.abs(exact).max()
        )


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_normalized_product_equals_separate_norm_and_product(recipe):
    x, kernel = (
        jnp.asarray(matrix("normal", s, "bfloat16", i))
        for i, s in enumerate(((32, 128), (128, 64)))
    )

    def both(x, kernel, quantizer_set):
        def product(x, kernel, quantizer_set):
            gamma, beta = ones(128), zeros(128)
            return layernorm_dense(x, kernel, gamma, beta, quantizer_set=quantizer_set)

        return gradients(product, x, kernel, quantizer_set)

    for ours, expected in both_ways("jax_norm_codes", both, x, kernel, quantizers(recipe)):
        exact = np.asarray(expected, np.float64)
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), exact, atol=1e-2 * np.abs(exact).max()
        )


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (5, 2), (1024, -1)])
def test_states_advance_by_the_bytes_of_the_torch_reference(algorithm, length, margin):
    rng = np.random.default_rng(0)
    maxima = (448.0, 448.0, 57344.0, 448.0, 57344.0, 448.0, 57344.0)  # more than one launch takes
    history = np.ldexp(
        rng.random((length, 7), np.float32), rng.integers(-120, 120, (length, 7))
    ).astype("f")
    history[0] = [0.0, np.inf, np.nan, 3e38, 1.0, 0.5, 2.0]
    scale = rng.random(7, np.float32)
    states = [
        ScaleState(
            jnp.asarray(history[:, i]), jnp.asarray(scale[i : i + 1]), jnp.asarray(history[:1, i])
        )
        for i in range(7)
    ]
    with use_backend(jax_scale_update="triton"):
        result = jax.jit(lambda states: advance_states(states, algorithm, maxima, margin))(states)
    for index, (ours, fp8_max) in enumerate(zip(result, maxima, strict=True)):
        column = slice(index, index + 1)
        want_history, want_scale = torch_step(
            history[:, column], scale[column], algorithm, fp8_max, margin
        )
        assert_same_bytes(ours[0], want_history.ravel(), f"history {index}")
        assert_same_bytes(ours[1], want_scale, f"scale {index}")


@pytest.mark.parametrize("argument", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [(40, 0, 72, 16), (1, 1, 1, 129), (0, 0, 3, 0)])
def test_grouped_rows_have_per_group_codes(dtype, argument, sizes):
    """Also rows after the last group: the second sizes have one row more than the tiles of all groups."""
    x = jnp.asarray(matrix("normal", (144, 80), dtype, 1)).at[2, 3].set(jnp.nan)
    multiplier = array([3.7, 1.0, 0.3, 0.0], jnp.float32) if argument else None
    outputs = []
    for backend in ("triton", "reference"):
        with use_backend(jax_grouped_quantize_rows=backend):
            call = jax.jit(lambda x, sizes: quantize_rows(x, sizes, multiplier, E5M2, True, 1e-3))
            outputs.append(call(x, jnp.asarray(sizes, jnp.int32)))
    assert_equal(zip(*map(jax.tree.leaves, outputs), strict=True), f"{dtype} {sizes}")


@pytest.mark.parametrize("sizes", [(40, 0, 72, 16), (0, 0, 3, 0)])
def test_separately_computed_group_maxima_give_the_same_codes(sizes):
    """As for maxima over several devices: `mesh_axes` of `quantize_rows`."""
    x = jnp.asarray(matrix("normal", (144, 80), "bfloat16", 1)).at[2, 3].set(jnp.nan)
    rows, scaling = jnp.asarray(sizes, jnp.int32), (True, 1e-3)

    @jax.jit
    def apart(x, rows):
        (amax,) = call(grouped_kernels.GroupMaxima(), x, rows)
        codes, scale = call(grouped_kernels.GroupedRowsCast(E5M2, scaling, "amax"), x, rows, amax)
        return RowCodes(codes, scale, amax)

    with use_backend(jax_grouped_quantize_rows="triton"):
        expected = jax.jit(lambda x, rows: quantize_rows(x, rows, None, E5M2, *scaling))(x, rows)
    assert_equal(zip(apart(x, rows), expected, strict=True), f"{sizes}")


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_stacked_group_states_advance_as_separate_group_states(algorithm):
    draw = np.random.default_rng(3)
    histories, scales, amaxes = (
        [jnp.asarray(draw.uniform(0, 9, (5, *shape)), jnp.float32) for _ in range(2)]
        for shape in ((6,), (), ())
    )
    amaxes[0] = amaxes[0].at[2].set(0).at[3].set(jnp.inf)
    states = [ScaleState(*one) for one in zip(histories, scales, amaxes, strict=True)]
    maxima, margin = (448.0, 57344.0), 1.0

    def group_codes(state, group):
        return ScaleState(
            state.history[group], state.scale[group : group + 1], state.amax[group : group + 1]
        )

    alone = [
        advance_states([group_codes(state, group) for state in states], algorithm, maxima, margin)
        for group in range(5)
    ]
    expected = [
        tuple(jnp.stack([one[index][part] for one in alone]) for part in (0, 1)) for index in (0, 1)
    ]
    for backend in ("triton", "reference"):
        with use_backend(jax_scale_update=backend):
            result = jax.jit(lambda states: advance_states(states, algorithm, maxima, margin))(
                states
            )
        for (history, scale), (reference, scale_wanted) in zip(result, expected, strict=True):
            np.testing.assert_array_equal(history, reference, backend)
            np.testing.assert_array_equal(scale[:, None], scale_wanted, backend)


RAGGED = {
    "plain": (ScalingMode.NVFP4_1D_SCALING, {}),
    "transformed": (ScalingMode.NVFP4_1D_SCALING, {"use_rht": True}),
    "stochastic": (ScalingMode.NVFP4_1D_SCALING, {"use_rht": True, "random": True}),
    "squares": (ScalingMode.NVFP4_2D_SCALING, {}),
    "4over6": (ScalingMode.NVFP4_1D_256_SCALING, {"four_over_six": "MSE"}),
    "squares of 4over6": (ScalingMode.NVFP4_2D_256_SCALING, {"four_over_six": "MAE"}),
    "rows": (ScalingMode.NVFP4_ROWS_SCALING, {}),
}


@pytest.mark.parametrize("sizes", [(40, 0, 33, 16), (1, 5, 0, 90)])
@pytest.mark.parametrize("name", RAGGED)
def test_grouped_rows_match_the_reference_nvfp4_codes(name, sizes):
    mode, options = RAGGED[name]
    options = dict(options)
    if options.pop("random", False):
        options["stochastic_rounding_rng_state"] = jax.random.key_data(jax.random.key(3))
    quantizer = GroupedQuantizer(NVFP4Quantizer(jnp.float4_e2m1fn, mode, **options), 4)
    spread = np.repeat(np.exp2(np.arange(4.0)), [*sizes[:3], 98 - sum(sizes[:3])])[:, None]
    x = jnp.asarray(
        matrix("normal", (98, 80), "bfloat16").astype(np.float32) * spread, jnp.bfloat16
    )
    outputs, chosen = [], []
    for backend in ("triton", "reference"):
        with (
            use_backend(jax_quantize=backend),
            observing(lambda operation, request: chosen.append((operation, request))),
        ):
            encode = jax.jit(lambda x: quantizer.encode(x, jnp.asarray(sizes), True, True)[0])
            outputs.append(jax.tree.leaves(encode(x)))
    assert any(
        operation == "jax_quantize" and request.maxima_per_tile for operation, request in chosen
    )
    assert_equal(zip(*outputs, strict=True), f"{name} {sizes}")
