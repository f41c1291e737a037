"""FP8 codes without a transposed copy, on GPUs whose products read both axes and which have passed the self-test."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support import forked
from tests.support.programs import ROOT, search_path
from transformer_engine.common import formats, recipe
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.primitives.gemm import Epilogue, cublaslt, cublaslt_library
from transformer_engine.pytorch.primitives.gemm.request import GemmRequest
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.tensor import float8_tensor
from transformer_engine.pytorch.tensor.storage import float8_tensor_storage

RECIPES = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}


def choose(monkeypatch, one_copy: bool) -> None:
    for module in (float8_tensor, float8_tensor_storage):
        monkeypatch.setattr(module, "reads_all_layouts", lambda: one_copy)
    monkeypatch.setattr(float8_tensor, "has_cuda", lambda: True)


def train_three_steps(make, kind: str, monkeypatch, one_copy: bool) -> list[torch.Tensor]:
    """Run three steps; return results, gradients and states."""
    choose(monkeypatch, one_copy)
    torch.manual_seed(0)
    layer = make()
    results: list[torch.Tensor] = []
    for _ in range(3):
        x = torch.randn(64, 64, requires_grad=True)
        with te.autocast(recipe=RECIPES[kind]()), use_backend(gemm="reference"):
            y = layer(x)
        y.backward(torch.randn_like(y))
        assert x.grad is not None
        results += [y.detach(), x.grad]
    return results + [
        parameter.grad for parameter in layer.parameters() if parameter.grad is not None
    ]


LAYERS = {
    "linear": lambda: te.Linear(64, 96, device="cpu"),
    "layernorm_linear": lambda: te.LayerNormLinear(64, 96, device="cpu"),
    "layernorm_mlp": lambda: te.LayerNormMLP(64, 128, activation="swiglu", device="cpu"),
    "ops": lambda: te.ops.Sequential(
        te.ops.Linear(64, 96, device="cpu"), te.ops.GELU(), te.ops.Linear(96, 64, device="cpu")
    ),
}


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_one_copy_gives_the_bits_of_two_copies(name, kind, monkeypatch):
    two = train_three_steps(LAYERS[name], kind, monkeypatch, one_copy=False)
    one = train_three_steps(LAYERS[name], kind, monkeypatch, one_copy=True)
    assert len(one) == len(two) > 6
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("kind", RECIPES)
def test_operands_of_one_copy_share_their_codes(kind, monkeypatch):
    choose(monkeypatch, True)
    if kind == "delayed":
        quantizer = te.Float8Quantizer(torch.ones(1), torch.zeros(1), te.DType.kFloat8E4M3)
    else:
        quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")
    both = quantizer.operands(torch.randn(32, 48), True, True)
    assert both.rowwise.codes.shape == (32, 48) and both.columnwise.codes.shape == (48, 32)
    assert both.rowwise.codes.data_ptr() == both.columnwise.codes.data_ptr()
    columns = quantizer.operands(torch.randn(32, 48), False, True)
    assert columns.rowwise is None and columns.columnwise.codes.stride() == (1, 48)


def program(architecture: str, *options: str) -> dict[str, dict]:
    arguments = ["-W", "ignore", "-m", "tests.tensor.one_copy_launches", architecture, *options]
    return json.loads(
        forked.output(arguments, ROOT, {**os.environ, "PYTHONPATH": search_path()}, 300)
    )


def test_casts_write_no_transpose_after_the_self_test_has_passed():
    untested, passed = program("10.0"), program("10.0", "passed")
    for kind in RECIPES:
        assert untested[kind]["transposed"] >= 3 and passed[kind]["transposed"] == 0
        assert untested[kind]["products"] == passed[kind]["products"] == ["cublaslt"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["9.0", "12.0"])
def test_a_passed_test_changes_nothing_on_gpus_without_the_products(architecture):
    assert program(architecture, "passed") == program(architecture)


@pytest.mark.parametrize(
    ("hardware", "words"), [((10, 0), None), ((11, 0), None), ((9, 0), "K-contiguous")]
)
def test_cublaslt_takes_codes_along_either_axis_where_the_hardware_does(
    hardware, words, monkeypatch
):
    monkeypatch.setattr(cublaslt_library, "unavailable_reason", lambda: None)
    codes = torch.empty(64, 128, dtype=torch.float8_e4m3fn)
    left = Operand(codes.t(), torch.ones(1), formats.FLOAT8)
    right = Operand(torch.empty(32, 64, dtype=torch.float8_e4m3fn), torch.ones(1), formats.FLOAT8)
    request = GemmRequest.of(left, right, Epilogue(torch.bfloat16))
    request = dataclasses.replace(request, device="cuda", hardware=nvidia(*hardware), index=0)
    reason = cublaslt.unsupported_reason(request)
    assert reason is None if words is None else words in str(reason)
    if words is None:
        problem = cublaslt.make_problem(request)
        assert (problem.left_transposed, problem.right_transposed) == (True, True)
        assert (problem.left_leading, problem.right_leading) == (64, 128)
