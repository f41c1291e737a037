"""Two runs of every layer and recipe are bitwise equal; nondeterministic operations raise with their name."""

from __future__ import annotations

import os

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import NAMES, RECIPES, make_call, make_layer, same
from transformer_engine.common.recipe import NVFP4BlockScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

RANDOM = RECIPES | {"nvfp4 with stochastic rounding": NVFP4BlockScaling()}


@pytest.fixture(autouse=True)
def _free_again():
    saved = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    yield
    te.deterministic(False)
    if saved is None:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def train(name, recipe, steps, device, **options):
    """All outputs, gradients and parameters from a run with a fixed seed."""
    FP8GlobalStateManager.reset()
    layer = make_layer(name, device=device, **options)
    x, call = make_call(layer)
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3) if list(layer.parameters()) else None
    records = []
    for _ in range(steps):
        x.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = call()
        y = y[0] if isinstance(y, tuple) else y
        y.float().square().mean().backward()
        records += [y.detach().clone(), x.grad.clone()]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return records + [p.detach().clone() for p in layer.parameters()]


@pytest.mark.parametrize("recipe", RANDOM)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled
def test_two_runs_have_the_same_bits(name, recipe, device):
    with te.deterministic():
        runs = [train(name, RANDOM[recipe], 2, device) for _ in range(2)]
    assert same(*runs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("recipe", "by"),
    [("delayed", "switch"), ("nvfp4 with stochastic rounding", "switch"), ("block", "variable")],
)
def test_fifty_steps_with_dropout_have_the_same_bits(recipe, by, device, monkeypatch):
    if by == "variable":
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    else:
        te.deterministic()
    options = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    runs = [train("TransformerLayer", RANDOM[recipe], 50, device, **options) for _ in range(2)]
    assert same(*runs)


def test_leaving_a_block_restores_the_previous_settings():
    assert not torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with te.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        with te.deterministic(False):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == filled


def test_as_a_switch_it_persists_and_as_a_decorator_it_covers_one_call():
    te.deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
    te.deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_one_context_object_can_be_entered_repeatedly_and_nested():
    block = te.deterministic()
    te.deterministic(False)
    for _ in range(2):
        with block:
            assert torch.are_deterministic_algorithms_enabled()
            with block, te.deterministic(False):
                assert not torch.are_deterministic_algorithms_enabled()
            assert torch.are_deterministic_algorithms_enabled()
        assert not torch.are_deterministic_algorithms_enabled()


def test_determinism_and_autotuning_exclude_each_other(monkeypatch):
    with te.deterministic(), pytest.raises(RuntimeError, match="a choice of algorithms by time"):
        te.autotune().__enter__()
    with (
        te.autotune(),
        pytest.raises(RuntimeError, match=r"te.autotune\(\) chooses algorithms by time"),
    ):
        te.deterministic()
    monkeypatch.setenv("NVTE_AUTOTUNE", "1")
    with pytest.raises(RuntimeError, match="NVTE_AUTOTUNE=1"):
        te.deterministic()
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    with pytest.raises(RuntimeError, match="a choice of algorithms by time"):
        te.autotune().__enter__()


@pytest.mark.parametrize("backend", ["flex", "torch_cudnn"])
def test_nondeterministic_attention_backends_report_a_reason(backend, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    layer = make_layer("DotProductAttention", device="cpu")
    _, call = make_call(layer)
    explanation = te.explain(call)
    (decision,) = [d for d in explanation.decisions if d.operation == "attention"]
    reason = next(v.reason for v in decision.verdicts if v.backend == backend)
    assert reason is not None


@pytest.mark.gpu
def test_nondeterministic_torch_operations_raise():
    with te.deterministic(), pytest.raises(RuntimeError, match="deterministic"):
        torch.nn.functional.ctc_loss(
            torch.randn(5, 1, 4, device="cuda", requires_grad=True).log_softmax(-1),
            torch.ones(1, 2, dtype=torch.long, device="cuda"),
            (5,),
            (2,),
        ).backward()
