"""Dense layers against plain jnp: values, every gradient, parameter trees, and rejected calls."""

from __future__ import annotations

import itertools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import (
    draw_unboxed_variables,
    init_variables,
    normal,
    ones,
    values_and_gradients,
)
from transformer_engine.common import recipe
from transformer_engine.common.dispatch import use_backend
from transformer_engine.jax.dense import dense
from transformer_engine.jax.flax.module import _apply_low_rank_adaptation, _normalize_axes
from transformer_engine.jax.quantize import QuantizerFactory, QuantizerSet, ScalingMode, TensorUsage

RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "mxfp8-2d": recipe.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
# Error relative to the result's norm: half a unit in the format's last place, twice, with room for few terms.
TOLERANCES = {
    "delayed": 0.05,
    "current": 0.05,
    "block": 0.05,
    "mxfp8": 0.06,
    "mxfp8-2d": 0.06,
    "nvfp4": 0.25,
}
GRADIENT_TOLERANCES = TOLERANCES | {"delayed": 0.09, "current": 0.09}


def relative_error(got, expected) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    x = normal(keys[0], (2, 32, 64)).astype(dtype)
    kernel = normal(keys[1], (64, 48))
    return x, kernel, normal(keys[2], (2, 32, 48)).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_without_a_recipe_dense_is_the_plain_product(dtype):
    x, kernel, dy = inputs(dtype)
    bias = normal(jax.random.key(3), (48,))

    def ours(x, kernel, bias):
        return dense(x, kernel, bias, contracting_dims=((2,), (0,)))

    def plain(x, kernel, bias):
        return x @ kernel.astype(dtype) + bias.astype(dtype)

    actual = values_and_gradients(ours, dy, x, kernel, bias)
    assert actual[0].dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    for got, expected in zip(actual, values_and_gradients(plain, dy, x, kernel, bias), strict=True):
        assert got.dtype == expected.dtype
        assert relative_error(got, expected) < tolerance


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.sampled(2)
def test_the_products_are_those_of_the_dequantized_tensors(name):
    """The three quantized products are within the format's tolerance around the unquantized products."""
    x, kernel, dy = inputs()
    with te.autocast(True, RECIPES[name]):
        quantizers = QuantizerFactory.create_set()

    def ours(x, kernel):
        return dense(x, kernel, contracting_dims=((2,), (0,)), quantizer_set=quantizers)

    @jax.jit
    def dequantized_product(x, kernel, dy):
        result = (
            quantizers.x.encode(x, flatten_axis=2)[0],
            quantizers.kernel.encode(kernel, flatten_axis=1)[0],
            quantizers.dgrad.encode(dy, flatten_axis=2)[0],
        )
        x_rows, kernel_rows, dy_rows = (t.get_tensor(TensorUsage.LHS).values() for t in result)
        x_columns, kernel_columns, dy_columns = (
            t.get_tensor(TensorUsage.LHS_TRANS).values() for t in result
        )
        # A Hadamard transform applies to both factors and leaves their product unchanged.
        dkernel = jnp.einsum("bsk,bsn->kn", x_columns, dy_columns)
        return x_rows @ kernel_columns, dy_rows @ kernel_rows.T, dkernel

    actual = values_and_gradients(ours, dy, x, kernel)
    exact = dequantized_product(x, kernel, dy)
    plain = x @ kernel, dy @ kernel.T, jnp.einsum("bsk,bsn->kn", x, dy)
    tolerances = TOLERANCES[name], GRADIENT_TOLERANCES[name], GRADIENT_TOLERANCES[name]
    # Tensor cores align code products before the addition and keep 13 bits.
    sums = 1e-5 if jax.default_backend() == "cpu" else 2.0**-13
    for got, expected, near, tolerance in zip(actual, exact, plain, tolerances, strict=True):
        assert relative_error(got, expected) < sums
        assert relative_error(got, near) < tolerance


def test_op_by_op_execution_equals_one_jitted_program():
    x, kernel, dy = inputs()
    with te.autocast(True, RECIPES["delayed"]):
        quantizers = QuantizerFactory.create_set()

    def ours(x, kernel):
        return dense(x, kernel, contracting_dims=((2,), (0,)), quantizer_set=quantizers)

    y, pullback = jax.vjp(ours, x, kernel)
    for one, other in zip(
        (y, *pullback(dy)), values_and_gradients(ours, dy, x, kernel), strict=True
    ):
        assert relative_error(one, other) < 1e-6


@pytest.mark.parametrize("dims", [((0, 2), (0, 1)), ((-1, 0), (1, 0)), ((1,), (2,))])
def test_any_axes_are_contracted(dims):
    x = normal(jax.random.key(0), (4, 6, 8))
    shapes = {((0, 2), (0, 1)): (4, 8, 5, 3), ((-1, 0), (1, 0)): (4, 8, 5), ((1,), (2,)): (3, 5, 6)}
    kernel = normal(jax.random.key(1), shapes[dims])
    shape = jax.eval_shape(lambda: jnp.tensordot(x, kernel, dims)).shape
    dy = normal(jax.random.key(2), shape)
    got = values_and_gradients(lambda x, k: dense(x, k, contracting_dims=dims), dy, x, kernel)
    expected = values_and_gradients(lambda x, k: jnp.tensordot(x, k, dims), dy, x, kernel)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_stochastic_rounding_draws_the_same_numbers_where_float64_is_enabled():
    """A float64 draw from the same key has other bits, which kernels do not support."""
    x = normal(jax.random.key(0), (32, 64))
    key = jax.random.key_data(jax.random.key(1))
    quantizer = QuantizerFactory.create(
        scaling_mode=ScalingMode.NVFP4_1D_SCALING,
        q_dtype=jnp.float4_e2m1fn,
        stochastic_rounding_rng_state=key,
    )
    tensor = jax.jit(quantizer.quantize)(x)
    with jax.enable_x64(True):
        repeated = jax.jit(quantizer.quantize)(x)
    for got, expected in zip(jax.tree.leaves(repeated), jax.tree.leaves(tensor), strict=True):
        np.testing.assert_array_equal(
            np.asarray(got).view(np.uint8), np.asarray(expected).view(np.uint8)
        )


def test_stochastic_rounding_draws_from_its_own_stream():
    x = normal(jax.random.key(0), (32, 64))
    with te.autocast(True, recipe.NVFP4BlockScaling()):
        model = te_flax.DenseGeneral(features=32)
        variables = draw_unboxed_variables(model, x)

        @jax.jit
        def gradient(key):
            def loss(variables):
                return (model.apply(variables, x, rngs={"sr_rng": key}) ** 2).sum()

            return jax.grad(loss)(variables)["params"]["kernel"]

        first, repeated, other = (gradient(jax.random.key(seed)) for seed in (1, 1, 2))
        with pytest.raises(flax.errors.InvalidRngError):
            model.apply(variables, x)
    np.testing.assert_array_equal(first, repeated)
    assert not np.array_equal(first, other)
    assert relative_error(first, other) < 0.3


@pytest.mark.parametrize(("axis", "features"), [(-1, 5), ((-2, -1), (3, 4)), ((0, 2), (3, 4))])
def test_dense_general_has_the_parameters_and_values_of_flax(axis, features):
    x = normal(jax.random.key(0), (6, 7, 8))
    ours = te_flax.DenseGeneral(features=features, axis=axis)
    plain = nn.DenseGeneral(features=features, axis=axis)
    variables = draw_unboxed_variables(ours, x)
    shapes = jax.tree.map(jnp.shape, variables)
    assert shapes == jax.tree.map(jnp.shape, jax.eval_shape(plain.init, jax.random.key(1), x))
    bias = normal(jax.random.key(2), variables["params"]["bias"].shape)
    variables["params"]["bias"] = bias
    np.testing.assert_allclose(
        ours.apply(variables, x), plain.apply(variables, x), rtol=1e-4, atol=1e-5
    )


def test_kernel_initialization_equals_flax():
    x = ones((2, 16))
    kernel = nn.meta.unbox(te_flax.DenseGeneral(features=8).init(jax.random.key(0), x))["params"][
        "kernel"
    ]
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    plain = nn.Dense(8, kernel_init=init).init(jax.random.key(0), x)["params"]["kernel"]
    np.testing.assert_array_equal(kernel, plain)


def test_parameters_carry_their_axis_names():
    model = te_flax.DenseGeneral(features=8, kernel_axes=("embed", "mlp"), bias_axes=("mlp",))
    params = model.init(jax.random.key(0), ones((2, 16)))["params"]
    assert params["kernel"].names == ("embed", "mlp")
    assert params["bias"].names == ("mlp",)


@pytest.mark.parametrize(("alpha", "features"), [(None, (6,)), (8.0, (3, 6))])
def test_low_rank_adaptation_adds_the_scaled_product(alpha, features):
    x = normal(jax.random.key(0), (4, 16))
    model = te_flax.DenseGeneral(
        features=features,
        enable_low_rank_adaptation=True,
        low_rank_adaptation_dim=2,
        low_rank_adaptation_alpha=alpha,
        use_bias=False,
    )
    params = init_variables(model, jax.random.key(1), x)["params"]
    assert params["lora_a_kernel"].shape == (16, *features[:-1], 2)
    assert params["lora_b_kernel"].shape == (*features[:-1], 2, features[-1])
    assert not np.asarray(params["lora_b_kernel"]).any()
    b = normal(jax.random.key(2), params["lora_b_kernel"].shape)
    low_rank = _apply_low_rank_adaptation(x, -1, features, params["lora_a_kernel"], b, alpha)
    expected = jnp.einsum(
        "bk,k...r,...rn->b...n" if len(features) == 1 else "bk,kfr,frn->bfn",
        x,
        params["lora_a_kernel"],
        b,
    )
    np.testing.assert_allclose(
        low_rank, expected * (1 if alpha is None else alpha / 2), rtol=1e-4, atol=1e-5
    )
    with_b = model.apply({"params": params | {"lora_b_kernel": b}}, x)
    np.testing.assert_allclose(
        with_b, model.apply({"params": params}, x) + low_rank, rtol=1e-4, atol=1e-5
    )
    assert _normalize_axes((-1, 0, -3), 4) == (3, 0, 1)


def test_checkpoint_names_reach_every_leaf_of_the_quantized_tensors():
    x, _, _ = inputs()
    with te.autocast(True, RECIPES["current"]):
        model = te_flax.DenseGeneral(
            features=48, use_bias=False, quantization_checkpoint_name="codes"
        )
        params = model.init(jax.random.key(0), x)
        text = str(jax.make_jaxpr(lambda p: model.apply(p, x))(params))
    assert text.count("name=codes") == 2 * 2 * 3  # two tensors, two directions, three leaves


def test_a_forced_unsupported_backend_raises_its_reason():
    x, kernel, _ = inputs()
    with (
        use_backend(jax_gemm="direct"),
        pytest.raises(RuntimeError, match=r"it needs a CUDA device|not quantized"),
    ):
        dense(x, kernel, contracting_dims=((2,), (0,)))


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: dense(ones((2, 3)), ones((4, 5))), ValueError, r"contract \(3,\) of x"),
        (lambda: dense(ones((2, 3)), ones((3, 5)), ones(4)), ValueError, r"it must be \(5,\)"),
        (
            lambda: dense(ones((2, 3)), ones((3, 5)), contracting_dims=((1,), (2,))),
            ValueError,
            "no axis 2",
        ),
        (
            lambda: dense(ones((2, 3)), ones((3, 5)), contracting_dims=((1, 0), (0,))),
            ValueError,
            "as many axes",
        ),
        (lambda: dense(ones((2, 3), jnp.float8_e4m3fn), ones((3, 5))), TypeError, "cast it"),
        (lambda: dense(ones((2, 3), jnp.int32), ones((3, 5))), TypeError, "cast it"),
        (lambda: dense(ones((2, 3)), ones((3, 5)), kernel_axes=("a",)), ValueError, "1 axes of 2"),
        (
            lambda: te_flax.DenseGeneral(4, axis=3).init(jax.random.key(0), ones((2, 3))),
            ValueError,
            "axis=3",
        ),
        (
            lambda: te_flax.DenseGeneral(0).init(jax.random.key(0), ones((2, 3))),
            ValueError,
            "features=0",
        ),
        (
            lambda: te_flax.DenseGeneral(4, kernel_axes=("a",)).init(
                jax.random.key(0), ones((2, 3))
            ),
            ValueError,
            "axes of kernel",
        ),
    ],
)
def test_a_bad_call_is_rejected_with_value_limit_and_remedy(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()


@pytest.mark.sampled
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("shapes", [((16,), (16, 8)), ((4, 16), (16,)), ((16,), (16,))], ids=str)
def test_vectors_are_multiplied_as_matrices_of_one_row_or_column(shapes, quantized):
    x, kernel = (normal(jax.random.key(n), shape) for n, shape in enumerate(shapes))
    quantizers = QuantizerSet(x=None, kernel=None, dgrad=None)
    if quantized:
        options = {"scaling_mode": ScalingMode.CURRENT_TENSOR_SCALING, "q_dtype": jnp.float8_e4m3fn}
        quantizers = QuantizerSet(*(QuantizerFactory.create(**options) for _ in range(3)))
    dims = ((x.ndim - 1,), (0,))
    reference = jnp.tensordot(x, kernel, 1)
    dy = ones(reference.shape)
    got = values_and_gradients(
        lambda x, kernel: dense(x, kernel, contracting_dims=dims, quantizer_set=quantizers),
        dy,
        x,
        kernel,
    )
    expected = values_and_gradients(lambda x, kernel: jnp.tensordot(x, kernel, 1), dy, x, kernel)
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=0.3 if quantized else 1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "transformed",
    [
        pytest.param(
            case,
            marks=() if case in ((False, True, False), (True, False, True)) else pytest.mark.slow,
        )
        for case in itertools.product((False, True), repeat=3)
    ],
    ids=str,
)
def test_a_product_undoes_a_hadamard_transform_that_only_one_operand_carries(transformed):
    """All three products equal float64 products with dequantized tensors, by quantizer with use_rht."""
    x, kernel, dy = (
        normal(jax.random.key(n), shape) for n, shape in enumerate([(32, 48), (48, 48), (32, 48)])
    )
    quantizers = QuantizerSet(
        *(
            QuantizerFactory.create(
                scaling_mode=ScalingMode.NVFP4_1D_SCALING,
                q_dtype=jnp.float4_e2m1fn,
                use_rht=use_rht,
            )
            for use_rht in transformed
        )
    )
    y, dx, dkernel, _ = values_and_gradients(
        lambda x, kernel, quantizers: dense(x, kernel, quantizer_set=quantizers),
        dy,
        x,
        kernel,
        quantizers,
    )

    @jax.jit
    def dequantized(quantizer, tensor):
        quantized = quantizer.quantize(tensor)
        return quantized.rowwise_tensor.values(), quantized.colwise_tensor.values()

    (x_rows, x_columns), (k_rows, k_columns), (dy_rows, dy_columns) = (
        [np.asarray(values, np.float64) for values in dequantized(quantizer, tensor)]
        for quantizer, tensor in (
            (quantizers.x, x),
            (quantizers.kernel, kernel),
            (quantizers.dgrad, dy),
        )
    )
    for name, got, expected in (
        ("y", y, x_rows @ k_columns),
        ("dx", dx, dy_rows @ k_rows.T),
        ("dkernel", dkernel, x_columns.T @ dy_columns),
    ):
        np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max(), err_msg=name)
