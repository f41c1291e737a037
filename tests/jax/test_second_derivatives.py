"""Derivatives of codes: right if nothing is quantized, an error otherwise, never rounded to FP8."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.compiled import array, normal
from transformer_engine.common import recipe
from transformer_engine.jax import quantize
from transformer_engine.jax.activation import activation
from transformer_engine.jax.dense import dense, grouped_dense
from transformer_engine.jax.layernorm import layernorm
from transformer_engine.jax.layernorm_dense import layernorm_dense
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.quantize import QuantizerFactory, ScalingMode
from transformer_engine.jax.runtime.undifferentiated import like

RECIPES = [
    recipe.DelayedScaling(),
    recipe.Float8CurrentScaling(),
    recipe.Float8BlockScaling(),
    recipe.MXFP8BlockScaling(),
    recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
]
MODES = [mode for mode in ScalingMode if mode is not ScalingMode.NO_SCALING]
HIDDEN = 32


def arrays(*shapes):
    return [normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def sets(chosen, count=1, **options):
    """Quantizer sets for a recipe, or without a recipe."""
    meta = quantize.QuantizeMetaSet(*(quantize.QuantizeMeta() for _ in range(3)))
    if chosen is None:
        return (quantize.noop_quantizer_set,) * count
    result = QuantizerFactory.create_set(
        count, fp8_recipe=chosen, quantize_meta_set=meta, **options
    )
    return result if count > 1 else (result,)


def functions(chosen):
    """{name: function from x [64, 32] to y} for every function that takes quantizer sets."""
    kernel, second, gamma, beta = arrays((HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN,))
    one, two = sets(chosen), sets(chosen, 2)
    grouped = sets(chosen, n_groups=2)[0]
    return {
        "dense": lambda x: dense(x, kernel, quantizer_set=one[0]),
        "layernorm_dense": lambda x: layernorm_dense(x, kernel, gamma, beta, quantizer_set=one[0]),
        "layernorm_mlp": lambda x: layernorm_mlp(
            x, gamma, beta, (kernel[:, None], second), (None, None), "layernorm", quantizer_sets=two
        ),
        "grouped_dense": lambda x: grouped_dense(
            x, jnp.stack([kernel, second]), array([32, 32]), quantizer_set=grouped
        ),
    }


def penalty(y_of):
    """A function of the gradient, as gradient penalties and products with a Hessian are."""
    return lambda x: (jax.grad(lambda x: (y_of(x) ** 2).sum())(x) ** 2).sum()


OPERATIONS = ("dense", "layernorm_dense", "layernorm_mlp", "grouped_dense")
# Every operation under the first recipe, every recipe with one operation.
ALWAYS = [
    *((0, operation) for operation in OPERATIONS),
    *((index, "layernorm_mlp") for index in range(1, len(RECIPES))),
]


@pytest.mark.parametrize(
    ("chosen", "operation"),
    [
        pytest.param(
            chosen,
            operation,
            id=f"{type(chosen).__name__}-{operation}",
            marks=[] if (index, operation) in ALWAYS else pytest.mark.slow,
        )
        for index, chosen in enumerate(RECIPES)
        for operation in OPERATIONS
    ],
)
@pytest.mark.sampled(3)
def test_a_second_derivative_through_codes_is_rejected(chosen, operation):
    """Without the error it would be 0 for a dense layer, and a part of the right one after a norm."""
    (x,) = arrays((64, HIDDEN))
    y_of = functions(chosen)[operation]
    assert jax.eval_shape(penalty(y_of), x).shape == ()
    for transformed in (penalty(y_of), jax.jit(penalty(y_of)), penalty(jax.checkpoint(y_of))):
        with pytest.raises(NotImplementedError, match=r"codes have no derivative.*enabled=False"):
            jax.eval_shape(jax.grad(transformed), x)


@pytest.mark.parametrize("function", [layernorm, activation])
def test_a_second_derivative_through_a_quantizer_behind_a_function_is_rejected(function):
    (x, gamma) = arrays((64, HIDDEN), (HIDDEN,))
    quantizer = QuantizerFactory.create(
        scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING, q_dtype=jnp.float8_e4m3fn
    )

    def output_value(x):
        if function is layernorm:
            return layernorm(x, gamma, None, "rmsnorm", quantizer=quantizer)
        return activation(x[:, None], ("gelu",), quantizer)

    with pytest.raises(NotImplementedError, match="codes have no derivative"):
        jax.eval_shape(jax.grad(penalty(output_value)), x)


@pytest.mark.parametrize("operation", ["layernorm_dense", "layernorm_mlp", "grouped_dense"])
def test_without_a_recipe_second_derivatives_match_finite_differences(operation):
    x, direction = arrays((64, HIDDEN), (64, HIDDEN))
    of = penalty(functions(None)[operation])
    result = float((jax.jit(jax.grad(of))(x) * direction).sum())
    step = 1e-2 * direction
    high, low = (float(jax.jit(of)(x + sign * step)) for sign in (1, -1))
    np.testing.assert_allclose(result, (high - low) / 2e-2, rtol=2e-2)


def test_an_eager_placeholder_of_an_array_copies_no_elements():
    """Adding and slicing a leading axis would copy every kernel of an eager step."""
    (x,) = arrays((64, HIDDEN))
    steps = jax.make_jaxpr(like)(x).eqns
    assert steps and all(result.aval.size == 0 for step in steps for result in step.outvars)
    assert like(x).shape == (0, 64, HIDDEN) and like(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_derivatives_that_bypass_the_codes_are_computed():
    """A gradient that is used, and not differentiated, does not raise the error."""
    (x,) = arrays((64, HIDDEN))
    y_of = functions(recipe.Float8CurrentScaling())["layernorm_mlp"]
    gradient = jax.grad(lambda x: (y_of(x) ** 2).sum())

    def scaled(factor, x):
        return (factor * jax.lax.stop_gradient(gradient(x)) * x).sum()

    by_factor, by_x = jax.jit(jax.grad(scaled, (0, 1)))(2.0, x)
    expected = jax.jit(gradient)(x)
    np.testing.assert_allclose(by_factor, (expected * x).sum(), rtol=1e-4)
    np.testing.assert_allclose(
        by_x, 2 * expected, rtol=1e-5, atol=1e-5 * float(abs(expected).max())
    )


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.sampled(2)
def test_codes_have_no_derivative_and_straight_through_values_do(mode):
    """JAX would round the cotangent to FP8 without a scale: 1e-4 came back as 0."""
    (x,) = arrays((32, 128))
    dtype = jnp.float4_e2m1fn if "NVFP4" in mode.name else jnp.float8_e4m3fn
    quantizer = QuantizerFactory.create(
        scaling_mode=mode, q_dtype=dtype, q_layout=quantize.QuantizeLayout.ROWWISE
    )

    def round_values(x):
        return quantizer.quantize(x).dequantize()

    with pytest.raises(
        NotImplementedError, match=r"codes, of \[32, 128\] float32, .*stop_gradient"
    ):
        jax.grad(lambda x: (1e-4 * round_values(x)).sum())(x)

    def straight(x):
        y = x + jax.lax.stop_gradient(round_values(x) - x)
        return (1e-4 * y).sum()

    np.testing.assert_array_equal(
        jax.jit(jax.grad(straight))(x), np.full(x.shape, 1e-4, np.float32)
    )


@pytest.mark.slow
def test_codes_of_rows_in_groups_are_not_differentiated():
    (x,) = arrays((64, HIDDEN))
    quantizer = QuantizerFactory.create(
        scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING,
        q_dtype=jnp.float8_e4m3fn,
        q_layout=quantize.QuantizeLayout.ROWWISE,
        n_groups=2,
    )
    for shape, sizes in ((x.shape, array([30, 34])), ((2, 32, HIDDEN), None)):
        with pytest.raises(NotImplementedError, match="codes have no derivative"):
            jax.grad(
                lambda x, sizes=sizes: quantizer.quantize(x, group_sizes=sizes).dequantize().sum()
            )(x.reshape(shape))


def test_a_gradient_of_kernels_of_groups_is_differentiated():
    """JAX raises "Unimplemented grad_y_dims for ragged dot general" here, also for mixtures of experts."""
    x, kernel, x_way, kernel_way = arrays((12, 8), (3, 8, 5), (12, 8), (3, 8, 5))
    sizes = np.asarray([3, 0, 7])
    rows = np.pad(np.repeat(np.eye(3, dtype=np.float32), sizes, axis=0), ((0, 2), (0, 0)))

    def plain(x, kernel):
        return jnp.einsum("mg,mk,gkn->mn", rows, x, kernel)

    def grouped(x, kernel):
        return grouped_dense(x, kernel, jnp.asarray(sizes))

    def product_with_hessian(y_of):
        gradient = jax.grad(lambda x, kernel: (y_of(x, kernel) ** 3).sum(), (0, 1))

        def along(x, kernel):
            dx, dkernel = gradient(x, kernel)
            return (dx * x_way).sum() + (dkernel * kernel_way).sum()

        return jax.jit(jax.grad(along, (0, 1)))(x, kernel)

    for actual, expected in zip(
        product_with_hessian(grouped), product_with_hessian(plain), strict=True
    ):
        np.testing.assert_allclose(
            actual, expected, rtol=2e-5, atol=2e-5 * float(abs(expected).max())
        )
