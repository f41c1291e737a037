"""Calls of get_cpu_offload_context that the original accepts: which layers move, and the gradients of a plain step."""

from __future__ import annotations

import contextlib
import copy

import numpy
import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.link import RecordedLink
from transformer_engine.common import warning
from transformer_engine.pytorch.offload import hooks, marks

LAYERS = 3
NO_GPU = "ignore:CPU offload. there is no GPU here"


@pytest.fixture(autouse=True)
def _small_tensors_move(monkeypatch):
    monkeypatch.setattr(marks, "SMALLEST", 512)
    monkeypatch.setattr(warning, "_issued", set())


def train_model(layers, context, synchronize):
    """The output and the gradients of a step."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = x
    for layer in layers:
        with context:
            y = layer(y)
        y = synchronize(y)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for layer in layers for p in layer.parameters())]


def check(offloaded, context, synchronize):
    """Compare a step of the context, over a link that records its copies, with a plain one."""
    link = RecordedLink()
    synchronizer = context.offload_synchronizer
    sizes = (LAYERS, synchronizer.num_offloaded_layers)
    first_version = isinstance(synchronizer, hooks.SynchronizedGroupOffloadHandler)
    synchronizer.__init__(*(reversed(sizes) if first_version else sizes), link=link)
    plain = [te.Linear(32, 32, device="cpu") for _ in range(LAYERS)]
    actual = train_model(copy.deepcopy(plain), context, synchronize)
    expected = train_model(plain, contextlib.nullcontext(), lambda y: y)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert link.log.count("out") == link.log.count("back") == offloaded


@pytest.mark.filterwarnings(NO_GPU)
@pytest.mark.parametrize(
    "number", [float, numpy.int64, torch.tensor, lambda n: torch.tensor([float(n)])]
)
@pytest.mark.parametrize("enabled", [2, "yes", torch.tensor(True), numpy.bool_(True)])
def test_layers_and_flags_may_be_given_in_every_form(number, enabled):
    context, synchronize = te.get_cpu_offload_context(
        enabled, number(1), number(LAYERS), numpy.bool_(True)
    )
    check(1, context, synchronize)


def test_a_flag_that_is_false_in_any_form_disables_offload():
    for flag in (0, "", None, torch.tensor(False), numpy.bool_(False)):
        context, synchronize = te.get_cpu_offload_context(flag, -1, 0)
        assert isinstance(context, contextlib.nullcontext)
        tensor = torch.ones(2)
        assert synchronize(tensor) is tensor


@pytest.mark.filterwarnings(NO_GPU)
@pytest.mark.filterwarnings("ignore:num_layers=2 of model_layers=3 leaves no layer")
@pytest.mark.parametrize("number", [None, LAYERS])
def test_the_first_version_offloads_all_layers_but_the_last(number, monkeypatch):
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    warned = contextlib.nullcontext()
    if number is not None:
        warned = pytest.warns(
            UserWarning, match="num_layers=3: .* the last layer, .* 2 layers are offloaded"
        )
    with warned:
        context, synchronize = te.get_cpu_offload_context(True, number, LAYERS)
    check(LAYERS - 1, context, synchronize)
