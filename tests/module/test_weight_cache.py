"""Cached quantized weights: all steps reuse their memory, and a pending backward reads its saved tensors."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from tests.support.layers import QUANTIZED, RECIPES
from transformer_engine.pytorch.module import weight_cache
from transformer_engine.pytorch.module.weight_cache import weight_parts

HIDDEN, ROWS = 64, 64
LAYERS = {
    "linear": lambda device: te.Linear(HIDDEN, HIDDEN, device=device),
    "layernorm_linear": lambda device: te.LayerNormLinear(HIDDEN, HIDDEN, device=device),
    "layernorm_mlp": lambda device: te.LayerNormMLP(HIDDEN, HIDDEN, device=device),
    "grouped_linear": lambda device: te.GroupedLinear(2, HIDDEN, HIDDEN, device=device),
    "transformer_layer": lambda device: te.TransformerLayer(
        HIDDEN, HIDDEN, 2, hidden_dropout=0.0, attention_dropout=0.0, device=device
    ),
}


@pytest.fixture(autouse=True)
def _emulation(emulated):
    """Enable emulation in every test of this file."""


@pytest.fixture
def capturing(monkeypatch):
    """A list; while it contains an element, the cache behaves as during graph capture."""
    flag = []
    monkeypatch.setattr(weight_cache, "is_capturing", lambda device: bool(flag))
    return flag


def call(layer, x, name, first):
    splits = ([ROWS // 2, ROWS // 2],) if isinstance(layer, te.GroupedLinear) else ()
    if isinstance(layer, te.TransformerLayer):
        x = x[:, None]
    with te.autocast(recipe=RECIPES[name]):
        return layer(x, *splits, is_first_microbatch=first)


def sample(device):
    return torch.randn(ROWS, HIDDEN, device=device, requires_grad=True)


def cached(layer):
    """{name: tensors} for all cached weights in a layer and its parts."""
    return {
        (prefix, name): weight_parts(weight)[0]
        for prefix, module in layer.named_modules()
        if hasattr(module, "numerics")
        for name, weight in module.numerics.workspaces.items()
    }


def addresses(layer):
    return {
        key: [None if part is None else part.data_ptr() for part in parts]
        for key, parts in cached(layer).items()
    }


def change(layer):
    """Change the weights, but no gain or bias, which a pending backward pass saves without a copy."""
    with torch.no_grad():
        for p in layer.parameters():
            if p.dim() == 2:
                p.mul_(-0.5).add_(0.01)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.sampled
def test_later_steps_write_to_the_memory_of_the_first_step(kind, name, device):
    layer, x = LAYERS[kind](device), sample(device)
    outputs = [
        call(layer, x, name, True)
    ]  # outputs keep the nodes of the graph alive, without their saved tensors
    outputs[0].sum().backward()
    before = addresses(layer)
    assert before
    for first in (False, True, False, True):
        change(layer)
        outputs.append(call(layer, x, name, first))
        outputs[-1].sum().backward()
        assert addresses(layer) == before


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_an_update_is_bitwise_equal_to_a_new_quantization(name, device):
    layer, x = LAYERS["layernorm_mlp"](device), sample(device)
    call(layer, x, name, True).sum().backward()
    change(layer)
    fresh = LAYERS["layernorm_mlp"](device)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(call(layer, x, name, True), call(fresh, x, name, None))
    assert torch.equal(call(layer, x, name, False), call(fresh, x, name, None))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.sampled
def test_a_pending_backward_pass_keeps_the_weights_of_its_forward_pass(kind, hooks, device):
    """Hooks that return the saved tensor itself reference it from Python."""
    layer = LAYERS[kind](device)
    twin = copy.deepcopy(layer)
    x, x2 = sample(device), sample(device)
    if hooks:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            y = call(layer, x, "block", True)
    else:
        y = call(layer, x, "block", True)
    before = addresses(layer)
    change(layer)
    call(layer, x2, "block", True)
    assert all(
        a != b
        for key in before
        for a, b in zip(before[key], addresses(layer)[key], strict=True)
        if a
    )
    (got,) = torch.autograd.grad(y.sin().sum(), x)
    (expected,) = torch.autograd.grad(call(twin, x, "block", None).sin().sum(), x)
    assert torch.equal(got, expected)


def test_a_retained_graph_keeps_its_weights(device):
    layer, x = LAYERS["linear"](device), sample(device)
    y = call(layer, x, "current", True)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    change(layer)
    call(layer, x, "current", True)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second)


def test_training_after_inference_keeps_the_row_memory(device):
    layer, x = LAYERS["linear"](device), sample(device)
    with torch.inference_mode():
        call(layer, x, "block", True)
    (before,) = addresses(layer).values()
    call(layer, x, "block", False).sum().backward()
    (after,) = addresses(layer).values()
    assert [b for a, b in zip(before, after, strict=True) if a is not None] == [
        a for a in before if a
    ]
    assert None in before and None not in after


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        (checkpoint, name)
        for checkpoint in (te.checkpoint, torch_checkpoint)
        for name in QUANTIZED
        # torch's checkpoints do not repeat delayed-scaling scales, see `repeatable`.
        if (checkpoint, name) != (torch_checkpoint, "delayed")
    ],
)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.sampled
def test_a_checkpoint_repeats_its_first_runs_codes(checkpoint, name, reentrant, device):
    layer = LAYERS["layernorm_linear"](device)
    twin = copy.deepcopy(layer)
    x = sample(device)
    y = checkpoint(lambda x: call(layer, x, name, True), x, use_reentrant=reentrant)
    expected = call(twin, x, name, True)
    assert torch.equal(y, expected)
    before = addresses(layer)
    y.sin().sum().backward()
    assert addresses(layer) == before
    got, x.grad = x.grad, None
    expected.sin().sum().backward()
    assert torch.equal(got, x.grad)


def capture_linear(device, kind, capturing):
    """A Linear whose cached weight a captured graph reads, and its input."""
    layer, x = LAYERS["linear"](device), sample(device)
    call(layer, x, kind, True).sum().backward()
    capturing.append(True)
    call(layer, x, kind, False).sum().backward()
    capturing.clear()
    return layer, x


def test_memory_that_a_graph_reads_outlives_state_dicts_and_cleared_caches(device, capturing):
    layer, x = capture_linear(device, "block", capturing)
    before = addresses(layer)
    (parts,) = cached(layer).values()
    alive = [weakref.ref(part) for part in parts if part is not None]
    del parts
    state = {key: value * 2 for key, value in layer.state_dict().items() if key != "_extra_state"}
    layer.load_state_dict(state, strict=False)
    gc.collect()
    assert all(reference() is not None for reference in alive) and not cached(layer)
    call(layer, x, "block", True).sum().backward()
    assert addresses(layer) == before
    layer._fp8_workspaces.clear()
    call(layer, x, "block", True).sum().backward()
    assert addresses(layer) == before


FREEING = {
    "clear": lambda workspaces: workspaces.clear(),
    "pop": lambda workspaces: workspaces.pop("weight"),
    "popitem": lambda workspaces: workspaces.popitem(),
    "del": lambda workspaces: workspaces.__delitem__("weight"),
    "replace": lambda workspaces: workspaces.__setitem__("weight", None),
    "update": lambda workspaces: workspaces.update(weight=None),
}


@pytest.mark.parametrize("way", FREEING)
def test_memory_that_no_graph_reads_is_freed_with_its_entry(way, device):
    layer, x = LAYERS["linear"](device), sample(device)
    call(layer, x, "block", True).sum().backward()
    (parts,) = cached(layer).values()
    alive = [weakref.ref(part) for part in parts if part is not None]
    del parts
    FREEING[way](layer._fp8_workspaces)
    gc.collect()
    assert all(reference() is None for reference in alive)


def test_repeated_captures_keep_a_weights_memory_once(device, capturing):
    layer, x = capture_linear(device, "block", capturing)
    for first in (True, False) * 5:
        call(layer, x, "block", True).sum().backward()
        capturing.append(True)
        call(layer, x, "block", first).sum().backward()
        capturing.clear()
    (entries,) = layer.numerics.workspaces._captured.values()
    assert len(entries) == 1


def test_updating_memory_that_a_graph_and_a_pending_backward_read_is_rejected(device, capturing):
    layer, x = capture_linear(device, "current", capturing)
    pending = call(layer, x, "current", False)
    before = [
        part.clone() for (parts,) in [cached(layer).values()] for part in parts if part is not None
    ]
    change(layer)
    with pytest.raises(
        RuntimeError, match="cannot update the cached weight, which a captured CUDA graph reads"
    ):
        call(layer, x, "current", True)
    (parts,) = cached(layer).values()
    assert all(
        torch.equal(a, b) for a, b in zip(before, [p for p in parts if p is not None], strict=True)
    )
    pending.sum().backward()
    call(layer, x, "current", True).sum().backward()


def test_a_weight_whose_memory_is_replaced_is_quantized_from_its_new_memory(device):
    layer, x = LAYERS["linear"](device), sample(device)
    call(layer, x, "block", True).sum().backward()
    before = addresses(layer)
    layer.weight.data = layer.weight.data * -1.0
    expected = call(layer, x, "block", None)
    assert torch.equal(call(layer, x, "block", True), expected)
    assert addresses(layer) == before


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
@pytest.mark.parametrize("training", [False, True])
def test_a_graph_for_later_microbatches_reads_every_steps_weights(kind, name, training, device):
    layer = LAYERS[kind](device).to(torch.bfloat16)
    x = sample(device).detach().to(torch.bfloat16).requires_grad_(training)

    def run(first):
        with torch.set_grad_enabled(training):
            y = call(layer, x, name, first)
            return (y, *(torch.autograd.grad(y.sum(), x) if training else ()))

    run(True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [output.detach() for output in run(False)]
    for _ in range(3):
        change(layer)
        run(True)
        expected = [output.detach().clone() for output in run(False)]
        churn = [torch.randn(512, 512, device=device) for _ in range(32)]
        graph.replay()
        if name != "delayed":  # the graph updates no scales
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        assert all(bool(output.isfinite().all()) for output in outputs)
        del churn
