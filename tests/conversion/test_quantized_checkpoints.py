"""Quantized checkpoints: compressed-tensors and transformers decode them to the values that this engine reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import transformer_engine.pytorch as te
from tests.conversion.tiny_models import SETTINGS, tokens, weights, write_checkpoint
from transformer_engine.common import optional
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch import conversion
from transformer_engine.pytorch.conversion.quantized_shards import dequantized
from transformer_engine.pytorch.conversion.safetensors import Shards, read_json
from transformer_engine.pytorch.conversion.serving_formats import FORMATS, ServingFormat

UNCALIBRATED = [name for name, form in FORMATS.items() if not form.calibrated]
# Half a unit in the last place, relative to the largest value of a block: 2^-4 of E4M3, one of E2M1's gaps of 2 at 6.
ERRORS = dict.fromkeys(FORMATS, 2.0**-4) | {
    "nvfp4": 1 / 6 + 2.0**-4,
    "nvfp4_modelopt": 1 / 6 + 2.0**-4,
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def model(tmp_path: Path) -> conversion.Decoder:
    return conversion.load_model(write_checkpoint(tmp_path / "source", "llama"), device="cpu")


def decode_folder(folder: Path) -> dict[str, Tensor]:
    """The tensors of a quantized folder in float32."""
    shards = dequantized(
        Shards.open(folder), {**read_json(folder / "config.json"), "torch_dtype": "float32"}
    )
    return {name: shards.read(name) for name in shards.files}


def is_linear(name: str) -> bool:
    return name.split(".")[-2] in LINEAR


def save_folder(model: conversion.Decoder, folder: Path, name: str) -> Path:
    conversion.save_quantized(
        model, folder, name, sample=tokens() if FORMATS[name].calibrated else None
    )
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_only_linear_weights_change_and_by_less_than_a_rounding(
    name: str, model: conversion.Decoder, tmp_path: Path
):
    argument, values = (
        weights(SETTINGS["llama"]),
        decode_folder(save_folder(model, tmp_path / "quantized", name)),
    )
    assert set(values) == set(argument)
    for key, weight in argument.items():
        # The 112 columns of down_proj are not a multiple of 32.
        if not is_linear(key) or weight.shape[1] % FORMATS[name].block:
            assert torch.equal(values[key], weight), key
            continue
        assert not torch.equal(values[key], weight), key
        assert (values[key] - weight).abs().max() <= ERRORS[name] * weight.abs().max(), key


@pytest.mark.parametrize("name", FORMATS)
def test_layout_of_each_format_describes_its_tensors(name: str):
    form = FORMATS[name]
    for shape in ((48, 96), (130, 160), (7, 32), (256, 384)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(7))
        encoded, layout = form.encode(weight), form.layout(shape)
        assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in encoded.items()} == {
            key: tuple(entry) for key, entry in layout.items()
        }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("filling", ["zeros", "one large value", "subnormal"])
def test_extreme_weights_decode_to_finite_values(name: str, filling: str, tmp_path: Path):
    weight = torch.zeros(64, 96)
    if filling == "one large value":
        weight[3, 5] = 3e38
    if filling == "subnormal":
        weight += 1e-40
    values = _decode(FORMATS[name], weight, tmp_path)
    assert values.isfinite().all()
    assert (values - weight).abs().max() <= ERRORS[name] * weight.abs().max() + 1e-37


def _decode(form: ServingFormat, weight: Tensor, folder: Path) -> Tensor:
    """Write a weight in a format, and decode the file."""
    from safetensors.torch import save_file

    tensors = {f"a.{suffix}": tensor.contiguous() for suffix, tensor in form.encode(weight).items()}
    save_file(tensors, folder / "model.safetensors")
    settings = {"torch_dtype": "float32", "quantization_config": form.settings([], form.calibrated)}
    return dequantized(Shards.open(folder), settings).read("a.weight")


@pytest.mark.parametrize(
    ("name", "recipe"), [("fp8", Float8CurrentScaling()), ("fp8_block", Float8BlockScaling())]
)
def test_codes_equal_those_of_quantized_parameters(name: str, recipe, tmp_path: Path):
    source = write_checkpoint(tmp_path / "source", "llama")
    with te.quantized_model_init(recipe=recipe):
        model = conversion.load_model(source, device="cpu")
    values = decode_folder(save_folder(model, tmp_path / "quantized", name))
    for layer, block in enumerate(model.layers):
        # One weight per layer that no server concatenates, so that its scale is that of training.
        trained = block.self_attention.proj.weight.dequantize(dtype=torch.float32)
        assert torch.equal(values[f"model.layers.{layer}.self_attn.o_proj.weight"], trained)


@pytest.mark.parametrize("name", UNCALIBRATED)
def test_second_round_trip_returns_the_same_values(
    name: str, model: conversion.Decoder, tmp_path: Path
):
    first = save_folder(model, tmp_path / "first", name)
    second_result = conversion.load_model(first, device="cpu", dtype=torch.float32)
    second = save_folder(second_result, tmp_path / "second", name)
    values, repeated = decode_folder(first), decode_folder(second)
    # block scales are rounded to E4M3, so the second quantization may choose others
    exact = name != "nvfp4"
    for key in values:
        if exact:
            assert torch.equal(values[key], repeated[key]), key
        else:
            torch.testing.assert_close(
                values[key], repeated[key], rtol=0.2, atol=0.05 * values[key].abs().max().item()
            )


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "nvfp4_modelopt"])
def test_concatenated_layers_share_their_scale(
    name: str, model: conversion.Decoder, tmp_path: Path
):
    shards = Shards.open(save_folder(model, tmp_path / "quantized", name))
    suffix = {
        "fp8": "weight_scale",
        "nvfp4": "weight_global_scale",
        "nvfp4_modelopt": "weight_scale_2",
    }[name]
    for joint in (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ):
        scales = [shards.read(f"model.layers.0.{layer}.{suffix}") for layer in joint]
        assert all(torch.equal(scale, scales[0]) for scale in scales)


@pytest.mark.parametrize(
    ("name", "suffix"), [("fp8", "input_scale"), ("nvfp4", "input_global_scale")]
)
def test_sample_determines_static_scales(
    name: str, suffix: str, model: conversion.Decoder, tmp_path: Path
):
    conversion.save_quantized(model, tmp_path / "quantized", name, sample=tokens())
    shards, config = (
        Shards.open(tmp_path / "quantized"),
        read_json(tmp_path / "quantized" / "config.json"),
    )
    largest: dict[str, Tensor] = {}
    block = model.layers[0]
    handles = [
        block.self_attention.proj.register_forward_pre_hook(
            lambda _, args: largest.update(o=args[0].abs().max())
        ),
        block.self_attention.core_attention.register_forward_pre_hook(
            lambda _, args: largest.update(k=args[1].abs().max(), v=args[2].abs().max())
        ),
    ]
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        model(tokens())
    for handle in handles:
        handle.remove()
    scale = shards.read(f"model.layers.0.self_attn.o_proj.{suffix}")
    expected = largest["o"] / 448 if name == "fp8" else 448 * 6 / largest["o"]
    torch.testing.assert_close(scale, expected.reshape(1))
    for letter in "kv":
        stored = shards.read(f"model.layers.0.self_attn.{letter}_scale")
        torch.testing.assert_close(stored, largest[letter].reshape(1) / 448)
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    assert model.training


def test_model_of_transformers_is_saved_under_its_names(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    source = write_checkpoint(tmp_path / "source", "llama-3.1")  # tied
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    linear = model.model.layers[0].self_attn.o_proj
    replaced = te.Linear(linear.in_features, linear.out_features, device="cpu")
    te.load_plain_state_dict(replaced, linear.state_dict())
    model.model.layers[0].self_attn.o_proj = replaced
    conversion.save_quantized(model, tmp_path / "by_transformers", "fp8_block")
    conversion.convert(source, tmp_path / "converted", quantization="fp8_block")
    ours, reference = (
        decode_folder(tmp_path / "converted"),
        decode_folder(tmp_path / "by_transformers"),
    )
    assert set(ours) == set(reference)
    assert all(torch.equal(ours[key], reference[key]) for key in ours)


@pytest.mark.skipif(not optional.installed("transformers"), reason="needs transformers")
def test_transformers_decodes_blocks_to_the_same_weights(model: conversion.Decoder, tmp_path: Path):
    import transformers

    folder = save_folder(model, tmp_path / "quantized", "fp8_block")
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        output_loading_info=True,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    state = reference.state_dict()
    for key, value in decode_folder(folder).items():
        assert torch.equal(state[key].float(), value), key
    logits = conversion.load_model(folder, device="cpu", dtype=torch.float32)(tokens())
    torch.testing.assert_close(reference(tokens()).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    not (optional.installed("transformers") and optional.installed("compressed_tensors")),
    reason="needs transformers and compressed-tensors",
)
@pytest.mark.parametrize("sampled", [False, True], ids=["weights", "static_scales"])
@pytest.mark.parametrize(
    "name", [name for name, form in FORMATS.items() if form.library == "compressed-tensors"]
)
def test_compressed_tensors_decodes_the_same_weights(
    name: str, sampled: bool, model: conversion.Decoder, tmp_path: Path
):
    import transformers

    folder = tmp_path / "quantized"
    conversion.save_quantized(model, folder, name, sample=tokens() if sampled else None)
    # The library decodes MXFP8 and NVFP4 to bfloat16, and rounds FP8 scales to the dtype of the model.
    dtype = torch.bfloat16 if name in ("mxfp8", "nvfp4") else torch.float32
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        output_loading_info=True,
        quantization_config=transformers.CompressedTensorsConfig(run_compressed=False),
    )
    assert (
        not report["missing_keys"]
        and not report["unexpected_keys"]
        and not report["mismatched_keys"]
    )
    state = reference.state_dict()
    for key, value in decode_folder(folder).items():
        assert torch.equal(state[key], value.to(dtype)), key
    assert reference.generate(tokens()[:1], max_new_tokens=4).shape[1] == tokens().shape[1] + 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"quantization": "int4"},
            "quantization='int4' is unknown; choose fp8, fp8_channel, fp8_block, mxfp8",
        ),
        (
            {"quantization": "nvfp4_modelopt"},
            "nvfp4_modelopt needs static scales of the layers' inputs; pass sample=",
        ),
    ],
)
def test_saving_errors_name_the_remedy(
    arguments: dict, sentence: str, model: conversion.Decoder, tmp_path: Path
):
    with pytest.raises(ValueError) as error:
        conversion.save_quantized(model, tmp_path / "quantized", **arguments)
    assert sentence in str(error.value)
    assert not (tmp_path / "quantized").exists()


def test_models_without_a_checkpoint_are_rejected(tmp_path: Path):
    with pytest.raises(ValueError, match="has no config of transformers"):
        conversion.save_quantized(torch.nn.Linear(4, 4), tmp_path / "quantized", "fp8")


def test_transposed_weights_are_rejected(tmp_path: Path):
    source = write_checkpoint(tmp_path / "source", "gpt2")
    with pytest.raises(
        ValueError, match="gpt2 stores weights transposed, which has no quantized layout"
    ):
        conversion.convert(source, tmp_path / "quantized", quantization="fp8")
    assert not (tmp_path / "quantized").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"quant_method": "gptq"},
            "quant_method='gptq', which is not read; compressed-tensors, fp8, modelopt are",
        ),
        (
            {"weight_block_size": [64, 64]},
            r"is \[1, 1\], which does not fit .* in blocks of \[64, 64\]",
        ),
    ],
)
def test_unsupported_quantizations_raise_an_error(
    change: dict, sentence: str, model: conversion.Decoder, tmp_path: Path
):
    folder = save_folder(model, tmp_path / "quantized", "fp8_block")
    config = read_json(folder / "config.json")
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=sentence):
        conversion.load_model(folder, device="cpu")


@pytest.mark.parametrize("name", FORMATS)
def test_loaded_model_trains_and_converts_back(
    name: str, model: conversion.Decoder, tmp_path: Path
):
    folder = save_folder(model, tmp_path / "quantized", name)
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        frozen = conversion.load_model(folder, device="cpu")
    with te.autocast(recipe=Float8CurrentScaling()):
        frozen.loss(tokens()[:, :-1], tokens()[:, 1:]).backward()
    conversion.save_model(conversion.load_model(folder, device="cpu"), tmp_path / "ours")
    conversion.convert(tmp_path / "ours", tmp_path / "back")
    assert "quantization_config" not in read_json(tmp_path / "back" / "config.json")
    back, values = Shards.open(tmp_path / "back"), decode_folder(folder)
    for key, value in values.items():
        torch.testing.assert_close(back.read(key).float(), value, rtol=2.0**-8, atol=0.0)
