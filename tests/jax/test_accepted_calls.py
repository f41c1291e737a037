"""Calls that the original supports are computed, with a warning where an argument has no effect."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import (
    array,
    draw_unboxed_variables,
    draw_variables,
    normal,
    ones,
    values_and_gradients,
    zeros,
)
from transformer_engine.common import recipe
from transformer_engine.common.formats import E4M3, MXFP8
from transformer_engine.common.warning import forget_issued
from transformer_engine.jax import cpp_extensions, quantize, sharding
from transformer_engine.jax.dense import dense
from transformer_engine.jax.flax.transformer import (
    LoRAScope,
    _canonicalize_lora_scope,
    rotary_pos_emb,
)
from transformer_engine.jax.primitives.quantize import QuantizeSpec
from transformer_engine.jax.primitives.quantize.formats import tile_scaled
from transformer_engine.jax.quantize import (
    QuantizeLayout,
    QuantizerFactory,
    QuantizerSet,
    ScalingMode,
)
from transformer_engine.jax.softmax import SoftmaxFusionType, softmax

LAYER = {
    "hidden_size": 16,
    "mlp_hidden_size": 24,
    "num_attention_heads": 2,
    "attention_dropout": 0.0,
}


@pytest.fixture(autouse=True)
def _warnings_are_new():
    forget_issued()


def draw_normal(*shape, seed=0):
    return normal(jax.random.key(seed), shape)


@pytest.mark.parametrize(
    "kind", [SoftmaxFusionType.SCALED, SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED]
)
def test_a_softmax_that_reads_no_mask_ignores_it_with_one_warning(kind):
    scores, mask = draw_normal(1, 2, 4, 4), np.ones((1, 1, 4, 4), bool)
    with pytest.warns(UserWarning, match="does not read it") as observed:
        got = [softmax(scores, mask, 0.5, kind) for _ in range(2)]
    assert len(observed) == 1
    for one in got:
        np.testing.assert_array_equal(one, softmax(scores, None, 0.5, kind))


def test_an_unknown_scope_warns_and_adapts_nothing():
    with pytest.warns(UserWarning, match="low_rank_adaptation_scope='some' is unknown"):
        assert _canonicalize_lora_scope("some") == LoRAScope()


def test_an_encoder_ignores_the_encoders_output_with_a_warning():
    x = draw_normal(1, 4, 16)
    model = te_flax.TransformerLayer(**LAYER, hidden_dropout=0.0)
    variables = draw_unboxed_variables(model, x, deterministic=True)
    with pytest.warns(UserWarning, match="encoded was given"):
        got = jax.jit(lambda x: model.apply(variables, x, x, deterministic=True))(x)
    expected = jax.jit(lambda x: model.apply(variables, x, deterministic=True))(x)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["hidden_dropout", "drop_path"])
def test_drop_rate_1_returns_the_residual(name):
    x = draw_normal(2, 4, 16)
    model = te_flax.TransformerLayer(**LAYER, **({"hidden_dropout": 0.0} | {name: 1.0}))
    variables = draw_unboxed_variables(model, x)
    y = jax.jit(lambda x: model.apply(variables, x, rngs={"dropout": jax.random.key(2)}))(x)
    np.testing.assert_array_equal(y, x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn),
        (ScalingMode.BLOCK_1D_SCALING, jnp.float8_e4m3fn),
        pytest.param(ScalingMode.NVFP4_1D_SCALING, jnp.float4_e2m1fn, marks=pytest.mark.slow),
    ],
)
def test_row_wise_tensors_of_block_formats_are_multiplied_in_any_order_of_axes(mode, dtype):
    x, kernel = draw_normal(128, 256), draw_normal(256, 128, seed=1)
    one = QuantizerFactory.create(scaling_mode=mode, q_dtype=dtype, q_layout=QuantizeLayout.ROWWISE)
    dy = draw_normal(128, 128, seed=2)
    y, dx, dkernel = values_and_gradients(
        lambda x, k: dense(x, k, quantizer_set=QuantizerSet(one, one, one)), dy, x, kernel
    )
    dequantized = jax.jit(lambda array: one.quantize(array).dequantize())
    *wide, wide_dy = (np.asarray(dequantized(array), np.float64) for array in (x, kernel, dy))
    np.testing.assert_allclose(y, wide[0] @ wide[1], atol=1e-3)
    np.testing.assert_allclose(dx, wide_dy @ wide[1].T, atol=2e-3)
    np.testing.assert_allclose(dkernel, wide[0].T @ wide_dy, atol=2e-3)


def test_mxfp8_warns_once_of_blocks_that_are_not_full():
    one = QuantizerFactory.create(
        scaling_mode=ScalingMode.MXFP8_1D_SCALING, q_dtype=jnp.float8_e4m3fn
    )
    with pytest.warns(UserWarning, match=r"\[M=17, K=48\] is quantized to MXFP8") as observed:
        for _ in range(2):
            one.quantize(draw_normal(17, 48))
    assert len(observed) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.quantize(draw_normal(32, 64))


def test_max_timescale_may_be_below_min_timescale():
    x = draw_normal(1, 3, 1, 4)
    phase = np.arange(3)[:, None] / (100.0 * (2.0 / 100.0) ** (np.arange(2) / 2))
    z = (np.asarray(x[0, :, 0, :2]) + 1j * np.asarray(x[0, :, 0, 2:])) * np.exp(1j * phase)
    got = rotary_pos_emb(x, (100.0, 2.0), False, "alternate")[0, :, 0]
    np.testing.assert_allclose(got, np.concatenate((z.real, z.imag), -1), atol=1e-6)


def test_a_head_width_may_differ_from_the_field_of_the_module():
    """head_dim only determines the scale."""
    q, k, v = draw_normal(3, 1, 4, 2, 8)
    got = te_flax.DotProductAttention(16, 2, attn_mask_type="no_mask").apply(
        {}, q, k, v, deterministic=True
    )
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0)
    np.testing.assert_allclose(got, jnp.einsum("bhqk,bkhd->bqhd", weights, v), atol=1e-5)


def test_names_of_bias_types_are_case_insensitive():
    q, k, v = draw_normal(3, 1, 4, 2, 8)
    bias = draw_normal(1, 2, 4, 4, seed=3)
    lower, upper = (
        te_flax.DotProductAttention(8, 2, attn_bias_type=name).apply(
            {}, q, k, v, None, bias, deterministic=True
        )
        for name in ("post_scale_bias", "POST_SCALE_BIAS")
    )
    np.testing.assert_array_equal(lower, upper)


def test_a_guard_accepts_none_as_its_resource():
    with (
        sharding.global_shard_guard(te.MeshResource()),
        sharding.global_shard_guard(None),
        pytest.raises(ValueError, match="MeshResource"),
    ):
        sharding.global_mesh_resource()


def test_quantized_operands_are_multiplied_below_the_api():
    x, kernel, bias = draw_normal(16, 32), draw_normal(32, 8, seed=1), draw_normal(8, seed=2)
    one = QuantizerFactory.create(
        scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING, q_dtype=jnp.float8_e4m3fn
    )
    tensor = one.quantize(x)
    got = cpp_extensions.gemm(tensor, kernel, bias, fuse_bias=True)
    expected = np.asarray(tensor.dequantize(), np.float64) @ np.asarray(
        kernel, np.float64
    ) + np.asarray(bias)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_product_quantizes_its_plain_operand_with_the_given_quantizer():
    x, kernel = draw_normal(16, 32), draw_normal(32, 8, seed=1)
    one, other = (
        QuantizerFactory.create(
            scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING, q_dtype=jnp.float8_e4m3fn
        )
        for _ in range(2)
    )
    tensor = one.quantize(x)
    got = cpp_extensions.gemm(tensor, kernel, rhs_quantizer=other)
    quantized = np.asarray(other.quantize(kernel).dequantize(), np.float64)
    np.testing.assert_allclose(
        got, np.asarray(tensor.dequantize(), np.float64) @ quantized, atol=1e-4
    )


def spread(*shape, seed=0):
    """Values over so many powers of two that both directions of a block format differ."""
    return draw_normal(*shape, seed=seed) * jnp.exp(5 * draw_normal(*shape, seed=seed + 10))


def test_a_product_reads_the_codes_whose_blocks_are_along_the_contracted_axis():
    lhs, rhs = spread(64, 64), spread(64, 64, seed=1)
    one = QuantizerFactory.create(
        scaling_mode=ScalingMode.MXFP8_1D_SCALING, q_dtype=jnp.float8_e4m3fn
    )
    tensors = [one.quantize(array) for array in (lhs, rhs)]
    of_columns, of_rows = (
        [
            np.asarray(getattr(tensor, f"{name}_tensor").dequantize(), np.float64)
            for tensor in tensors
        ]
        for name in ("colwise", "rowwise")
    )
    assert all(not np.array_equal(*both) for both in zip(of_columns, of_rows, strict=True))
    for dims in (((1,), (0,)), ((0,), (0,)), ((-1,), (-1,))):
        values = [(of_columns if axis == 0 else of_rows)[side] for side, (axis,) in enumerate(dims)]
        expected = np.tensordot(*values, axes=dims)
        limit = 1e-6 * np.abs(expected).max()
        for left, quantizer in ((tensors[0], None), (lhs, one)):
            actual = cpp_extensions.gemm(
                left, tensors[1], contracting_dims=dims, lhs_quantizer=quantizer
            )
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=limit)


def test_a_grouped_product_reads_the_codes_whose_blocks_are_along_the_contracted_axis():
    x, sizes = draw_normal(8, 64), np.asarray([3, 5], np.int32)
    one = QuantizerFactory.create(
        scaling_mode=ScalingMode.MXFP8_1D_SCALING, q_dtype=jnp.float8_e4m3fn, n_groups=2
    )
    tensor = one.quantize(spread(2, 64, 64))
    columns, rows = (one.dequantize() for one in (tensor.colwise_tensor, tensor.rowwise_tensor))
    assert not np.array_equal(columns, rows)
    for dims, values in ((((1,), (1,)), columns), (((1,), (2,)), rows)):
        expected = cpp_extensions.grouped_gemm(x, values, sizes, dims)
        np.testing.assert_array_equal(cpp_extensions.grouped_gemm(x, tensor, sizes, dims), expected)


def test_results_of_quantize_without_a_quantizer_are_multiplied():
    x, kernel = draw_normal(16, 32), draw_normal(32, 8, seed=1)
    one = QuantizerFactory.create(
        scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING, q_dtype=jnp.float8_e4m3fn
    )
    plain = [cpp_extensions.quantize(array, None) for array in (x, kernel)]
    np.testing.assert_array_equal(cpp_extensions.gemm(*plain), cpp_extensions.gemm(x, kernel))
    tensor = one.quantize(x)
    np.testing.assert_array_equal(
        cpp_extensions.gemm(tensor, plain[1]), cpp_extensions.gemm(tensor, kernel)
    )


@pytest.mark.parametrize("mode", [mode for mode in ScalingMode if mode.name.startswith("NVFP4")])
def test_every_variant_of_nvfp4_is_nvfp4_scaling(mode):
    assert mode.is_nvfp4_scaling


@pytest.mark.slow
def test_an_amax_scope_is_a_manual_axis_of_the_mesh_resource():
    x = draw_normal(8, 16)
    one = QuantizerFactory.create(
        scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING, q_dtype=jnp.float8_e4m3fn
    )
    scope, spec = cpp_extensions.quantization.AmaxScope.TPSP, jax.sharding.PartitionSpec("tpsp")
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("tpsp",))

    def values(x):
        return cpp_extensions.quantize(x, one, amax_scope=scope).rowwise_tensor.dequantize()

    with jax.set_mesh(mesh), sharding.global_shard_guard(te.MeshResource(tpsp_resource="tpsp")):
        assert scope.axes() == ()
        within = jax.shard_map(values, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        text = str(jax.make_jaxpr(within)(x))
        got = within(x)
    assert "pmax" in text
    np.testing.assert_array_equal(got, one.quantize(x).rowwise_tensor.dequantize())


def test_grouped_products_below_the_api_take_a_bias_and_transposed_matrices():
    x, kernel, bias = draw_normal(8, 16), draw_normal(2, 4, 16, seed=1), draw_normal(2, 4, seed=2)
    sizes = np.asarray([3, 5], np.int32)
    got = cpp_extensions.grouped_gemm(x, kernel, sizes, contracting_dims=((1,), (2,)), bias=bias)
    group = np.repeat([0, 1], sizes)
    expected = (
        np.einsum("mk,mnk->mn", np.asarray(x, np.float64), np.asarray(kernel)[group])
        + np.asarray(bias)[group]
    )
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("words", [2, 4, 8])
def test_stochastic_rounding_takes_raw_words_of_any_number(words):
    x = draw_normal(32, 64)
    state = np.arange(1, words + 1, dtype=np.uint32)

    def codes(state):
        one = QuantizerFactory.create(
            scaling_mode=ScalingMode.NVFP4_1D_SCALING,
            q_dtype=jnp.float4_e2m1fn,
            q_layout=QuantizeLayout.ROWWISE,
            stochastic_rounding_rng_state=jnp.asarray(state),
        )
        return np.asarray(one.quantize(x).dequantize())

    np.testing.assert_array_equal(codes(state), codes(state))
    for index in range(words):
        assert not np.array_equal(
            codes(state), codes(state + (np.arange(words) == index).astype(np.uint32))
        )


def test_a_grouped_quantizer_has_one_quantizer_for_each_group():
    grouped = QuantizerFactory.create(
        scaling_mode=ScalingMode.DELAYED_TENSOR_SCALING, q_dtype=jnp.float8_e4m3fn, n_groups=3
    )
    stack = draw_normal(3, 8, 16) * array([1.0, 2.0, 3.0])[:, None, None]
    singles = grouped.quantizers
    tensors = [one.quantize(matrix) for one, matrix in zip(singles, stack, strict=True)]
    values = grouped.quantize(stack).rowwise_tensor.dequantize()
    for index, (one, tensor, after) in enumerate(
        zip(singles, tensors, grouped.quantizers, strict=True)
    ):
        np.testing.assert_array_equal(values[index], tensor.rowwise_tensor.dequantize())
        np.testing.assert_array_equal(one.scale, after.scale)
        np.testing.assert_array_equal(one.amax_history, after.amax_history)


def test_extents_of_groups_may_be_given_as_first_or_last_dims():
    data, sizes = ones((4, 8), jnp.float8_e4m3fn), array([1, 3], jnp.int32)
    options = {"scaling_mode": ScalingMode.CURRENT_TENSOR_SCALING, "dq_dtype": jnp.float32}
    scales = array([2.0, 3.0])
    rows = quantize.GroupedScaledTensor1x(data, scales, zeros(0), first_dims=sizes, **options)
    columns = quantize.GroupedScaledTensor1x(
        data.T, scales, zeros(0), last_dims=sizes, is_colwise=True, data_layout="T", **options
    )
    assert rows.first_dims is sizes and rows.last_dims is None
    assert columns.last_dims is sizes and columns.first_dims is None
    for tensor in (rows, columns, jax.tree.map(lambda leaf: leaf, rows)):
        np.testing.assert_array_equal(tensor.dequantize()[:, 0], [2.0, 3.0, 3.0, 3.0])


def test_a_config_has_the_switches_of_nvfp4():
    config = quantize.get_quantize_config_with_recipe(
        fp8_recipe=recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
    )
    assert config.INITIALIZED and config.DISABLE_RHT and config.DISABLE_STOCHASTIC_ROUNDING
    assert not config.DISABLE_2D_QUANTIZATION
    assert not quantize.get_quantize_config_with_recipe(None).INITIALIZED


def test_keywords_of_recipes():
    assert quantize.is_quantize_recipe_supported(recipe_name="DelayedScaling") == (True, "")
    x = draw_normal(16, 16)
    dot_general = te_flax.make_dot_general_cls(quantization_recipe=recipe.Float8CurrentScaling())
    model = nn.Dense(8, dot_general=dot_general())
    assert model.apply(model.init(jax.random.key(0), x), x).shape == (16, 8)


def test_the_softmax_of_packed_attention_is_optional():
    q, k, v = draw_normal(3, 1, 8, 2, 8)
    lengths, offsets = array([[3, 5]], jnp.int32), array([[0, 3, 8]], jnp.int32)
    attention = te.attention
    first = (
        (q, k, v),
        None,
        lengths,
        lengths,
        offsets,
        offsets,
        None,
        attention.AttnBiasType.NO_BIAS,
        attention.AttnMaskType.PADDING_CAUSAL_MASK,
        attention.QKVLayout.THD_THD_THD,
    )
    rest = (0.3, 0.0, True, 2)
    expected = attention.fused_attn_thd(*first, attention.AttnSoftmaxType.VANILLA_SOFTMAX, *rest)
    np.testing.assert_array_equal(attention.fused_attn_thd(*first, *rest), expected)
    for options in ({}, {"softmax_type": attention.AttnSoftmaxType.VANILLA_SOFTMAX}):
        names = ("scaling_factor", "dropout_probability", "is_training", "max_segments_per_seq")
        got = attention.fused_attn_thd(*first, **dict(zip(names, rest, strict=True)), **options)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("text", ["false", "3", "0.5", "name"])
def test_flags_of_xla_are_python_values(monkeypatch, text):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_of_a_test={text} --xla_alone")
    expected = {"false": False, "3": 3, "0.5": 0.5, "name": "name"}[text]
    actual = cpp_extensions.misc.get_xla_flag("--xla_of_a_test")
    assert actual == expected and type(actual) is type(expected)
    assert cpp_extensions.misc.get_xla_flag("--xla_of_a_test", cast=str) == text
    assert cpp_extensions.misc.get_xla_flag("--xla_alone") is True
    assert cpp_extensions.misc.get_xla_flag("--xla_absent", 7) == 7


def mxfp8(**options):
    return QuantizeSpec(MXFP8, E4M3, **options)


def test_partial_blocks_of_mxfp8_warn_once_for_all_shapes():
    with pytest.warns(UserWarning, match="pad M to a multiple of 32") as observed:
        for rows in (33, 34, 35):
            tile_scaled.check_mxfp8(rows, 64, mxfp8(columnwise=True))
    assert len(observed) == 1


@pytest.mark.parametrize(
    ("shape", "spec", "extents"),
    [
        ((33, 64), mxfp8(), None),
        ((33, 64), mxfp8(two_dimensional=True), "M"),
        ((64, 33), mxfp8(), "K"),
        ((64, 33), mxfp8(rowwise=False, columnwise=True), None),
        ((33, 33), mxfp8(columnwise=True), "K and M"),
    ],
)
def test_mxfp8_warns_about_extents_along_blocks_only(shape, spec, extents):
    with warnings.catch_warnings(record=True) as observed:
        warnings.simplefilter("always")
        tile_scaled.check_mxfp8(*shape, spec)
    assert [f"pad {extents} to" in str(one.message) for one in observed] == (
        [] if extents is None else [True]
    )


@pytest.mark.parametrize("margin", [0.0, "0", np.int64(0)])
def test_margin_of_delayed_scaling_may_be_given_in_any_form(margin):
    x, outputs = draw_normal(32, 64), []
    for argument in (0, margin):
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(margin=argument)):
            module = te_flax.DenseGeneral(features=32)
            variables = draw_variables(module, x)
            outputs.append(module.apply(variables, x))
    np.testing.assert_array_equal(*outputs)
