"""Layers under an offloading context: the same bits, activations moved once, parameters never."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, make_layer
from tests.support.link import RecordedLink
from transformer_engine.pytorch.functions import layer as layers
from transformer_engine.pytorch.offload import hooks, marks
from transformer_engine.pytorch.offload.hooks import OffloadContext
from transformer_engine.pytorch.offload.synchronizer import (
    DefaultOffloadSynchronizer,
    ManualOffloadSynchronizer,
)
from transformer_engine.pytorch.ops import chain
from transformer_engine.pytorch.quantization import emulate

LAYERS, OFFLOADED, HIDDEN, TOKENS, BATCH = 4, 2, 64, 16, 4


@pytest.fixture(autouse=True)
def _every_size_moves(monkeypatch):
    monkeypatch.setattr(marks, "SMALLEST", 512)
    with emulate():
        yield


def _model(kind):
    options = {"out_features": HIDDEN} if "Linear" in kind else {}
    return torch.nn.ModuleList([make_layer(kind, device="cpu", **options) for _ in range(LAYERS)])


def _step(model, x, recipe, context, synchronize, before_backward=lambda: None):
    x = x.clone().requires_grad_()
    y = x
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        for layer in model:
            with context:
                y = layer(y)
            y = synchronize(y)
    before_backward()
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def _plainly(model, x, recipe):
    return _step(model, x, recipe, contextlib.nullcontext(), lambda y: y)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"])
@pytest.mark.sampled
def test_two_steps_have_the_bits_of_a_model_that_offloads_nothing(kind, recipe):
    plain = _model(kind)
    offloading = copy.deepcopy(plain)
    link = RecordedLink()
    context = OffloadContext(DefaultOffloadSynchronizer(LAYERS, OFFLOADED, link=link))
    for step in range(2):
        x = torch.randn(TOKENS, BATCH, HIDDEN)
        expected = _plainly(plain, x, RECIPES[recipe])
        actual = _step(offloading, x, RECIPES[recipe], context, context.synchronize)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), step
    assert link.log.count("out") == link.log.count("back") > 0
    assert context.offload_synchronizer.get_offloaded_total_size_mb() == 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"])
@pytest.mark.sampled
def test_tensors_marked_as_ready_are_not_written_again(kind, recipe, monkeypatch):
    """A tensor may be copied once it is marked, while its layer still runs."""
    records = []

    def note(saved):
        records.extend((values, values.clone()) for values in marks.list_tensors(saved))
        marks.mark_ready(saved)

    for module in (layers, chain):
        monkeypatch.setattr(module, "mark_ready", note)
    context = OffloadContext(DefaultOffloadSynchronizer(LAYERS, OFFLOADED, link=RecordedLink()))
    x = torch.randn(TOKENS, BATCH, HIDDEN)
    _step(_model(kind), x, RECIPES[recipe], context, context.synchronize)
    assert len(records) >= LAYERS
    assert all(torch.equal(_bytes(now), _bytes(then)) for now, then in records)


def _bytes(values):
    return values.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("quantized", [False, True], ids=["values", "codes"])
def test_no_parameter_and_nothing_made_of_one_is_moved(recipe, quantized):
    """One row of tokens: activations are below the size that moves, weights above."""
    if quantized and RECIPES[recipe] is None:
        pytest.skip("parameters in high precision have no codes")
    with te.quantized_model_init(enabled=quantized, recipe=RECIPES[recipe]):
        model = torch.nn.ModuleList(
            [te.Linear(HIDDEN * 2, HIDDEN * 2, device="cpu") for _ in range(LAYERS)]
        )
    marks.SMALLEST = HIDDEN * 2 * HIDDEN * 2 // 2
    link = RecordedLink()
    context = OffloadContext(DefaultOffloadSynchronizer(LAYERS, OFFLOADED, link=link))
    _step(model, torch.randn(32, HIDDEN * 2), RECIPES[recipe], context, context.synchronize)
    assert link.log == []


@pytest.mark.parametrize("trained", range(LAYERS))
def test_layers_below_the_trained_ones_and_evaluations_move_nothing(trained):
    plain = _model("LayerNormLinear")
    plain[:trained].requires_grad_(False)
    offloading = copy.deepcopy(plain)
    link = RecordedLink()
    context = OffloadContext(DefaultOffloadSynchronizer(LAYERS, OFFLOADED, link=link))
    x = torch.randn(TOKENS, BATCH, HIDDEN)

    def output(model, forward_context, synchronize):
        y = x
        for layer in model:
            with forward_context:
                y = layer(y)
            y = synchronize(y)
        return y

    for _ in range(2):
        y = output(offloading, context, context.synchronize)
        expected = output(plain, contextlib.nullcontext(), lambda y: y)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(y, expected)
        for actual, reference in zip(offloading.parameters(), plain.parameters(), strict=True):
            assert (
                actual.grad is None
                if reference.grad is None
                else torch.equal(actual.grad, reference.grad)
            )
        moved = link.log.count("out")
        assert moved == link.log.count("back") and (moved > 0) == (trained < OFFLOADED)
        with torch.no_grad():
            assert torch.equal(output(offloading, context, context.synchronize), expected)
        assert link.log.count("out") == moved


def test_a_layers_saved_activations_move_and_are_copied_once():
    """A linear layer in high precision saves its input for the gradient of its weight, and its weight."""
    model = _model("Linear")
    link = RecordedLink()
    context = OffloadContext(DefaultOffloadSynchronizer(LAYERS, OFFLOADED, link=link))
    _step(model, torch.randn(TOKENS, BATCH, HIDDEN), None, context, context.synchronize)
    assert link.copied == OFFLOADED * TOKENS * BATCH * HIDDEN * 4


def test_manually_offloaded_layers_have_the_same_gradients():
    plain = _model("LayerNormMLP")
    offloading = copy.deepcopy(plain)
    x = torch.randn(TOKENS, BATCH, HIDDEN)
    manual = ManualOffloadSynchronizer(LAYERS, link=RecordedLink())
    context = OffloadContext(manual)

    def away_and_back():
        for layer in range(LAYERS):
            manual.start_offload_layer(layer)
        for layer in range(LAYERS):
            manual.release_activation_forward_gpu_memory(layer)
        for layer in reversed(range(LAYERS)):
            manual.start_reload_layer(layer)

    result = _step(offloading, x, None, context, context.synchronize, away_and_back)
    assert all(torch.equal(a, b) for a, b in zip(result, _plainly(plain, x, None), strict=True))


def test_a_layer_that_was_never_brought_back_is_when_its_backward_asks():
    plain = _model("Linear")
    offloading = copy.deepcopy(plain)
    x = torch.randn(TOKENS, BATCH, HIDDEN)
    link = RecordedLink()
    manual = ManualOffloadSynchronizer(LAYERS, link=link)
    context = OffloadContext(manual)

    def away():
        manual.start_offload_layer(1)
        manual.release_activation_forward_gpu_memory(1)

    result = _step(offloading, x, None, context, context.synchronize, away)
    assert "back" in link.log
    assert all(torch.equal(a, b) for a, b in zip(result, _plainly(plain, x, None), strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_offloaded_layers_may_be_recomputed(reentrant):
    plain = _model("LayerNormMLP")
    offloading = copy.deepcopy(plain)
    x = torch.randn(TOKENS, BATCH, HIDDEN)
    link = RecordedLink()
    context = OffloadContext(DefaultOffloadSynchronizer(LAYERS, OFFLOADED, link=link))
    recomputed = [
        lambda y, layer=layer: te.checkpoint(layer, y, use_reentrant=reentrant)
        for layer in offloading
    ]
    x_plain, x_moved = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = x_moved
    for layer in recomputed:
        with context:
            y = layer(y)
        y = context.synchronize(y)
    y.square().sum().backward()
    expected = x_plain
    for layer in plain:
        expected = layer(expected)
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(x_moved.grad, x_plain.grad)


def test_the_first_form_commits_groups_and_has_the_same_gradients(monkeypatch):
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    without_gpu = pytest.warns(UserWarning, match="no GPU here")
    with contextlib.nullcontext() if torch.cuda.is_available() else without_gpu:
        context, commit = te.get_cpu_offload_context(True, OFFLOADED, LAYERS, True, False, True)
    assert isinstance(context, hooks.CpuOffloadHookWithOffloadHandler)
    link = RecordedLink()
    context.offload_handler.__init__(OFFLOADED, LAYERS, link=link)
    plain = _model("Linear")
    offloading = copy.deepcopy(plain)
    x = torch.randn(TOKENS, BATCH, HIDDEN)
    result = _step(offloading, x, None, context, commit)
    assert link.log.count("back") == OFFLOADED
    assert all(torch.equal(a, b) for a, b in zip(result, _plainly(plain, x, None), strict=True))
    with pytest.raises(ValueError, match="no manual_synchronization"):
        te.get_cpu_offload_context(True, 1, 3, manual_synchronization=True)


def _gpu_step(kind):
    options = {"params_dtype": torch.bfloat16, "device": "cuda"}
    if kind == "TransformerLayer":
        dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        return te.TransformerLayer(1024, 4096, 8, fuse_qkv_params=True, **dropout, **options)
    return getattr(te, kind)(1024, 4096 if kind == "LayerNormMLP" else 1024, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["none", "current", "delayed", "block"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"])
def test_steps_that_are_queued_behind_one_another_have_the_bits_of_a_model_that_offloads_nothing(
    kind, recipe
):
    """The host never waits, so copies read too early or memory freed too early would change the result."""
    with te.deterministic():
        plain = torch.nn.ModuleList([_gpu_step(kind) for _ in range(LAYERS)])
        offloading = copy.deepcopy(plain)
        context, synchronize = te.get_cpu_offload_context(True, OFFLOADED, LAYERS)
        inputs = [torch.randn(2048, 1, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        expected = [
            _step_results(plain, x, RECIPES[recipe], contextlib.nullcontext(), lambda y: y)
            for x in inputs
        ]
        results = [
            _step_results(offloading, x, RECIPES[recipe], context, synchronize) for x in inputs
        ]
    for step, (ours, reference) in enumerate(zip(results, expected, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True)), step


def _step_results(model, x, recipe, context, synchronize):
    """The results of a step, whose gradients no later step adds to."""
    results = [result.clone() for result in _step(model, x, recipe, context, synchronize)]
    model.zero_grad()
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
def test_the_saved_memory_after_a_forward_is_that_of_the_layers_that_stay(recipe):
    """With 6 of 8 layers offloaded, memory is within 10 % of the tensors that 2 layers save plus all weight codes."""
    layers, offloaded, hidden = 8, 6, 2048
    weights = 0 if recipe == "none" else layers * hidden * hidden
    model = torch.nn.ModuleList(
        [te.Linear(hidden, hidden, params_dtype=torch.bfloat16) for _ in range(layers)]
    )

    def storage_bytes(context, synchronize):
        x = torch.randn(8192, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        y = x * 1
        with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            for layer in model:
                with context:
                    y = layer(y)
                y = synchronize(y)
            torch.cuda.synchronize()
            saved = torch.cuda.memory_allocated() - before
        y.sum().backward()
        return saved

    context, synchronize = te.get_cpu_offload_context(
        enabled=True, num_layers=offloaded, model_layers=layers
    )
    for _ in range(2):
        everything = storage_bytes(contextlib.nullcontext(), lambda y: y)
        moved = storage_bytes(context, synchronize)
    activations = (everything - weights) * (layers - offloaded) / layers
    assert moved == pytest.approx(weights + activations, rel=0.1)
