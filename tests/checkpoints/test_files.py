"""A trained model is restored by torch.save, safetensors and torch.distributed.checkpoint, under every recipe."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.conversion.safetensors import Described, SafetensorsFile, write
from transformer_engine.pytorch.quantization import all_families

pytestmark = pytest.mark.usefixtures("emulated")

RECIPES = pytest.mark.parametrize(
    "kind", [row.recipe for row in all_families() if row.checkpointed]
)
PARAMETERS = pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])


def model(recipe: recipes.Recipe, quantized: bool, device: torch.device) -> torch.nn.Module:
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        return torch.nn.Sequential(
            te.LayerNormLinear(64, 64, device=device), te.LayerNormMLP(64, 128, device=device)
        )


def output(module: torch.nn.Module, recipe: recipes.Recipe, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), te.autocast(recipe=recipe):
        return module(x)


@pytest.fixture
def trained(kind, quantized: bool, device: torch.device):
    """Return a recipe, a model after a step, an input, and a model of the same kind that never ran."""
    recipe = kind()
    module = model(recipe, quantized, device)
    x = torch.randn(32, 64, device=device)
    with te.autocast(recipe=recipe):
        module(x).sum().backward()
    return recipe, module, x, model(recipe, quantized, device)


@RECIPES
@PARAMETERS
def test_torch_save(trained, tmp_path: Path):
    recipe, module, x, fresh = trained
    torch.save(module.state_dict(), tmp_path / "file")
    fresh.load_state_dict(torch.load(tmp_path / "file", weights_only=True))
    assert torch.equal(output(fresh, recipe, x), output(module, recipe, x))


@RECIPES
@PARAMETERS
def test_distributed_checkpoint_into_a_new_module(trained, tmp_path: Path):
    recipe, module, x, fresh = trained
    dcp.save(module.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    fresh.load_state_dict(state)
    assert torch.equal(output(fresh, recipe, x), output(module, recipe, x))


def test_distributed_checkpoint_of_a_new_module_into_a_used_one(tmp_path: Path, device):
    recipe = recipes.DelayedScaling()
    fresh, module = model(recipe, False, device), model(recipe, False, device)
    output(module, recipe, torch.randn(32, 64, device=device))
    dcp.save(fresh.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = module.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["0._extra_state"].numel() == 0
    module.load_state_dict(state)
    assert torch.equal(module[0].weight, fresh[0].weight)


@RECIPES
@PARAMETERS
def test_a_file_of_plain_tensors(trained, tmp_path: Path):
    recipe, module, x, fresh = trained
    plain = te.plain_state_dict(module)
    assert not any(isinstance(value, te.QuantizedTensor) for value in plain.values())
    path = tmp_path / "model.safetensors"
    write(
        path,
        {key: Described(value.dtype, tuple(value.shape)) for key, value in plain.items()},
        plain.items(),
    )
    read = SafetensorsFile.open(path)
    te.load_plain_state_dict(fresh, {key: read.read(key) for key in read.tensors})
    assert torch.equal(output(fresh, recipe, x), output(module, recipe, x))


@RECIPES
@PARAMETERS
def test_safetensors(trained, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    recipe, module, x, fresh = trained
    save_file(te.plain_state_dict(module), tmp_path / "model.safetensors")
    te.load_plain_state_dict(fresh, load_file(tmp_path / "model.safetensors"))
    assert torch.equal(output(fresh, recipe, x), output(module, recipe, x))


def test_a_sharded_checkpoint_of_plain_layers_loads_strictly(
    device: torch.device, tmp_path: Path, monkeypatch
):
    """Write two files with the metadata {"format": "pt"} and an index of them, as Hugging Face does."""
    from safetensors.torch import load_file, save_file

    reference = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 32)
    )
    state = reference.state_dict()
    where = {name: f"model-0000{1 + name.startswith('2')}-of-00002.safetensors" for name in state}
    for file in set(where.values()):
        part = {name: value for name, value in state.items() if where[name] == file}
        save_file(part, tmp_path / file, metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    read = {name: load_file(tmp_path / file)[name] for name, file in index.items()}
    ours = torch.nn.Sequential(
        te.Linear(32, 64, device=device),
        te.LayerNorm(64, device=device),
        te.Linear(64, 32, device=device),
    )
    assert not any(ours.load_state_dict(read, strict=True))
    x = torch.randn(16, 32)
    torch.testing.assert_close(ours(x.to(device)).cpu(), reference(x), rtol=1e-3, atol=1e-3)
    monkeypatch.setenv("NVTE_STRICT_EXTRA_STATE", "1")
    with pytest.raises(RuntimeError, match=r"0\._extra_state"):
        ours.load_state_dict(read, strict=True)


def test_codes_of_another_kind_are_rejected_and_nothing_is_loaded(device: torch.device):
    current, blocks = recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()
    plain = te.plain_state_dict(model(current, True, device))
    target = model(blocks, True, device)
    before = copy.deepcopy(te.plain_state_dict(target))
    with pytest.raises(
        ValueError,
        match=r"stored in codes of Float8Tensor\.kFloat8E4M3, the module's is MXFP8Tensor",
    ):
        te.load_plain_state_dict(target, plain)
    after = te.plain_state_dict(target)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_part_that_is_missing_is_named(device: torch.device):
    module = model(recipes.Float8CurrentScaling(), True, device)
    plain = {
        name: value
        for name, value in te.plain_state_dict(module).items()
        if not name.endswith("scale_inv")
    }
    with pytest.raises(ValueError, match=r"_scale_inv is missing, the module's is torch\.float32"):
        te.load_plain_state_dict(module, plain)


def test_an_extra_state_is_a_plain_tensor_to_everything_else(device: torch.device):
    module = te.Linear(64, 64, device=device)
    output(module, recipes.DelayedScaling(), torch.randn(32, 64, device=device))
    state = module.get_extra_state()
    assert isinstance(pickle.loads(bytes(state.numpy())), dict)
    assert tuple(state.size()) == tuple(state.shape) and state.size().numel() == state.numel()
    assert type(state + 0) is torch.Tensor
    twin = copy.deepcopy(state)
    assert torch.equal(twin, state) and twin.data_ptr() != state.data_ptr()
    assert type(pickle.loads(pickle.dumps(state))) is torch.Tensor
