"""Grouped quantizers and products against one group at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import array, draw_variables, normal, values_and_gradients, zeros
from transformer_engine.common import recipe
from transformer_engine.jax.dense import dense, grouped_dense
from transformer_engine.jax.layernorm_dense import layernorm_dense
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.quantize import GroupedQuantizer, QuantizerFactory, ScalingMode, fan_out

SIZES = (32, 0, 64)
M, K, N = 112, 64, 48  # sixteen rows belong to no group
RECIPES = {
    "none": (None, 1e-5),
    "delayed": (recipe.DelayedScaling(amax_history_len=4), 0.09),
    "current": (recipe.Float8CurrentScaling(), 0.09),
    "block": (recipe.Float8BlockScaling(), 0.06),
    "mxfp8": (recipe.MXFP8BlockScaling(), 0.06),
    "nvfp4": (recipe.NVFP4BlockScaling(disable_stochastic_rounding=True), 0.25),
    "nvfp4 of rows": (
        recipe.NVFP4BlockScaling(
            disable_rht=True,
            disable_stochastic_rounding=True,
            row_scaled_activation=True,
            nvfp4_4over6="all",
        ),
        0.25,
    ),
}


def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    # of the elements of a group
    sizes = np.repeat(np.float32([1.0, 9.0, 0.1, 1.0]), [32, 0, 64, 16])
    x = normal(keys[0], (M, K)) * sizes[:, None]
    kernel = normal(keys[1], (3, K, N)) * array([1.0, 2.0, 5.0])[:, None, None]
    return x, kernel, normal(keys[2], (M, N)), normal(keys[3], (3, N))


def plain(x, kernel, bias):
    """One product after the other."""
    rows, begin = [], 0
    for group, size in enumerate(SIZES):
        rows.append(x[begin : begin + size] @ kernel[group] + bias[group])
        begin += size
    return jnp.concatenate([*rows, zeros((M - begin, N))])


def relative_error(got, expected) -> float:
    return float(
        np.linalg.norm(np.asarray(got) - np.asarray(expected))
        / np.linalg.norm(np.asarray(expected))
    )


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.sampled(3)
def test_a_grouped_product_equals_one_product_per_group(name):
    settings, tolerance = RECIPES[name]
    x, kernel, dy, bias = inputs()
    sizes = jnp.asarray(SIZES)
    with te.autocast(settings is not None, settings):
        quantizers = QuantizerFactory.create_set(n_groups=3)

    def ours(x, kernel, bias):
        return grouped_dense(x, kernel, sizes, bias=bias, quantizer_set=quantizers)

    actual = values_and_gradients(ours, dy, x, kernel, bias)
    for got, expected in zip(actual, values_and_gradients(plain, dy, x, kernel, bias), strict=True):
        assert relative_error(got, expected) < tolerance
    assert not np.asarray(actual[0][96:]).any()
    assert not np.asarray(actual[2][1]).any()


def test_16_bit_bias_gradients_are_summed_in_float32():
    """In bfloat16 a sum of 4096 numbers from 1 to 2 would not increase beyond 512."""
    rows, sizes = 8192, array([4096, 0, 4000])
    dy = (1.0 + jax.random.uniform(jax.random.key(0), (rows, N))).astype(jnp.bfloat16)
    x, kernel = jnp.ones((rows, 16), jnp.bfloat16), jnp.ones((3, 16, N), jnp.bfloat16)
    y, dbias = values_and_gradients(
        lambda bias: grouped_dense(x, kernel, sizes, bias=bias), dy, jnp.ones((3, N), jnp.bfloat16)
    )
    wide = np.asarray(dy, np.float32)
    np.testing.assert_allclose(
        np.asarray(dbias, np.float32),
        [wide[:4096].sum(0), np.zeros(N), wide[4096:8096].sum(0)],
        rtol=2**-8,
    )
    assert not np.asarray(y[8096:]).any()


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_group_equals_a_separate_product(name):
    x, kernel, dy, _ = inputs()
    with te.autocast(True, RECIPES[name][0]):
        quantizers, local = QuantizerFactory.create_set(n_groups=3), QuantizerFactory.create_set()
    y, dx, dkernel = values_and_gradients(
        lambda x, k: grouped_dense(x, k, jnp.asarray(SIZES), quantizer_set=quantizers),
        dy,
        x,
        kernel,
    )
    rows = slice(32, 96)
    alone = values_and_gradients(
        lambda x, k: dense(x, k, quantizer_set=local), dy[rows], x[rows], kernel[2]
    )
    for got, expected in zip((y[rows], dx[rows], dkernel[2]), alone, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


UNALIGNED = (7, 0, 20)
BLOCKS = {
    "mxfp8": recipe.MXFP8BlockScaling(),
    "block": recipe.Float8BlockScaling(),
    "square blocks": recipe.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "nvfp4": RECIPES["nvfp4"][0],
    "nvfp4 untransformed": recipe.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True
    ),
    "nvfp4 of rows": RECIPES["nvfp4 of rows"][0],
}


def products_of_groups(settings, x, dy, kernel, sizes):
    with te.autocast(True, settings):
        quantizers = QuantizerFactory.create_set(n_groups=len(sizes))
    return values_and_gradients(
        lambda x, k: grouped_dense(x, k, jnp.asarray(sizes), quantizer_set=quantizers),
        dy,
        x,
        kernel,
    )


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.sampled(3)
def test_blocks_and_second_level_scales_never_span_two_groups(name):
    """The groups differ by factors of 100, and no group size is a multiple of the block length."""
    x, kernel, dy, _ = inputs()
    sizes = np.repeat(np.float32([100.0, 1.0, np.nan]), [7, 20, M - 27])[:, None]
    actual = products_of_groups(BLOCKS[name], x * sizes, dy * sizes, kernel, UNALIGNED)
    with te.autocast(True, BLOCKS[name]):
        local = QuantizerFactory.create_set()
    for group, rows in ((0, slice(0, 7)), (2, slice(7, 27))):
        padded = [
            jnp.zeros((128, a.shape[1])).at[: rows.stop - rows.start].set((a * sizes)[rows])
            for a in (x, dy)
        ]
        alone = values_and_gradients(
            lambda x, k: dense(x, k, quantizer_set=local), padded[1], padded[0], kernel[group]
        )
        count = rows.stop - rows.start
        for got, expected in (
            (actual[0][rows], alone[0][:count]),
            (actual[1][rows], alone[1][:count]),
        ):
            np.testing.assert_allclose(
                got, expected, rtol=1e-5, atol=1e-5 * float(jnp.abs(expected).max())
            )
        # A transform of fewer than 16 rows spreads rounding errors to rows that only the separate product has.
        tolerance = 0.15 if name == "nvfp4" else 1e-5
        assert relative_error(actual[2][group], alone[2]) < tolerance


@pytest.mark.parametrize("spare", [np.nan, np.inf, 1e4])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.sampled(3)
def test_rows_after_the_last_group_have_no_effect(name, spare):
    x, kernel, dy, _ = inputs()
    end = sum(UNALIGNED)
    actual, expected = (
        products_of_groups(
            BLOCKS[name], x.at[end:].set(fill), dy.at[end:].set(fill), kernel, UNALIGNED
        )
        for fill in (spare, 0.0)
    )
    for got, reference in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(got, reference)


def test_every_group_advances_its_own_state():
    x, kernel, _, _ = inputs()
    with te.autocast(True, RECIPES["delayed"][0]):
        quantizers = QuantizerFactory.create_set(n_groups=3)

    @jax.jit
    def following(quantizers):
        def loss(quantizers):
            one, other = fan_out(quantizers, 2)
            y = grouped_dense(x, kernel, jnp.asarray(SIZES), quantizer_set=one)
            return (y + grouped_dense(2 * x, kernel, jnp.asarray(SIZES), quantizer_set=other)).sum()

        return jax.grad(loss)(quantizers)

    after = following(quantizers)
    amaxes = [2 * jnp.abs(x[:32]).max(), 0, 2 * jnp.abs(x[32:96]).max()]
    np.testing.assert_array_equal(after.x.quantizer.amax_history[:, -1], jnp.asarray(amaxes))
    np.testing.assert_allclose(
        after.x.quantizer.scale, [448 / amaxes[0], 1, 448 / amaxes[2]], rtol=1e-6
    )
    np.testing.assert_array_equal(
        after.kernel.quantizer.amax_history[:, -1], jnp.abs(kernel).max(axis=(1, 2))
    )


def test_checkpoint_names_reach_codes_scales_and_maxima_of_groups():
    x, kernel, _, _ = inputs()
    module = te_flax.make_grouped_dense_cls(RECIPES["current"][0], "codes")
    sizes = jnp.asarray(SIZES)
    with te.autocast(True, RECIPES["current"][0]):
        text = str(jax.make_jaxpr(lambda x, kernel: module.apply({}, x, kernel, sizes))(x, kernel))
    # Both directions for rows and for matrices, which share a scale and a maximum.
    assert text.count("name=codes") == 2 * (2 + 1 + 1)


@pytest.mark.parametrize("mode", [ScalingMode.CURRENT_TENSOR_SCALING, ScalingMode.MXFP8_1D_SCALING])
def test_dequantized_groups_are_within_the_formats_rounding_error(mode):
    x, kernel, _, _ = inputs()
    quantizer = QuantizerFactory.create(scaling_mode=mode, q_dtype=jnp.float8_e4m3fn, n_groups=3)
    assert isinstance(quantizer, GroupedQuantizer)

    @jax.jit
    def there_and_back(x, kernel):
        rows, stack = (
            quantizer.quantize(x, group_sizes=jnp.asarray(SIZES)),
            quantizer.quantize(kernel),
        )
        wide = kernel[:, :, None].repeat(2, axis=2)  # [G, K, 2, N], whose columns are two axes
        tensors = (rows, x), (stack, kernel), (quantizer.quantize(wide, flatten_axis=-2), wide)
        for tensor, values in tensors:
            for one in (tensor, tensor.rowwise_tensor, tensor.colwise_tensor):
                assert one.shape == values.shape
        outputs = [
            [t.rowwise_tensor.dequantize(), t.colwise_tensor.dequantize()] for t in (rows, stack)
        ]
        return *outputs, rows.dequantize()

    rows, stack, full = there_and_back(x, kernel)
    end = sum(SIZES)  # rows after the last group have no columnwise blocks
    for directions, values in (([direction[:end] for direction in rows], x[:end]), (stack, kernel)):
        for direction in directions:
            assert relative_error(direction, values) < 0.04
    # With one scale per group, a small group keeps its precision next to a large one.
    assert relative_error(full[32:96], x[32:96]) < 0.04


def test_the_grouped_module_keeps_one_state_per_group():
    x, kernel, _, _ = inputs()
    module = te_flax.make_grouped_dense_cls(RECIPES["delayed"][0])
    variables = draw_variables(module, x, kernel, jnp.asarray(SIZES))
    state = variables["_overwrite_with_gradient"]
    assert state["kernel_scale"].shape == (3,)
    assert state["grad_amax_history"].shape == (3, 4)
    after = jax.jit(jax.grad(lambda v: module.apply(v, x, kernel, jnp.asarray(SIZES)).sum()))(
        variables
    )
    assert not np.array_equal(
        after["_overwrite_with_gradient"]["kernel_scale"], state["kernel_scale"]
    )

    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x):
            return te_flax.make_grouped_dense_cls(None)(x, kernel, jnp.asarray(SIZES))

    np.testing.assert_allclose(
        Experts().apply({}, x), plain(x, kernel, zeros((3, N))), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"group_sizes": jnp.ones(2, jnp.int32)}, ValueError, "give 3 whole numbers"),
        ({"group_sizes": jnp.ones(3)}, TypeError, "give an array of integers"),
        ({"kernel": jnp.ones((3, 8, N))}, ValueError, "both must be equal"),
        ({"bias": jnp.ones(3)}, ValueError, r"it must be \(3, 48\)"),
        ({"contracting_dims": ((0,), (1,))}, ValueError, "contracting_dims"),
        ({"group_offset": zeros(1)}, NotImplementedError, "kernels of all groups"),
        ({"x": jnp.ones((2, 3, 4))}, ValueError, r"give \[M, K\]"),
        ({"x": jnp.ones((M, K), jnp.int32)}, TypeError, "cast it"),
    ],
)
def test_a_bad_grouped_call_is_rejected_with_value_limit_and_remedy(change, error, sentence):
    x, kernel, _, _ = inputs()
    with pytest.raises(error, match=sentence):
        grouped_dense(**({"x": x, "kernel": kernel, "group_sizes": jnp.asarray(SIZES)} | change))


def test_single_tensor_quantizers_are_rejected_for_groups():
    x, kernel, _, _ = inputs()
    with te.autocast(True, RECIPES["current"][0]):
        single, five = QuantizerFactory.create_set(), QuantizerFactory.create_set(n_groups=5)
    with pytest.raises(TypeError, match="make the set with n_groups=3"):
        grouped_dense(x, kernel, jnp.asarray(SIZES), quantizer_set=single)
    with pytest.raises(ValueError, match="the quantizer was made for 5"):
        grouped_dense(x, kernel, jnp.asarray(SIZES), quantizer_set=five)


def test_group_quantizers_are_rejected_for_single_tensors():
    """Without the check, a TypeError would name a missing argument in GroupedQuantizer.encode."""
    x, kernels, _, _ = inputs()
    kernel, ones = kernels[0], jnp.ones(K)
    with te.autocast(True, RECIPES["current"][0]):
        single, five = QuantizerFactory.create_set(), QuantizerFactory.create_set(n_groups=5)
    words = "is a GroupedQuantizer of n_groups=5 in a product without groups; make the set without n_groups"
    with pytest.raises(TypeError, match=f"^quantizer_set.x {words}"):
        dense(x, kernel, quantizer_set=five)
    with pytest.raises(TypeError, match=f"^quantizer_set.x {words}"):
        layernorm_dense(x, kernel, ones, None, norm_type="rmsnorm", quantizer_set=five)
    for sets, index in (((five, single), 0), ((single, five), 1)):
        with pytest.raises(TypeError, match=rf"^quantizer_sets\[{index}\].x {words}"):
            layernorm_mlp(
                x,
                ones,
                None,
                (kernel[:, None], kernel.T),
                (None, None),
                "rmsnorm",
                quantizer_sets=sets,
            )


@pytest.mark.parametrize("name", ["none", "current", "mxfp8"])
@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, None), (None, None, 0), (1, 3, 0)])
@pytest.mark.sampled(1)
def test_vmap_of_a_grouped_product_runs_calls_in_sequence(name, mapped):
    """JAX rejects its own ragged products there: "ragged_dot vmap over any dim but 0 - NYI"."""
    x, kernel, dy, _ = inputs()
    with te.autocast(name != "none", RECIPES[name][0]):
        quantizers = QuantizerFactory.create_set(n_groups=3)

    def gradients(x, kernel, sizes):
        def product(x, kernel):
            return grouped_dense(x, kernel, sizes, quantizer_set=quantizers)

        return values_and_gradients(product, dy, x, kernel)

    several = [
        (x, x * 0.5 + 0.1),
        (kernel, -3 * kernel),
        (jnp.asarray(SIZES), jnp.asarray((0, 40, 16))),
    ]
    args = [
        members[0] if axis is None else jnp.stack(members, axis)
        for members, axis in zip(several, mapped, strict=True)
    ]
    actual = jax.jit(jax.vmap(gradients, in_axes=mapped))(*args)
    for turn in range(2):
        alone = gradients(
            *(
                members[0 if axis is None else turn]
                for members, axis in zip(several, mapped, strict=True)
            )
        )
        for got, expected in zip(actual, alone, strict=True):
            np.testing.assert_allclose(
                got[turn], expected, rtol=1e-5, atol=1e-5 * float(abs(expected).max())
            )


def test_a_gradient_through_vmap_and_forward_mode_agree_with_plain_products():
    x, kernel, dy, bias = inputs()
    sizes, bias = jnp.asarray(SIZES), jnp.zeros_like(bias)

    def losses(product):
        def loss(x, kernel):
            return ((jax.vmap(product, in_axes=(None, 0))(x, kernel) * dy) ** 2).sum()

        return loss

    kernels = jnp.stack([kernel, kernel[::-1]])
    ways = x * 0.5 + 0.1, jnp.cos(kernels)

    def along(loss):
        gradient = jax.grad(loss, (0, 1))
        return jax.jit(lambda x, kernels: jax.jvp(gradient, (x, kernels), ways))(x, kernels)

    actual = along(losses(lambda x, kernel: grouped_dense(x, kernel, sizes)))
    expected = along(losses(lambda x, kernel: plain(x, kernel, bias)))
    for got, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            got, reference, rtol=1e-4, atol=1e-4 * float(abs(reference).max())
        )
