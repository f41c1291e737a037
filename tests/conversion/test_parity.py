"""A converted model computes the logits of `transformers`, and converting back restores every weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import transformer_engine.pytorch as te
from tests.conversion.tiny_models import (
    COLUMNS,
    SETTINGS,
    golden,
    tokens,
    weights,
    write_checkpoint,
)
from tests.support.tolerances import ATTENDED
from transformer_engine.common.optional import installed
from transformer_engine.pytorch import conversion
from transformer_engine.pytorch.conversion.safetensors import Shards

FAMILIES = pytest.mark.parametrize("name", SETTINGS)


@pytest.fixture
def model(name: str, tmp_path: Path, device: torch.device) -> conversion.Decoder:
    return conversion.load_model(write_checkpoint(tmp_path / "theirs", name), device=device)


@FAMILIES
def test_logits_equal_the_recorded_ones_of_transformers(
    name: str, model: conversion.Decoder, device: torch.device
):
    logits = model(tokens().to(device))[..., COLUMNS]
    torch.testing.assert_close(logits.double().cpu(), golden(name), **ATTENDED)


@pytest.mark.skipif(
    not installed("transformers"), reason="transformers is not installed: pip install transformers"
)
@FAMILIES
def test_logits_equal_those_of_transformers(
    name: str, model: conversion.Decoder, device: torch.device
):
    from tests.conversion.record_logits import logits

    torch.testing.assert_close(model(tokens().to(device)).cpu(), logits(name), **ATTENDED)


@pytest.mark.skipif(
    not installed("transformers"), reason="transformers is not installed: pip install transformers"
)
@FAMILIES
def test_transformers_reads_a_checkpoint_converted_back(name: str, tmp_path: Path):
    import transformers

    from tests.conversion.record_logits import theirs

    conversion.convert(write_checkpoint(tmp_path / "theirs", name), tmp_path / "ours")
    conversion.convert(tmp_path / "ours", tmp_path / "back")
    repeated, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert (
        not report["missing_keys"]
        and not report["unexpected_keys"]
        and not report["mismatched_keys"]
    )
    for key, value in theirs(name).state_dict().items():
        assert torch.equal(repeated.state_dict()[key], value), key


@FAMILIES
def test_every_weight_comes_back_bit_for_bit(name: str, tmp_path: Path):
    conversion.convert(
        write_checkpoint(tmp_path / "theirs", name), tmp_path / "ours", shard_bytes=50_000
    )
    conversion.convert(tmp_path / "ours", tmp_path / "back")
    back, argument = Shards.open(tmp_path / "back"), weights(SETTINGS[name])
    assert set(back.files) == set(argument)
    for key, value in argument.items():
        assert torch.equal(back.read(key), value), key


@FAMILIES
def test_a_loaded_model_is_sampled_with_a_cache_to_the_same_end(
    name: str, model: conversion.Decoder, device
):
    prompt = tokens()[:, :6].to(device)
    drawn = model.generate(prompt, 10, temperature=0)
    assert torch.equal(drawn[:, :6], prompt)
    assert torch.equal(drawn, model.generate(prompt, 10, temperature=0, cached=False))


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_loaded_model_trains_and_is_saved_in_its_new_state(
    name: str, model, tmp_path: Path, device
):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = tokens().to(device)
    losses = []
    for _ in range(3):
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    conversion.save_model(model, tmp_path / "trained")
    repeated = conversion.load_model(tmp_path / "trained", device=device)
    assert torch.equal(repeated(batch), model(batch))
    conversion.convert(tmp_path / "trained", tmp_path / "back")
    assert set(Shards.open(tmp_path / "back").files) == set(weights(SETTINGS[name]))


@pytest.mark.parametrize("name", ["llama"])
def test_the_state_of_delayed_scaling_is_saved_with_a_model(
    name: str, model, tmp_path: Path, device
):
    batch = tokens().to(device)
    with te.autocast():
        model.loss(batch[:, :-1], batch[:, 1:]).backward()
    conversion.save_model(model, tmp_path / "saved")
    repeated = conversion.load_model(tmp_path / "saved", device=device)
    for a, b in zip(model.layers, repeated.layers, strict=True):
        state, loaded = (layer.layernorm_mlp.fp8_meta["scaling_fwd"] for layer in (a, b))
        assert torch.equal(loaded.scale, state.scale)
        assert torch.equal(loaded.amax_history, state.amax_history)


def test_weights_are_quantized_while_loading(tmp_path: Path, device: torch.device):
    from transformer_engine.common.recipe import Float8CurrentScaling

    folder = write_checkpoint(tmp_path / "theirs", "llama")
    plain = conversion.load_model(folder, device=device)
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        quantized = conversion.load_model(folder, device=device)
    weight = quantized.layers[0].layernorm_mlp.fc1_weight
    assert isinstance(weight, te.Float8Tensor)
    assert torch.equal(
        weight.dequantize(),
        weight._quantizer(plain.layers[0].layernorm_mlp.fc1_weight).dequantize(),
    )


def test_a_dtype_is_that_of_every_tensor(tmp_path: Path, device: torch.device):
    folder = write_checkpoint(tmp_path / "theirs", "qwen2")
    conversion.convert(folder, tmp_path / "ours", dtype=torch.bfloat16)
    narrow = conversion.load_model(tmp_path / "ours", device=device)
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    conversion.convert(tmp_path / "ours", tmp_path / "back")
    read = Shards.open(tmp_path / "back")
    for key, value in weights(SETTINGS["qwen2"]).items():
        assert torch.equal(read.read(key), value.bfloat16()), key


def test_the_tokenizer_is_copied_with_the_weights(tmp_path: Path):
    conversion.convert(write_checkpoint(tmp_path / "theirs", "llama"), tmp_path / "ours")
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {
        "model.safetensors",
        "tokenizer.json",
        "transformer_engine.json",
    }
