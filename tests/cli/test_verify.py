"""`te verify` compares the model of a file with one device, and reports missing parts of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import te as run_te

MODEL = """
import torch
import transformer_engine.pytorch as te

def model_fn(mesh):
    torch.manual_seed(0)
    return te.LayerNormLinear(32, 64, device="cpu")

def batch():
    return torch.randn(32, 2, 32, generator=torch.Generator().manual_seed(0))
"""


def te(*arguments: str):
    return run_te("verify", *arguments)


def write_files(folder: Path, text: str) -> str:
    path = folder / "model.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
def test_one_device_equals_itself(recipe: str, tmp_path: Path):
    result = te(write_files(tmp_path, MODEL), "--recipe", recipe, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert (
        "layer_norm_weight.grad" in result.output and "within the format's noise" in result.output
    )


def test_a_difference_exits_with_1_and_names_the_gradient(tmp_path: Path):
    wrong = MODEL + "\ndef reduce_fn(model, mesh):\n    model.bias.grad.mul_(2)\n"
    result = te(write_files(tmp_path, wrong), "--device", "cpu")
    assert result.exit_code == 1, result.output
    assert "the model is the first module that differs, on rank 0, in bias.grad" in result.output


def test_missing_functions_and_processes_are_named(tmp_path: Path):
    result = te(write_files(tmp_path, "batch = 3\n"))
    assert result.exit_code == 2 and "does not define model_fn and batch" in result.output
    result = te(str(tmp_path / "absent.py"))
    assert result.exit_code == 2 and "does not exist" in result.output
    result = te(write_files(tmp_path, MODEL), "--tp", "2", "--device", "cpu")
    assert result.exit_code == 2 and "torchrun --nproc-per-node 2" in result.output
