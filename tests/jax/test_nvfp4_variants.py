"""JAX's 4over6 and scales per row: the bits of torch's reference, recipes, and products with factors per row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.jax.compiled import normal
from tests.support.nvfp4_random import CONTENTS, matrix
from transformer_engine.common.formats import E2M1, NVFP4, NVFP4_256, NVFP4_ROWS, NVFP4_ROWS_256
from transformer_engine.common.quantize_spec import FAST_MSE, MAE, MSE
from transformer_engine.common.recipe import NVFP4BlockScaling
from transformer_engine.jax.dense import dense
from transformer_engine.jax.primitives import quantize as primitive
from transformer_engine.jax.quantize import (
    QuantizeLayout,
    QuantizerSet,
    ScalingMode,
    TensorSource,
    get_supported_scaling_modes,
    is_scaling_mode_supported,
)
from transformer_engine.jax.quantize.recipes import check_family, make_quantizer
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, quantize, unpack_fp4

SHAPE = (34, 48)
SPECS = {
    "MAE of both directions": QuantizeSpec(NVFP4_256, E2M1, columnwise=True, four_over_six=MAE),
    "MSE of squares": QuantizeSpec(
        NVFP4_256, E2M1, columnwise=True, two_dimensional=True, four_over_six=MSE
    ),
    "fast MSE up to 448": QuantizeSpec(NVFP4, E2M1, four_over_six=FAST_MSE),
    "MAE": QuantizeSpec(NVFP4_256, E2M1, four_over_six=MAE),
    "rows": QuantizeSpec(NVFP4_ROWS_256, E2M1, columnwise=True),
    "rows, MSE": QuantizeSpec(NVFP4_ROWS, E2M1, four_over_six=MSE),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.sampled(2)
def test_nvfp4_variants_are_bitwise_equal_to_the_torch_reference(name):
    spec = SPECS[name]
    result = jax.jit(lambda x: primitive.quantize(x, spec))
    generator = torch.Generator().manual_seed(0)
    for content in CONTENTS:
        x = matrix(content, *SHAPE, generator)
        expected, actual = quantize(x, spec), result(jnp.asarray(x.numpy()))
        for field in expected._fields:
            reference, ours = getattr(expected, field), getattr(actual, field)
            if reference is None or ours is None:
                assert reference is ours, (content, field)
            elif field.startswith("codes"):
                nibbles = np.asarray(jax.lax.bitcast_convert_type(ours, jnp.uint4)).astype(np.uint8)
                assert np.array_equal(nibbles, unpack_fp4(reference).numpy()), (content, field)
            else:
                values = np.asarray(ours.astype(jnp.float32))
                assert np.array_equal(values, reference.float().numpy(), equal_nan=True), (
                    content,
                    field,
                )


def create_quantizers(recipe: NVFP4BlockScaling) -> QuantizerSet:
    return QuantizerSet(
        *(
            make_quantizer(recipe, source, QuantizeLayout.ROWWISE_COLWISE, None)
            for source in TensorSource
        )
    )


RECIPES = {
    "rows": {"row_scaled_activation": True},
    "4over6": {"nvfp4_4over6": "all"},
    "rows and 4over6": {"row_scaled_activation": True, "nvfp4_4over6": "activations"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.sampled(1)
def test_a_dense_layer_computes_with_its_quantized_operands(name):
    recipe = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, **RECIPES[name])
    quantizers = create_quantizers(recipe)
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel, dy = (
        normal(key, shape) for key, shape in zip(keys, ((32, 64), (64, 48), (32, 48)), strict=True)
    )
    y, gradients = jax.vjp(lambda x, kernel: dense(x, kernel, quantizer_set=quantizers), x, kernel)
    dx, dkernel = gradients(dy)
    values = [
        quantizer.encode(tensor)[0]
        for quantizer, tensor in zip(
            (quantizers.x, quantizers.kernel, quantizers.dgrad), (x, kernel, dy), strict=True
        )
    ]
    (x_row, x_col), (_, _), (dy_row, dy_col) = (
        (
            np.asarray(v.rowwise_tensor.values(), np.float64),
            np.asarray(v.colwise_tensor.values(), np.float64),
        )
        for v in values
    )
    k_row = np.asarray(values[1].rowwise_tensor.values(), np.float64)
    k_col = np.asarray(values[1].colwise_tensor.values(), np.float64)
    for actual, expected in (
        (y, x_row @ k_col),
        (dx, dy_row @ k_row.T),
        (dkernel, x_col.T @ dy_col),
    ):
        assert np.abs(np.asarray(actual) - expected).max() <= 2e-6 * np.abs(expected).max()


def test_scopes_choose_modes_and_never_those_of_gradients():
    modes = {
        name: [check_family(recipe).modes(recipe, source) for source in TensorSource]
        for name, recipe in {
            "rows": NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
            "all": NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all"),
            "weights": NVFP4BlockScaling(
                nvfp4_4over6="weights", nvfp4_4over6_e4m3_use_256="activations"
            ),
        }.items()
    }
    plain, square = ScalingMode.NVFP4_1D_SCALING, ScalingMode.NVFP4_2D_SCALING
    assert modes["rows"] == [ScalingMode.NVFP4_ROWS_SCALING, square, plain]
    assert modes["all"] == [
        ScalingMode.NVFP4_1D_256_SCALING,
        ScalingMode.NVFP4_2D_256_SCALING,
        plain,
    ]
    assert modes["weights"] == [plain, square, plain]
    weights = NVFP4BlockScaling(nvfp4_4over6="weights", nvfp4_4over6_err_mode="MSE")
    assert [quantizer.four_over_six for quantizer in vars(create_quantizers(weights)).values()] == [
        "",
        "MSE",
        "",
    ]


def test_variants_are_supported_where_nvfp4_is():
    variants = [mode for mode in ScalingMode if mode.is_nvfp4_scaling]
    supported, reason = is_scaling_mode_supported(ScalingMode.NVFP4_1D_SCALING)
    assert len(variants) == 6
    assert {is_scaling_mode_supported(mode) for mode in variants} == {(supported, reason)}
    assert [
        mode for mode in get_supported_scaling_modes() if mode in variants
    ] == variants * supported


@pytest.mark.parametrize("variant", [{"row_scaled_activation": True}, {"nvfp4_4over6": "all"}])
def test_variants_of_activations_need_the_transform_switched_off(variant):
    with pytest.raises(ValueError, match="disable_rht=True"):
        check_family(NVFP4BlockScaling(**variant))
