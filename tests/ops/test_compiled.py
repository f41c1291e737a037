"""torch.compile and CUDA graphs of chains: values and gradients of eager calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES
from tests.support.recorder import RerunRecorder
from tests.support.tolerances import relative_error
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.graphs import automatic, build

PLACE = {"device": "cuda" if torch.cuda.is_available() else "cpu", "dtype": torch.float32}


def chain() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(
        ops.MakeExtraOutput(), ops.LayerNorm(64, **PLACE), ops.Linear(64, 128, **PLACE), ops.GELU(),
        ops.Linear(128, 64, **PLACE),
    )  # fmt: skip


def steps(run: Any, module: Any, recipe: Any, count: int = 2) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    for number in range(count):
        module.zero_grad()
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(32, 64, generator=generator).to(PLACE["device"]).requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y, extra = run(x)
        (y.square().mean() + extra.mean()).backward()
        results += [y.detach().clone(), x.grad, *[p.grad.clone() for p in module.parameters()]]  # pyright: ignore
    return results


@pytest.mark.parametrize(
    "name",
    ["delayed", *[pytest.param(name, marks=pytest.mark.slow) for name in ("none", "current", "mxfp8")]],
)
def test_a_chain_compiles_without_graph_breaks(name, emulated):
    torch._dynamo.reset()
    eager, module = chain(), chain()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected = steps(eager, eager, RECIPES[name])
    actual = steps(compiled, module, RECIPES[name])
    for ours, theirs in zip(actual, expected, strict=True):
        assert relative_error(ours, theirs) <= 1e-5


@pytest.mark.parametrize("name", ["none", "delayed", "current", "mxfp8"])
def test_a_replayed_graph_equals_eager_calls(name, emulated, monkeypatch):
    rerun = RerunRecorder()
    monkeypatch.setattr(build, "graph_recorder", lambda pool=None: rerun)
    monkeypatch.setattr(automatic, "records", lambda device: True)
    recipe = RECIPES[name]
    eager, module = chain(), chain()
    x = torch.randn(32, 64, device=PLACE["device"], requires_grad=True)
    te.make_graphed_callables(module, (x,), enabled=recipe is not None, recipe=recipe)
    expected = steps(eager, eager, recipe, 3)
    actual = steps(module, module, recipe, 3)
    assert rerun.recordings
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
