"""Reference quantizers and the factories of the zoo, through CustomRecipe, against the built-in recipes."""

from __future__ import annotations

import importlib

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.custom_recipes import gemm, quantizer_factory_zoo
from transformer_engine.pytorch.custom_recipes import reference_current_scaling as current
from transformer_engine.pytorch.custom_recipes import reference_nvfp4 as nvfp4
from transformer_engine.pytorch.primitives.quantize import hadamard_transform
from transformer_engine.pytorch.quantization import QuantizerRole

E4M3 = te.DType.kFloat8E4M3
NAMES = ("output", "grad_input", "grad_weight")


def train_one_step(recipe) -> dict[str, torch.Tensor]:
    """One layer step's output and gradients."""
    torch.manual_seed(5)
    module = te.Linear(64, 64, device="cpu", params_dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        output = module(x)
    output.backward(torch.randn_like(output))
    return dict(zip(NAMES, (output.detach(), x.grad, module.weight.grad), strict=True))


BUILT_IN = {
    current.current_scaling_ref_factory: Float8CurrentScaling(),
    nvfp4.nvfp4_ref_rht_2d_factory: NVFP4BlockScaling(disable_stochastic_rounding=True),
    quantizer_factory_zoo.mxfp8_fwd_high_precision_bwd_factory: MXFP8BlockScaling(
        backward_override="dequantized"
    ),
}


@pytest.mark.parametrize("factory", BUILT_IN, ids=lambda factory: factory.__name__)
def test_a_factory_computes_as_its_built_in_recipe(factory):
    expected, result = (
        train_one_step(BUILT_IN[factory]),
        train_one_step(CustomRecipe(qfactory=factory)),
    )
    for name in NAMES:
        assert torch.equal(result[name], expected[name]), name


# Each zoo factory: the recipe for its forward pass, and for its backward products.
FORWARD = {
    "high_precision_fwd_mxfp8_bwd_factory": None,
    "mxfp8_fwd_nvfp4_bwd_factory": MXFP8BlockScaling(),
    "mxfp8_fwd_high_precision_bwd_factory": MXFP8BlockScaling(),
    "nvfp4_1d_weight_factory": NVFP4BlockScaling(disable_2d_quantization=True),
    "nvfp4_linear_fp8_dpa_factory": NVFP4BlockScaling(),
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory": MXFP8BlockScaling(),
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory": NVFP4BlockScaling(
        disable_rht=True, disable_2d_quantization=True, row_scaled_activation=True
    ),
}


@pytest.mark.parametrize("name", quantizer_factory_zoo.__all__)
def test_the_forward_pass_has_the_format_of_the_name(name):
    recipe = CustomRecipe(qfactory=getattr(quantizer_factory_zoo, name))
    expected, result = train_one_step(FORWARD[name]), train_one_step(recipe)
    assert torch.equal(result["output"], expected["output"])
    exact = train_one_step(None)
    for gradient in NAMES[1:]:
        error = (result[gradient] - exact[gradient]).float().norm() / exact[gradient].float().norm()
        assert error < 0.25, (gradient, error)


def test_grouped_layers_alone_are_row_scaled():
    factory = quantizer_factory_zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory
    role = QuantizerRole("grouped_linear", "input")
    assert factory(role).rowwise_quantizer.row_scaled_nvfp4
    assert not factory(QuantizerRole("grouped_linear", "weight")).rowwise_quantizer.row_scaled_nvfp4
    for other in (
        QuantizerRole("linear", "input"),
        QuantizerRole("grouped_linear", "grad_output"),
        None,
    ):
        assert isinstance(factory(other), te.MXFP8Quantizer)


@pytest.mark.parametrize(
    ("role", "element"),
    [
        (QuantizerRole("dpa", "qkv"), E4M3),
        (QuantizerRole("dpa", "do"), te.DType.kFloat8E5M2),
        (QuantizerRole("", "", "layer.dpa_output"), E4M3),
        (QuantizerRole("", "", "layer.dpa_grad_input"), te.DType.kFloat8E5M2),
    ],
)
def test_attention_uses_fp8_in_models_with_nvfp4_layers(role, element):
    factory = quantizer_factory_zoo.nvfp4_linear_fp8_dpa_factory
    result = factory(role)
    assert isinstance(result, te.Float8CurrentScalingQuantizer) and result.dtype == element
    request = factory(QuantizerRole("dpa", "s"))
    assert (request.amax_history_len, request.amax_compute_algo) == (1, "most_recent")
    assert isinstance(factory(QuantizerRole("linear", "weight")), te.NVFP4Quantizer)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("pow_2_scales", [False, True])
def test_the_reference_of_current_scaling_has_the_codes_of_the_quantizer(dtype, pow_2_scales):
    x = torch.randn(2, 17, 24)
    number = E4M3 if dtype == torch.float8_e4m3fn else te.DType.kFloat8E5M2
    expected = te.Float8CurrentScalingQuantizer(number, "cpu", force_pow_2_scales=pow_2_scales)(x)
    result = current.CurrentScalingQuantizerRef(dtype, pow_2_scales=pow_2_scales)(x)
    assert torch.equal(result.data.view(torch.uint8).view(x.shape), expected._data)
    assert torch.equal(result.scale, expected._scale_inv) and torch.equal(
        result.data_t, result.data.t()
    )
    assert (
        torch.equal(result.dequantize(), expected.dequantize())
        and result.dequantize().shape == x.shape
    )
    result.update_usage(columnwise_usage=False)
    assert result.get_usages() == {"rowwise": True, "columnwise": False}


@pytest.mark.parametrize(
    "options", [{}, {"with_rht": True}, {"quant_tile_shape": (16, 16)}, {"row_scaled_nvfp4": True}]
)
def test_the_reference_of_nvfp4_has_the_codes_of_the_quantizer(options):
    options, x = dict(options), torch.randn(32, 64, dtype=torch.bfloat16)
    result = nvfp4.NVFP4QuantizerRef(**options)(x)
    tile = options.pop("quant_tile_shape", (1, 16))
    if options.get("with_rht"):
        options["with_post_rht_amax"] = True
    expected = te.NVFP4Quantizer(**options, with_2d_quantization=tile == (16, 16))(x)
    assert torch.equal(result.data, expected._rowwise_data) and torch.equal(
        result.data_t, expected._columnwise_data
    )
    assert torch.equal(
        result.scale.view(torch.uint8), expected._rowwise_scale_inv.view(torch.uint8)[:32, :4]
    )
    assert torch.equal(result.global_amax_row, expected._amax_rowwise)
    assert torch.equal(
        result.dequantize(dtype=torch.float32), expected.dequantize(dtype=torch.float32)
    )


def test_helpers_of_the_reference():
    values = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -6.0]])
    assert torch.equal(nvfp4.cast_from_fp4x2(nvfp4.cast_to_fp4x2(values), torch.float32), values)
    assert nvfp4.cast_to_e8(torch.tensor([1.0, 1.5, 2.0])).tolist() == [127, 128, 128]
    assert nvfp4.cast_to_e4m3(torch.tensor([1.0]), torch.tensor([6.0])).float().tolist() == [448.0]
    a, b = torch.randn(3, 4), torch.randn(5, 4)
    out = torch.ones(3, 5)
    nvfp4.high_precision_gemm_ref(
        a, b, torch.float32, accumulate=True, is_b_transposed=True, out=out
    )
    torch.testing.assert_close(out, 1 + a @ b.T)
    assert torch.equal(4 * hadamard_transform(torch.eye(16))[:, 0], nvfp4.get_wgrad_sign_vector())


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_custom_gemm_chooses_the_operands_by_the_layout(layout):
    quantizer = current.CurrentScalingQuantizerRef(torch.float8_e4m3fn)
    weight, x, dy = torch.randn(8, 12), torch.randn(2, 3, 12), torch.randn(6, 8)
    if layout == "TN":
        A, B = weight, x
        expected = quantizer(x).dequantize() @ quantizer(weight).dequantize().t()
    elif layout == "NN":
        A, B = weight, dy
        expected = quantizer(dy).dequantize() @ quantizer(weight).dequantize()
    else:
        A, B = x, dy
        expected = quantizer(dy).dequantize().t() @ quantizer(x).dequantize().view(6, 12)
    result, *rest = gemm.custom_gemm(quantizer(A), quantizer(B), layout=layout)
    torch.testing.assert_close(result, expected)
    assert rest == [None, None, None]
    out = torch.ones_like(expected)
    gemm.custom_gemm(quantizer(A), quantizer(B), layout=layout, out=out, accumulate=True)
    torch.testing.assert_close(out, expected + 1)


def test_custom_gemm_rejects_unsupported_operands():
    quantizer = current.CurrentScalingQuantizerRef(torch.float8_e4m3fn, columnwise=False)
    result = quantizer(torch.randn(4, 4))
    with pytest.raises(TypeError, match="general_gemm"):
        gemm.custom_gemm(torch.ones(4, 4), result)
    with pytest.raises(ValueError, match="lacks the direction"):
        gemm.custom_gemm(result, result, layout="NT")
    with pytest.raises(ValueError, match="bias"):
        gemm.custom_gemm(result, result, layout="NN", bias=torch.ones(4))
    with pytest.raises(ValueError, match="FP8"):
        current.CurrentScalingQuantizerRef(torch.float32)
    with pytest.raises(NotImplementedError, match="MXFP8Quantizer"):
        nvfp4.NVFP4QuantizerRef(pow_2_scales=True)


@pytest.mark.parametrize(
    ("former", "module", "name"),
    [
        ("quantization", gemm, "MMParams"),
        ("quantization_current_scaling", current, "CurrentScalingQuantizerRef"),
        ("quantization_nvfp4", nvfp4, "nvfp4_ref_rht_2d_quantizer_factory"),
    ],
)
def test_former_module_names_are_the_same_modules(former, module, name):
    result = importlib.import_module(f"transformer_engine.pytorch.custom_recipes.{former}")
    assert result is module and hasattr(result, name)
