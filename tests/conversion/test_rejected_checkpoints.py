"""A checkpoint that does not fit its settings raises an error before anything is written."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conversion.tiny_models import SETTINGS, weights, write_checkpoint
from transformer_engine.common import optional
from transformer_engine.pytorch import conversion
from transformer_engine.pytorch.conversion.safetensors import (
    Described,
    SafetensorsFile,
    Shards,
    write,
)

Q = "model.layers.0.self_attn.q_proj.weight"
HEAD = "lm_head.weight"


def rejection_message(source: Path) -> str:
    """Return the error message; the conversion must not have written anything."""
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(ValueError) as raised:
        conversion.convert(source, source.parent / "result")
    assert sorted(source.parent.rglob("*")) == before
    with pytest.raises(ValueError) as raised_again:
        conversion.load_model(source, device="cpu")
    # The safetensors library names any one of several wrong tensors.
    first, second = (
        re.sub(r"layers\.\d+", "layers", str(error.value)) for error in (raised, raised_again)
    )
    assert first == second
    return str(raised.value)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({Q: None}, f"lacks {Q}; convert the checkpoint that its config.json belongs to"),
        ({"more": torch.ones(2)}, "also holds more, which its model lacks"),
        ({Q: torch.ones(64, 32)}, f"{Q} is [64, 32], its config makes it [64, 64]"),
        (
            {Q: torch.ones(64, 64, dtype=torch.int8)},
            f"{Q} is torch.int8, which is not a dtype of weights",
        ),
    ],
    ids=["missing", "over", "shape", "dtype"],
)
def test_every_tensor_is_there_once_and_as_it_must_be(changed: dict, sentence: str, tmp_path: Path):
    assert sentence in rejection_message(write_checkpoint(tmp_path / "theirs", "llama", **changed))


def test_a_tied_head_that_is_stored_too_must_be_the_embedding(tmp_path: Path):
    embedding = weights(SETTINGS["llama-3.1"])["model.embed_tokens.weight"]
    conversion.convert(
        write_checkpoint(tmp_path / "equal", "llama-3.1", **{HEAD: embedding}), tmp_path / "ours"
    )
    other = write_checkpoint(tmp_path / "other", "llama-3.1", **{HEAD: embedding + 1})
    assert (
        f"config.json ties {HEAD} to model.embed_tokens.weight, but their values differ"
        in rejection_message(other)
    )


def test_tensors_that_follow_from_the_settings_are_left_out(tmp_path: Path):
    mask = {"transformer.h.1.attn.bias": torch.ones(1, 1, 64, 64)}
    conversion.convert(write_checkpoint(tmp_path / "theirs", "gpt2", **mask), tmp_path / "ours")
    assert len(Shards.open(tmp_path / "ours").files) == len(weights(SETTINGS["gpt2"]))


def test_names_without_their_prefix_are_read(tmp_path: Path):
    argument = weights(SETTINGS["gpt2"])
    bare: dict = dict.fromkeys(argument)
    bare |= {name.removeprefix("transformer."): value for name, value in argument.items()}
    model = conversion.load_model(
        write_checkpoint(tmp_path / "theirs", "gpt2", **bare), device="cpu"
    )
    assert torch.equal(model.embedding.weight, argument["transformer.wte.weight"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' has no table of names; known types: gemma, gpt2, llama",
        ),
        (
            {"hidden_act": "relu"},
            "hidden_act='relu' is not computed by TransformerLayer; it takes silu",
        ),
        (
            {"hidden_size": None},
            "has no 'hidden_size'; take the config.json that belongs to the weights",
        ),
        ({"vocab_size": "many"}, "vocab_size='many' is not a whole number"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type='yarn' is not supported",
        ),
        ({"num_key_value_heads": 3}, "groups=3 does not divide heads=4"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config has quant_method=None, which is not read",
        ),
    ],
)
def test_settings_that_are_not_computed_are_named(settings: dict, sentence: str, tmp_path: Path):
    folder = write_checkpoint(tmp_path / "theirs", "llama")
    (folder / "config.json").write_text(json.dumps(SETTINGS["llama"] | settings))
    assert sentence in rejection_message(folder)


@pytest.mark.parametrize(
    ("name", "changed", "sentence"),
    [
        (
            "llama",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers=1000000000, but the weights have 2 layers",
        ),
        ("llama", {"num_hidden_layers": 1}, "num_hidden_layers=1, but the weights have 2 layers"),
        ("gpt2", {"n_layer": 10**9}, "n_layer=1000000000, but the weights have 2 layers"),
        (
            "qwen3",
            {"head_dim": 10**10},
            "head_size=10000000000, but no dimension of the weights exceeds 128",
        ),
        ("llama", {"hidden_size": 10**10, "head_dim": 16}, "hidden=10000000000, but no dimension"),
        ("llama", {"vocab_size": 10**10}, "vocabulary=10000000000, but no dimension"),
    ],
)
def test_sizes_of_the_settings_are_compared_with_the_tensors_first(
    name: str, changed: dict, sentence: str, tmp_path: Path
):
    folder = write_checkpoint(tmp_path / "theirs", name)
    (folder / "config.json").write_text(json.dumps(SETTINGS[name] | changed))
    start = time.perf_counter()
    assert sentence in rejection_message(folder)
    assert time.perf_counter() - start < 5


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_checkpoint(tmp_path / "theirs", "llama")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    optional._failure.cache_clear()
    try:
        with pytest.raises(
            ImportError, match=r"safetensors.*pip install 'safetensors>=0\.4\.3,<1'"
        ):
            conversion.convert(folder, tmp_path / "ours")
    finally:
        optional._failure.cache_clear()
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("tensors", [[], [("b", torch.ones(2))], [("a", torch.ones(2))] * 2])
def test_tensors_that_differ_from_the_plan_are_not_written(tensors: list, tmp_path: Path):
    plan = {"a": Described(torch.float32, (2,))}
    with pytest.raises(ValueError, match="planned"):
        write(tmp_path / "model.safetensors", plan, tensors)


def _truncate_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x80\x02}q\x00." * 10)


def _overlapping(folder: Path) -> None:
    """Let two tensors of equal shape share their bytes."""
    path = folder / "model.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    data = path.read_bytes()[8 + length :]
    table = json.loads(path.read_bytes()[8 : 8 + length])
    first, second = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    table[second]["data_offsets"] = table[first]["data_offsets"]
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _unsupported(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(
        path.read_bytes().replace(b'"F32","shape":[112,64]', b'"U16","shape":[224,64]', 1)
    )


def _pickle_model(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_settings(folder: Path) -> None:
    (folder / "config.json").unlink()


def _no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _absent_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {Q: "../absent"}})
    )


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_truncate_file, "cannot be read as safetensors"),
        (_garbage, "cannot be read as safetensors"),
        (_overlapping, "cannot be read as safetensors"),
        (_unsupported, "has dtype U16; supported are F64"),
        (_pickle_model, "holds pytorch_model.bin, a pickle, which can run code when it is read"),
        (_no_settings, "holds neither config.json nor transformer_engine.json"),
        (_no_json, "config.json cannot be read as JSON"),
        (_absent_shard, "names '../absent', which is not a file in the same folder"),
    ],
)
def test_a_damaged_folder_is_named_with_the_remedy(damage, sentence: str, tmp_path: Path):
    folder = write_checkpoint(tmp_path / "theirs", "llama")
    damage(folder)
    assert sentence in rejection_message(folder)


def test_an_existing_folder_is_left_unchanged(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "theirs", "llama")
    with pytest.raises(ValueError, match="exists; give the name of a new folder"):
        conversion.convert(folder, folder)


def test_a_conversion_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = write_checkpoint(tmp_path / "theirs", "llama")

    def failing(self: Shards, name: str) -> torch.Tensor:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Shards, "read", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        conversion.convert(folder, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_a_model_that_was_not_read_is_not_written(tmp_path: Path):
    config = conversion.DecoderConfig(32, 32, 32, 1, 1, 1, 32, 16, windows=(None,), tied=True)
    with pytest.raises(ValueError, match="was not made by load_model"):
        conversion.save_model(conversion.Decoder(config, device="cpu"), tmp_path / "model")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"count": 60}, "6 \\+ 60 tokens exceed the model's 64 positions"),
        ({"count": 0}, "count=0 is below 1"),
        ({"count": 1, "temperature": -1.0}, "temperature=-1.0 is below 0"),
    ],
)
def test_sampling_beyond_the_model_is_rejected(arguments: dict, sentence: str, tmp_path: Path):
    model = conversion.load_model(write_checkpoint(tmp_path / "theirs", "llama"), device="cpu")
    with pytest.raises(ValueError, match=sentence):
        model.generate(torch.zeros(1, 6, dtype=torch.int64), **arguments)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)])
def test_a_file_holds_every_dtype_and_shape(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
):
    value = torch.randn(shape).to(dtype)
    path = tmp_path / "model.safetensors"
    write(path, {"a": Described(dtype, shape)}, [("a", value)])
    read = SafetensorsFile.open(path).read("a")
    assert read.dtype == dtype and read.shape == shape
    assert torch.equal(read.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_its_own_library_reads_a_file_and_writes_one_that_is_read(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    inputs = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(2)}
    save_file(inputs, tmp_path / "theirs.safetensors")
    reference = SafetensorsFile.open(tmp_path / "theirs.safetensors")
    write(
        tmp_path / "ours.safetensors",
        {name: Described(value.dtype, tuple(value.shape)) for name, value in inputs.items()},
        inputs.items(),
    )
    ours = load_file(tmp_path / "ours.safetensors")
    for name, value in inputs.items():
        assert torch.equal(reference.read(name), value)
        assert torch.equal(ours[name], value)
