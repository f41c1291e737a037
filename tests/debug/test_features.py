"""Features of a debug session compute what plain PyTorch computes, and leave everything else unchanged."""

from __future__ import annotations

import math
from pathlib import Path

import nvdlfw_inspect.api as debug_api
import pytest
import torch

import transformer_engine.pytorch as te
from tests.debug.sessions import (
    GEMMS,
    LAYERS,
    TENSORS,
    assert_equal,
    quantize_float8,
    session,
    train_layer,
)
from tests.support.layers import QUANTIZED, RECIPES
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

VALUES = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]


def statistics(tensor: torch.Tensor) -> dict[str, float]:
    """Compute the statistics of LogTensorStats in float64."""
    x = tensor.detach().double().flatten()
    nonzero = x[x != 0].abs()
    return {
        "min": x.min().item(),
        "max": x.max().item(),
        "mean": x.mean().item(),
        "std": x.std().item(),
        "l1_norm": x.abs().sum().item(),
        "l2_norm": x.norm().item(),
        "cur_amax": x.abs().max().item(),
        "dynamic_range": (nonzero.max().log2() - nonzero.min().log2()).item(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["none", "current"])
def test_statistics_of_all_tensors_are_those_of_float64_over_two_micro_batches(
    dtype: torch.dtype, recipe: str, tmp_path: Path
):
    layer = te.Linear(64, 96, params_dtype=dtype, device="cpu", name="layer")
    observed: dict[str, list[torch.Tensor]] = {name: [] for name in TENSORS}
    with session(tmp_path, {"LogTensorStats": {"tensors": TENSORS, "stats": VALUES}}) as log:
        for _ in range(2):
            x = torch.randn(32, 64, dtype=dtype, requires_grad=True)
            with te.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
                y = layer(x)
            dy = torch.randn_like(y)
            layer.weight.grad = None
            y.backward(dy)
            for name, tensor in zip(
                TENSORS, (x, layer.weight, dy, y, x.grad, layer.weight.grad), strict=True
            ):
                observed[name].append(tensor)
        debug_api.step()
    for tensor, parts in observed.items():
        for name, value in statistics(torch.stack(parts)).items():
            if tensor == "weight":  # the same in both micro-batches, counted once
                value = statistics(parts[0])[name]
            assert log.values[f"layer_{tensor}_{name}", 0] == pytest.approx(
                value, rel=1e-6, abs=1e-9
            )


def blockwise(matrix: torch.Tensor, size: int, dims: int) -> float:
    """Compute the largest dynamic range of a block in a loop over blocks."""
    results = [0.0]
    for i in range(0, matrix.shape[0], size if dims == 2 else 1):
        for j in range(0, matrix.shape[1], size):
            block = matrix[i : i + (size if dims == 2 else 1), j : j + size].double().abs()
            block = block[block != 0]
            if block.numel():
                results.append((block.max().log2() - block.min().log2()).item())
    return max(results)


@pytest.mark.parametrize(("size", "dims"), [(32, 1), (24, 1), (16, 2)])
def test_dynamic_range_of_blocks(size: int, dims: int, tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer")
    stats = [{"max_blockwise_dynamic_range": {"block_size": size, "dims": dims}}]
    x = torch.randn(40, 64) * torch.randn(40, 64).exp2() * (torch.rand(40, 64) > 0.2)
    with session(
        tmp_path, {"LogTensorStats": {"tensors": ["activation", "output"], "stats": stats}}
    ) as log:
        y = layer(x)
        debug_api.step()
    name = f"max_blockwise_dynamic_range_block_size_{size}_dims_{dims}"
    both = max(blockwise(x, size, dims), blockwise(x.t(), size, dims))
    assert log.values[f"layer_activation_{name}_max_over_orientations", 0] == pytest.approx(
        both, rel=1e-6
    )
    assert log.values[f"layer_output_{name}", 0] == pytest.approx(
        blockwise(y, size, dims), rel=1e-6
    )


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_quantization_errors_are_those_of_float8_in_plain_torch(recipe: str, tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer")
    x = torch.randn(64, 64) * (torch.randn(64, 64) * 6).exp2()
    names = ["underflows%", "mse", "scale_inv_min", "scale_inv_max"]
    stats = [*names, "mxfp8_mse", "fp8_current_scaling_underflows%", "mxfp8_mse_columnwise"]
    with session(
        tmp_path, {"LogFp8TensorStats": {"tensors": ["activation"], "stats": stats}}
    ) as log:
        with te.autocast(recipe=RECIPES[recipe]):
            layer(x.requires_grad_())
        debug_api.step()
    x = x.detach()
    by_one, by_blocks = quantize_float8(x, None), quantize_float8(x, 32)
    values, inverse = by_one if recipe == "current" else by_blocks

    def mean_error(decoded: torch.Tensor, of: torch.Tensor = x) -> float:
        return (of - decoded).double().square().mean().item()

    def underflow(decoded: torch.Tensor) -> float:
        return 100.0 * ((x != 0) & (decoded == 0)).double().mean().item()

    expected = {
        "underflows%": underflow(values),
        "mse": mean_error(values),
        "scale_inv_min": inverse.min().item(),
        "scale_inv_max": inverse.max().item(),
        "mxfp8_mse": mean_error(by_blocks[0]),
        "mxfp8_mse_columnwise": mean_error(quantize_float8(x.t().contiguous(), 32)[0], x.t()),
        "fp8_current_scaling_underflows%": underflow(by_one[0]),
    }
    assert expected["underflows%"] > 0 or recipe == "mxfp8"
    for name, value in expected.items():
        assert log.values[f"layer_activation_{name}", 0] == pytest.approx(value, rel=1e-5), name


def test_overflow_of_delayed_scaling_is_counted(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer")
    x = torch.randn(32, 64) * 300.0  # the first scale is 1
    settings = {
        "tensors": ["activation"],
        "stats": ["overflows%", "fp8_delayed_scaling_overflows%"],
    }
    with session(tmp_path, {"LogFp8TensorStats": settings}) as log:
        with te.autocast(recipe=DelayedScaling()):
            layer(x)
        debug_api.step()
    expected = 100.0 * (x.abs() > 448.0).double().mean().item()
    assert expected > 5
    for name in settings["stats"]:
        assert log.values[f"layer_activation_{name}", 0] == pytest.approx(expected)


def test_errors_of_nvfp4_are_those_of_its_quantizer(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer")
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    layer.to(torch.bfloat16)
    settings = {"tensors": ["activation"], "stats": ["underflows%", "mse"]}
    with session(tmp_path, {"LogNvfp4TensorStats": settings}) as log:
        with te.autocast(recipe=RECIPES["nvfp4"]):
            layer(x)
        debug_api.step()
    decoded = te.NVFP4Quantizer()(x).dequantize(dtype=torch.float32)
    assert log.values["layer_activation_mse", 0] == pytest.approx(
        (x.float() - decoded).double().square().mean().item(), rel=1e-5
    )
    lost = 100.0 * ((x != 0) & (decoded == 0)).double().mean().item()
    assert log.values["layer_activation_underflows%", 0] == pytest.approx(lost) and lost > 0


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
@pytest.mark.sampled
def test_statistics_change_no_result(kind: str, recipe: str, tmp_path: Path):
    expected = train_layer(kind, recipe)
    features = {"LogTensorStats": {"tensors": TENSORS, "stats": ["max"]}}
    if recipe != "none":
        features["LogFp8TensorStats"] = {"tensors": TENSORS[:3], "stats": ["mse"]}
    with session(tmp_path, features) as log:
        assert_equal(train_layer(kind, recipe), expected)
    assert log.iterations(next(iter(log.values))[0]) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", ["current", "block", "nvfp4"])
def test_statistics_change_no_result_of_other_recipes(kind: str, recipe: str, tmp_path: Path):
    expected = train_layer(kind, recipe)
    with session(tmp_path, {"LogTensorStats": {"tensors": TENSORS, "stats": ["max"]}}):
        assert_equal(train_layer(kind, recipe), expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_without_quantization_computes_as_outside_of_autocast(kind: str, tmp_path: Path):
    expected = train_layer(kind, "none")
    with session(tmp_path, {"DisableQuantizationLayer": {}}):
        assert_equal(train_layer(kind, "mxfp8"), expected)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.filterwarnings("ignore:the debug feature DisableFP8GEMM:DeprecationWarning")
@pytest.mark.sampled
def test_one_product_in_high_precision_leaves_the_others_quantized(
    gemm: str, recipe: str, tmp_path: Path
):
    plain, quantized = (
        train_layer("Linear", "none", steps=1),
        train_layer("Linear", recipe, steps=1),
    )
    with session(tmp_path, {"DisableFP8GEMM": {"gemms": [gemm]}}):
        result = train_layer("Linear", recipe, steps=1)
    for name, one, in_high_precision, in_codes in zip(
        GEMMS, result, plain, quantized, strict=False
    ):
        torch.testing.assert_close(
            one, in_high_precision if name == gemm else in_codes, rtol=0, atol=0
        )
        assert not torch.equal(in_high_precision, in_codes)


def test_fake_quantization_multiplies_decoded_values(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer")
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 96)
    features = {
        "FakeQuant": {
            "gemms_struct": [
                {"gemm": "fprop", "tensors": ["activation", "weight"], "quant_format": "FP8E4M3"},
                {
                    "gemm": "wgrad",
                    "tensors_struct": [{"tensor": "gradient", "quant_format": "MXFP8E4M3"}],
                },
            ]
        }
    }
    with session(tmp_path, features):
        with te.autocast(recipe=Float8CurrentScaling()):
            y = layer(x)
        y.backward(dy)
    values, weight = (
        quantize_float8(x.detach(), None)[0],
        quantize_float8(layer.weight.detach(), None)[0],
    )
    torch.testing.assert_close(y, torch.nn.functional.linear(values, weight, layer.bias))
    torch.testing.assert_close(layer.weight.grad, quantize_float8(dy, 32)[0].t() @ x.detach())


def test_per_tensor_scaling_under_delayed_scaling_is_current_scaling(tmp_path: Path):
    expected = train_layer("Linear", "current", steps=1)
    with session(tmp_path, {"PerTensorScaling": {"gemms": GEMMS, "tensors": TENSORS[:3]}}):
        actual = train_layer("Linear", "delayed", steps=1)
    assert_equal(actual, expected)


def test_margin_of_per_tensor_scaling_halves_the_scale(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer", bias=False)
    x = torch.randn(32, 64)
    settings = {"gemms": ["fprop"], "tensors": ["activation"], "margin": 1}
    dump = {"tensors": ["activation"]}
    with (
        session(tmp_path, {"PerTensorScaling": settings, "DumpTensors": dump}),
        te.autocast(recipe=DelayedScaling()),
    ):
        layer(x)
    content = torch.load(
        tmp_path / "tensor_dumps/rank_0/iter_000000/layer_activation.pt", weights_only=True
    )
    assert content["quantized"]._scale_inv.item() == pytest.approx(2 * x.abs().max().item() / 448.0)


def test_dumped_tensors_are_those_of_the_step(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="a.b/c")
    x = torch.randn(32, 64)
    features = {
        "DumpTensors": {"tensors": ["activation", "output"], "start_step": 1, "end_step": 1}
    }
    with session(tmp_path, features):
        for _ in range(3):
            with te.autocast(recipe=RECIPES["mxfp8"]):
                y = layer(x)
            debug_api.step()
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.glob("tensor_dumps/**/*.pt"))
    folder = Path("tensor_dumps/rank_0/iter_000001")
    assert files == [folder / "a_b_c_activation.pt", folder / "a_b_c_output.pt"]
    content = torch.load(tmp_path / files[0], weights_only=True)
    assert torch.equal(content["high_precision"], x)
    assert torch.equal(content["quantized"].dequantize(), quantize_float8(x, 32)[0])
    assert torch.equal(torch.load(tmp_path / files[1], weights_only=True)["high_precision"], y)


def test_statistics_of_special_values(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer")
    settings = {"tensors": ["activation"], "stats": ["max", "dynamic_range", "std"]}
    with session(tmp_path, {"LogTensorStats": settings}) as log:
        layer(torch.zeros(16, 64))
        debug_api.step()
        layer(torch.full((16, 64), math.nan))
        debug_api.step()
        layer(torch.zeros(0, 64))
        debug_api.step()
    assert (
        log.values["layer_activation_dynamic_range", 0]
        == 0.0
        == log.values["layer_activation_std", 0]
    )
    assert math.isnan(log.values["layer_activation_max", 1])
    assert log.iterations("layer_activation_max") == [0, 1]
