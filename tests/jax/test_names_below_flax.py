"""Public names below Flax that are in no other test: each computes what its documentation states."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine_jax as extension
from tests.jax.compiled import array, normal
from transformer_engine.common import recipe
from transformer_engine.common.hardware import nvidia
from transformer_engine.jax import attention, ep, quantize, softmax, version_utils
from transformer_engine.jax import cpp_extensions as tex
from transformer_engine.jax.layernorm import layernorm
from transformer_engine.jax.quantize import (
    QuantizeLayout,
    QuantizerFactory,
    ScalingMode,
    TensorUsage,
    config,
)

MODES = [mode for mode in ScalingMode if mode is not ScalingMode.NO_SCALING]
TOKENS, EXPERTS, WIDTH = 6, 4, 8


@pytest.fixture
def bootstrapped():
    yield ep.ep_bootstrap(1, 0, EXPERTS, TOKENS, 64, WIDTH)
    ep.ep_finalize()


def draw_routing():
    """Tokens [T, H], two different experts for each, and weights [T, 2]."""
    tokens = normal(jax.random.key(0), (TOKENS, WIDTH))
    chosen = array([[0, 1], [1, 3], [0, 3], [3, 1], [1, 0], [3, 0]], jnp.int32)
    return tokens, chosen, jax.random.uniform(jax.random.key(1), (TOKENS, 2))


@pytest.mark.parametrize("alignment", [0, 1, 4])
def test_layer_config_uses_the_experts_of_the_bootstrap(bootstrapped, alignment):
    tokens, chosen, weights = draw_routing()
    cfg = ep.EpLayerConfig(2, alignment)

    @jax.jit
    def there_and_back(chosen, tokens, weights):
        rows, of_rows, handle, counts, total = ep.ep_dispatch(cfg, chosen, tokens, weights, 32)
        return (
            rows,
            of_rows,
            counts,
            total,
            ep.ep_combine(cfg, handle, counts, rows * of_rows[:, None], TOKENS),
        )

    rows, of_rows, counts, total, y = map(np.asarray, there_and_back(chosen, tokens, weights))
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
        np.testing.assert_array_equal(
            of_rows[starts[expert] : end], np.asarray(weights)[sources, places]
        )
        np.testing.assert_array_equal(rows[end : starts[expert] + padded[expert]], 0)
    np.testing.assert_allclose(y, tokens * np.asarray(weights).sum(1, keepdims=True), rtol=1e-5)


def test_layer_config_and_placement_dispatch_the_same_rows(bootstrapped):
    tokens, chosen, weights = draw_routing()
    first = ep.ep_dispatch(ep.EpLayerConfig(top_k=2), chosen, tokens, weights, 7)
    second = ep.ep_dispatch(bootstrapped, chosen, tokens, weights, 7)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert int(first[3].sum()) == 7  # the rows within the capacity


def test_bad_layer_configs_are_rejected():
    tokens, chosen, weights = draw_routing()
    with pytest.raises(RuntimeError, match="call ep_bootstrap or set_ep_config first"):
        ep.ep_dispatch(ep.EpLayerConfig(2), chosen, tokens, weights, 8)
    with pytest.raises(TypeError, match="cfg=3 is an int; pass an EpLayerConfig"):
        ep.ep_dispatch(3, chosen, tokens, weights, 8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="top_k=0 is below 1"):
        ep.EpLayerConfig(0)
    with pytest.raises(ValueError, match="dispatch_output_per_expert_alignment=-1 is below 0"):
        ep.EpLayerConfig(1, -1)
    ep.ep_bootstrap(1, 0, EXPERTS, TOKENS, 64, WIDTH)
    try:
        with pytest.raises(
            ValueError, match=r"topk_idx has 2 columns; EpLayerConfig\(top_k=3\) requires 3"
        ):
            ep.ep_dispatch(ep.EpLayerConfig(3), chosen, tokens, weights, 8)
    finally:
        ep.ep_finalize()


def test_bad_arguments_of_combine_are_rejected(bootstrapped):
    tokens, chosen, weights = draw_routing()
    cfg = ep.EpLayerConfig(2)
    rows, _, handle, counts, _ = ep.ep_dispatch(cfg, chosen, tokens, weights, 32)
    for error, sentence, arguments in (
        (TypeError, "handle_mem=3 is an int; give an EpHandle", (3, counts, rows, TOKENS)),
        (TypeError, "num_local_tokens='6' must be a whole number", (handle, counts, rows, "6")),
        (
            ValueError,
            "num_local_tokens=5; 6 tokens were dispatched; pass that number",
            (handle, counts, rows, 5),
        ),
        (ValueError, "token_counts add up to 12 of 3 rows", (handle, counts, rows[:3], TOKENS)),
        (
            TypeError,
            "token_counts is None; give an array of integers",
            (handle, None, rows, TOKENS),
        ),
        (ValueError, r"pass \[capacity, H\]", (handle, counts, rows[0], TOKENS)),
    ):
        with pytest.raises(error, match=sentence):
            ep.ep_combine(cfg, *arguments)
    assert ep.ep_combine(cfg, handle, counts, rows, TOKENS).shape == tokens.shape


def draw_normal(*shape, seed=0):
    return normal(jax.random.key(seed), shape)


def create_quantizer(mode, **options):
    return QuantizerFactory.create(
        scaling_mode=mode, q_dtype=mode.get_compatible_q_dtypes()[0], **options
    )


PREDICATES = {  # tensor, block, 1-D block, MXFP8, NVFP4, transposed column-wise codes
    ScalingMode.NO_SCALING: (False, False, False, False, False, True),
    ScalingMode.DELAYED_TENSOR_SCALING: (True, False, False, False, False, True),
    ScalingMode.CURRENT_TENSOR_SCALING: (True, False, False, False, False, True),
    ScalingMode.MXFP8_1D_SCALING: (False, True, True, True, False, False),
    ScalingMode.NVFP4_1D_SCALING: (False, True, True, False, True, True),
    ScalingMode.NVFP4_2D_SCALING: (False, True, False, False, True, True),
    ScalingMode.BLOCK_1D_SCALING: (False, True, True, False, False, True),
    ScalingMode.BLOCK_2D_SCALING: (False, True, False, False, False, True),
}


@pytest.mark.parametrize("mode", PREDICATES)
def test_predicates_of_a_scaling_mode(mode):
    result = (
        mode.is_tensor_scaling(),
        mode.is_block_scaling(),
        mode.is_1d_block_scaling(),
        mode.is_mxfp8_scaling,
        mode.is_nvfp4_scaling,
        mode.is_colwise_transposed,
    )
    assert result == PREDICATES[mode]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (QuantizeLayout.ROWWISE, (True, False, True, False, False)),
        (QuantizeLayout.COLWISE, (False, True, False, True, False)),
        (QuantizeLayout.ROWWISE_COLWISE, (True, True, False, False, True)),
    ],
)
def test_predicates_of_a_layout(layout, expected):
    only = (layout.is_rowwise_only, layout.is_colwise_only, layout.is_rowwise_colwise)
    assert (layout.has_rowwise, layout.has_colwise, *only) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(4)
def test_scaling_mode_dtypes_and_directions_match_its_tensors(mode):
    x = draw_normal(128, 128)
    for q_dtype in mode.get_compatible_q_dtypes():
        result = jax.eval_shape(
            QuantizerFactory.create(scaling_mode=mode, q_dtype=q_dtype).quantize, x
        )
        for tensor in (result.rowwise_tensor, result.colwise_tensor):
            assert tensor.data.dtype == q_dtype and tensor.scale_inv.dtype == mode.get_scale_dtype()
        for usage in TensorUsage:
            layout = mode.get_quantize_layout(usage)
            assert result.get_tensor(usage).is_colwise is layout.is_colwise_only
            assert layout.is_rowwise_only is (usage in (TensorUsage.LHS, TensorUsage.RHS_TRANS))


@pytest.mark.parametrize("flatten_axis", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(2)
def test_dequantized_columns_have_the_layout_of_their_data(mode, flatten_axis):
    x = draw_normal(32, 4, 64)
    q_dtype = mode.get_compatible_q_dtypes()[0]
    tensor = QuantizerFactory.create(scaling_mode=mode, q_dtype=q_dtype).quantize(
        x, flatten_axis=flatten_axis
    )
    columns = tensor.colwise_tensor
    expected = np.asarray(x)
    if columns.data_layout == "T":
        expected = expected.transpose(*range(flatten_axis, 3), *range(flatten_axis))
    assert columns.data_layout == mode.data_layout[1]
    assert columns.dequantize().shape == columns.data.shape == expected.shape
    error = np.linalg.norm(columns.dequantize() - expected) / np.linalg.norm(expected)
    assert error < (0.2 if mode.is_nvfp4_scaling else 0.05)
    np.testing.assert_array_equal(tensor.dequantize(), tensor.rowwise_tensor.dequantize())
    assert columns.values().shape == x.shape
    assert np.linalg.norm(columns.values() - x) / np.linalg.norm(expected) == pytest.approx(error)


def test_no_scaling_has_no_dtype_of_scales():
    assert ScalingMode.NO_SCALING.get_compatible_q_dtypes() == (
        jnp.float32,
        jnp.bfloat16,
        jnp.float16,
    )
    with pytest.raises(ValueError, match="NO_SCALING has no scales"):
        ScalingMode.NO_SCALING.get_scale_dtype()


def test_base_classes_cover_all_tensors():
    x, sizes = draw_normal(8, 16), array([3, 5], jnp.int32)
    mode = ScalingMode.CURRENT_TENSOR_SCALING
    both = create_quantizer(mode).quantize(x)
    grouped = create_quantizer(mode, n_groups=2).quantize(x, group_sizes=sizes)
    ones = (
        both.rowwise_tensor,
        grouped.colwise_tensor,
        quantize.NoScaleTensor(x),
        quantize.GroupedNoScaleTensor(x, group_sizes=sizes),
    )
    for tensor in (both, grouped, *ones):
        assert isinstance(tensor, quantize.AbstractBaseTensor)
        assert isinstance(tensor, quantize.AbstractBaseTensor1x) is (
            tensor is not both and tensor is not grouped
        )
    scaled = (both, grouped, *ones[:2])
    assert all(isinstance(tensor, quantize.ScaledTensor) for tensor in scaled)
    assert not any(isinstance(tensor, quantize.ScaledTensor) for tensor in ones[2:])
    with pytest.raises(TypeError, match="abstract"):
        quantize.AbstractBaseTensor()  # pyright: ignore[reportAbstractUsage]


@pytest.mark.parametrize(("capability", "supported"), [(90, False), (100, True), (120, True)])
def test_one_direction_suffices_where_products_read_all_layouts(monkeypatch, capability, supported):
    monkeypatch.setattr(config, "hardware", lambda gpu_id=0: nvidia(*divmod(capability, 10)))
    assert quantize.is_fp8_gemm_with_all_layouts_supported() is supported
    result = QuantizerFactory.create_set(
        scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING,
        fwd_dtype=jnp.float8_e4m3fn,
        bwd_dtype=jnp.float8_e5m2,
    )
    assert result.x.q_layout.is_rowwise_only is supported


@pytest.mark.parametrize(
    "name", ["device_utils", "helper", "metadata", "misc", "quantizer", "tensor"]
)
def test_modules_of_the_original_hold_the_objects_of_the_package(name):
    module = importlib.import_module(f"transformer_engine.jax.quantize.{name}")
    shared = [public for public in module.__all__ if hasattr(quantize, public)]
    assert shared and all(getattr(module, public) is getattr(quantize, public) for public in shared)


CONFIGS = {
    "DelayedScaling": {
        "MARGIN": 2.0,
        "AMAX_HISTORY_LEN": 7,
        "AMAX_COMPUTE_ALGO": quantize.AmaxComputeAlgo.MOST_RECENT,
    },
    "Float8CurrentScaling": {"MARGIN": 0.0, "AMAX_HISTORY_LEN": 0, "BWD_DTYPE": jnp.float8_e5m2},
    "MXFP8BlockScaling": {"FWD_DTYPE": jnp.float8_e4m3fn, "BWD_DTYPE": jnp.float8_e4m3fn},
    "NVFP4BlockScaling": {
        "FWD_DTYPE": jnp.float4_e2m1fn,
        "DISABLE_STOCHASTIC_ROUNDING": True,
        "DISABLE_RHT": False,
        "DISABLE_2D_QUANTIZATION": True,
    },
}
SETTINGS = {
    "DelayedScaling": {"margin": 2, "amax_history_len": 7, "amax_compute_algo": "most_recent"},
    "NVFP4BlockScaling": {"disable_stochastic_rounding": True, "disable_2d_quantization": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_has_the_settings_of_its_recipe(name):
    result = quantize.get_quantize_config_with_recipe(
        getattr(recipe, name)(**SETTINGS.get(name, {}))
    )
    assert {field: getattr(result, field) for field in CONFIGS[name]} == CONFIGS[name]
    assert result.INITIALIZED and result.is_fp8_enabled() and result.COLLECTION_NAME == "fp8_metas"
    assert result.get_scaling_mode(quantize.TensorSource.X) is not ScalingMode.NO_SCALING


def test_config_of_the_surrounding_autocast():
    assert not quantize.get_quantize_config().is_fp8_enabled()
    with quantize.autocast(True, recipe.MXFP8BlockScaling()):
        result = quantize.get_quantize_config()
    assert (
        result.is_fp8_enabled()
        and result.get_scaling_mode(quantize.TensorSource.X) is ScalingMode.MXFP8_1D_SCALING
    )


@pytest.mark.parametrize("mode", ScalingMode)
def test_transform_is_used_where_a_quantizer_of_the_recipe_applies_it(mode):
    transformed = mode.is_nvfp4_scaling and not mode.is_2d
    assert quantize.should_use_rht(mode, is_colwise=True) is transformed
    assert quantize.should_use_rht(mode, q_layout=QuantizeLayout.COLWISE) is transformed
    assert not quantize.should_use_rht(mode, is_colwise=False)
    assert not quantize.should_use_rht(mode, q_layout=QuantizeLayout.ROWWISE)
    for options in ({}, {"is_colwise": True, "q_layout": QuantizeLayout.COLWISE}):
        with pytest.raises(ValueError, match="give one of them"):
            quantize.should_use_rht(mode, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ScalingMode)
def test_each_mode_has_a_dequantizer(mode):
    x = draw_normal(128, 128)
    tensor = (
        quantize.NoScaleTensor(x) if mode.format is None else create_quantizer(mode).quantize(x)
    )
    result = quantize.ScalingModeToDequantizerMap[mode].dequantize(tensor)
    np.testing.assert_array_equal(result, tensor.dequantize())
    other = ScalingMode.NO_SCALING if mode.format is not None else ScalingMode.MXFP8_1D_SCALING
    with pytest.raises(ValueError, match=rf"this is the dequantizer of {other}"):
        quantize.ScalingModeToDequantizerMap[other].dequantize(tensor)


def test_quantize_takes_its_arguments_by_position():
    x = draw_normal(4, 8, 16)
    one = create_quantizer(ScalingMode.CURRENT_TENSOR_SCALING)
    tensor = tex.quantize(x, one, 1, tex.AmaxScope.LOCAL)
    assert tensor.rowwise_tensor.flatten_axis == 1
    repeated, dbias = tex.quantize_dbias(x, one, True, 1, tex.AmaxScope.LOCAL)
    np.testing.assert_array_equal(repeated.dequantize(), tensor.dequantize())
    np.testing.assert_allclose(dbias, x.sum(0), rtol=1e-6, atol=1e-6)
    assert tex.quantize_dbias(x, quantizer=None, is_dbias=False)[1] is None


@pytest.mark.parametrize("kind", softmax.SoftmaxFusionType)
def test_softmax_gradient_equals_the_public_function(kind):
    logits, dz = draw_normal(2, 2, 6, 6), draw_normal(2, 2, 6, 6, seed=1)
    mask = np.asarray(draw_normal(2, 1, 6, 6, seed=2)) > 0.5
    args = (mask,) if kind is softmax.SoftmaxFusionType.SCALED_MASKED else ()
    forward, backward = (
        getattr(tex, f"{kind.value}_softmax_{direction}") for direction in ("fwd", "bwd")
    )
    expected, vjp = jax.vjp(lambda x: softmax.softmax(x, *(args or (None,)), 0.5, kind), logits)
    p = forward(logits, *args, 0.5)
    np.testing.assert_array_equal(p, expected)
    np.testing.assert_allclose(backward(dz, p, 0.5), vjp(dz)[0], atol=1e-6)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layernorm_gradients_equal_the_public_function(dtype, zero_centered):
    x, dz = (draw_normal(3, 4, 16, seed=seed).astype(dtype) for seed in (0, 1))
    gamma, beta = draw_normal(16, seed=2), draw_normal(16, seed=3)
    y, mean, rstdev = tex.layernorm_fwd(x, gamma, beta, zero_centered, 1e-5)
    expected, vjp = jax.vjp(
        lambda *args: layernorm(*args, "layernorm", zero_centered, 1e-5), x, gamma, beta
    )
    np.testing.assert_array_equal(y.dequantize(), expected)
    gradients = tex.layernorm_bwd(dz, x, mean, rstdev, gamma, zero_centered, 1e-5)
    jax.tree.map(np.testing.assert_array_equal, gradients, vjp(dz))
    same = tex.normalization_bwd(dz, x, mean, rstdev, gamma, zero_centered, 1e-5, "LayerNorm")
    jax.tree.map(np.testing.assert_array_equal, same, gradients)


def test_rmsnorm_gradients_equal_the_public_function():
    x, dz, gamma = draw_normal(3, 4, 16), draw_normal(3, 4, 16, seed=1), draw_normal(16, seed=2)
    y, rstdev = tex.rmsnorm_fwd(x, gamma, False, 1e-5)
    expected, vjp = jax.vjp(
        lambda x, gamma: layernorm(x, gamma, None, "rmsnorm", False, 1e-5), x, gamma
    )
    np.testing.assert_array_equal(y.dequantize(), expected)
    gradients = tex.rmsnorm_bwd(dz, x, rstdev, gamma, False, 1e-5)
    jax.tree.map(np.testing.assert_array_equal, gradients, vjp(dz))
    same, mean, _ = tex.normalization_fwd(
        x, gamma, beta=None, zero_centered_gamma=False, epsilon=1e-5, norm_type="rmsnorm"
    )
    np.testing.assert_array_equal(same.dequantize(), expected)
    assert mean is None
    assert tex.normalization_bwd(dz, x, None, rstdev, gamma, False, 1e-5, "rmsnorm")[2] is None


def test_norm_is_quantized_by_its_quantizer():
    x, gamma = draw_normal(8, 32), draw_normal(32, seed=1)
    one = create_quantizer(ScalingMode.CURRENT_TENSOR_SCALING)
    codes, _, _ = tex.normalization_fwd(
        x,
        gamma,
        beta=None,
        zero_centered_gamma=False,
        epsilon=1e-5,
        norm_type="rmsnorm",
        quantizer=one,
    )
    expected = one.quantize(layernorm(x, gamma, None, "rmsnorm", False, 1e-5))
    np.testing.assert_array_equal(codes.rowwise_tensor.data, expected.rowwise_tensor.data)


def test_sums_of_groups_of_a_gradient():
    grad, sizes = draw_normal(9, 4), np.asarray([2, 0, 5], np.int32)
    expected = np.stack([np.asarray(grad)[0:2].sum(0), np.zeros(4), np.asarray(grad)[2:7].sum(0)])
    np.testing.assert_allclose(tex.grouped_dbias(grad, sizes), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="pass a matrix"):
        tex.grouped_dbias(grad[0], sizes)


def test_grouped_product_uses_the_sizes_that_its_left_operand_holds():
    x, kernel, sizes = draw_normal(8, 16), draw_normal(2, 16, 4, seed=1), array([3, 5], jnp.int32)
    one = create_quantizer(ScalingMode.CURRENT_TENSOR_SCALING, n_groups=2)
    tensor = one.quantize(x, group_sizes=sizes)
    expected = tex.grouped_gemm(tensor.rowwise_tensor.dequantize(), kernel, sizes)
    for lhs in (tensor, tensor.rowwise_tensor):
        np.testing.assert_array_equal(tex.grouped_gemm(lhs, kernel), expected)
    plain = quantize.GroupedNoScaleTensor(x, group_sizes=sizes)
    np.testing.assert_array_equal(
        tex.grouped_gemm(plain, kernel), tex.grouped_gemm(x, kernel, sizes)
    )
    with pytest.raises(ValueError, match=r"holds no sizes; pass the rows per group as int32 \[G\]"):
        tex.grouped_gemm(x, kernel)


def test_grouped_product_takes_the_arguments_of_grouped_dense_by_position():
    x, kernel, sizes = draw_normal(8, 16), draw_normal(2, 4, 16, seed=1), array([3, 5], jnp.int32)
    bias = draw_normal(2, 4, seed=2)
    got = tex.grouped_gemm(
        x, kernel, sizes, ((1,), (2,)), bias, jax.lax.Precision.DEFAULT, jnp.bfloat16
    )
    expected = tex.grouped_gemm(x, jnp.swapaxes(kernel, 1, 2), sizes, bias=bias).astype(
        jnp.bfloat16
    )
    np.testing.assert_array_equal(got, expected)
    quantizers = QuantizerFactory.create_set(
        scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING,
        fwd_dtype=jnp.float8_e4m3fn,
        bwd_dtype=jnp.float8_e5m2,
        n_groups=2,
    )
    got = tex.grouped_gemm(x, kernel, sizes, ((1,), (2,)), quantizer_set=quantizers)
    rows = quantizers.x.quantize(x, group_sizes=sizes)
    matrices = quantizers.kernel.quantize(kernel).dequantize()
    np.testing.assert_allclose(got, tex.grouped_gemm(rows, matrices, None, ((1,), (2,))), atol=1e-4)


@pytest.mark.parametrize("dims", [((0,), (0,)), ((-2,), (-2,))])
def test_grouped_product_contracts_the_rows_of_each_group(dims):
    x, dy, sizes = draw_normal(8, 16), draw_normal(8, 4, seed=1), array([3, 0, 4], jnp.int32)
    parts = (slice(0, 3), slice(3, 3), slice(3, 7))
    expected = np.stack(
        [np.asarray(x, np.float64)[part].T @ np.asarray(dy)[part] for part in parts]
    )
    np.testing.assert_allclose(tex.grouped_gemm(x, dy, sizes, dims), expected, rtol=1e-5, atol=1e-5)
    one = create_quantizer(ScalingMode.CURRENT_TENSOR_SCALING, n_groups=3)
    codes = [one.quantize(operand, group_sizes=sizes) for operand in (x, dy)]
    values = [operand.colwise_tensor.dequantize() for operand in codes]
    expected = tex.grouped_gemm(*values, sizes, dims)
    np.testing.assert_array_equal(tex.grouped_gemm(*codes, None, dims), expected)
    quantizers = quantize.QuantizerSet(one, one, None)
    np.testing.assert_array_equal(
        tex.grouped_gemm(x, dy, sizes, dims, quantizer_set=quantizers), expected
    )
    with pytest.raises(ValueError, match=r"supports neither bias=.*; pass None for both"):
        tex.grouped_gemm(x, dy, sizes, dims, jnp.ones((3, 4)))
    with pytest.raises(ValueError, match=r"requires \[M, K\] and \[M, N\]"):
        tex.grouped_gemm(x, dy[:7], sizes, dims)


def test_axes_are_counted_from_the_first():
    assert tex.sanitize_dims(3, -1) == (2,) and tex.sanitize_dims(3, (0, -2)) == (0, 1)
    assert tex.get_non_contracting_dims(4, (-1, 1)) == (0, 2)
    with pytest.raises(ValueError, match="an array of 2 axes has no axis 2"):
        tex.sanitize_dims(2, 2)
    with pytest.raises(TypeError, match="dims="):
        tex.sanitize_dims(2, "ab")  # pyright: ignore[reportArgumentType]


def test_dtypes_of_both_libraries_are_converted():
    for member in extension.DType:
        assert tex.misc.jax_dtype_to_te_dtype(tex.misc.te_dtype_to_jax_dtype(member)) is member
    assert tex.misc.jax_dtype_to_te_dtype("bfloat16") is extension.DType.kBFloat16
    with pytest.raises(ValueError, match="jax_dtype=complex64 has no member of DType"):
        tex.misc.jax_dtype_to_te_dtype(jnp.complex64)
    with pytest.raises(TypeError, match="te_dtype=6"):
        tex.misc.te_dtype_to_jax_dtype(6)  # pyright: ignore[reportArgumentType]


def test_gradient_of_an_activation_has_two_names():
    dz, x = draw_normal(4, 8), draw_normal(4, 2, 8, seed=1)
    first, sums = tex.dact_lu_dbias(dz, x, ("silu", "linear"))
    second, repeated = tex.quantize_dact_dbias(dz, x, ("silu", "linear"))
    np.testing.assert_array_equal(first.data, second.data)
    np.testing.assert_array_equal(sums, repeated)
    np.testing.assert_allclose(sums, first.data.sum(0), rtol=1e-5, atol=1e-6)


def test_gradient_of_an_activation_converts_the_dtype_of_its_gradient():
    dz, x = draw_normal(4, 8).astype(jnp.bfloat16), draw_normal(4, 2, 8, seed=1)
    names = ("silu", "linear")
    expected = tex.dact_lu(dz.astype(jnp.float32), x, names).data
    np.testing.assert_array_equal(tex.dact_lu(dz, x, names).data, expected)
    assert (
        tex.dact_lu(dz.astype(jnp.float32), x.astype(jnp.bfloat16), names).data.dtype
        == jnp.bfloat16
    )


def test_integers_of_enumerations_are_accepted():
    assert extension.nvte_get_qkv_format(9) is extension.NVTE_QKV_Format.NVTE_BSHD  # pyright: ignore
    args = (True, 6, 6, 9, 0, 2, 0, 0.0, 2, 2, 16, 16, 16, 16)
    assert extension.get_fused_attn_backend(*args) in extension.NVTE_Fused_Attn_Backend  # pyright: ignore


POSITIONS = np.arange(4)[None]
BAD_CALLS = {
    "dtype of a window mask": (
        lambda: attention.make_swa_mask(POSITIONS, POSITIONS, (2, 0), dtype={}),
        TypeError,
        "dtype={} is not a dtype",
    ),
    "structured dtype": (
        lambda: attention.make_swa_mask(POSITIONS, POSITIONS, (2, 0), dtype=[("a", int)]),
        TypeError,
        "is not a dtype",
    ),
    "object dtype": (
        lambda: attention.make_swa_mask(POSITIONS, POSITIONS, (2, 0), dtype=object),
        TypeError,
        "is not a dtype",
    ),
    "matrix of NumPy as a recipe": (
        lambda: quantize.get_quantization_recipe(np.ones((2, 2))),
        ValueError,
        "is not a recipe; choose one of",
    ),
    "matrix of JAX as a recipe": (
        lambda: quantize.is_quantize_recipe_supported(jnp.ones((2, 2))),
        ValueError,
        "is not a recipe; choose one of",
    ),
    "config of a dict": (
        lambda: quantize.get_quantize_config_with_recipe({}),
        TypeError,
        "fp8_recipe={} is a dict; pass an instance",
    ),
    "source of a config": (
        lambda: quantize.get_quantize_config_with_recipe(None).get_scaling_mode(0),
        TypeError,
        "source=0",
    ),
    "format": (
        lambda: quantize.helper._format2dtypes({}),
        TypeError,
        "form={} is a dict; pass a recipe.Format",
    ),
    "version": (
        lambda: version_utils.jax_version_meet_requirement("x"),
        ValueError,
        "version='x' is not a",
    ),
    "version of a number": (
        lambda: version_utils.jax_version_meet_requirement(3),
        ValueError,
        "version=3 is not a version",
    ),
    "layout of attention": (
        lambda: extension.nvte_get_qkv_format("x"),
        ValueError,
        "qkv_layout='x' is not a layout",
    ),
    "matrix as a layout": (
        lambda: extension.nvte_get_qkv_format(np.ones((2, 2))),
        ValueError,
        "is not a layout; pass a member",
    ),
    "flag": (
        lambda: tex.misc.get_xla_flag({}),
        TypeError,
        "flag={} is a dict; pass the name of a flag",
    ),
    "GPU": (
        lambda: extension.get_device_compute_capability("x"),
        TypeError,
        "gpu_id='x' must be a whole number",
    ),
    "codes": (
        lambda: quantize.ScaledTensorFactory.create_1x(
            3, jnp.ones(1), None, ScalingMode.CURRENT_TENSOR_SCALING
        ),
        TypeError,
        "data=3 is an int; give an array",
    ),
    "experts of tokens": (
        lambda: ep.ep_dispatch(ep.EpConfig(4, 1), [[0]], jnp.ones((1, 4)), jnp.ones((1, 1)), 4),
        TypeError,
        "topk_idx is [[0]]; give an array of integers",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call_is_rejected_with_the_argument_and_a_remedy(name):
    call, error, sentence = BAD_CALLS[name]
    with pytest.raises(error) as raised:
        call()
    assert sentence in str(raised.value) and type(raised.value) is error
