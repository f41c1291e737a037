"""Offloaded tensors after a backward pass that raised, of several graphs and in several threads.

Every gradient is compared with the one of the same model without offloading.
"""

from __future__ import annotations

import threading

import pytest
import torch

from tests.support.link import RecordedLink
from tests.support.training import Fails
from transformer_engine.pytorch.offload import hooks, marks
from transformer_engine.pytorch.offload.hooks import OffloadContext
from transformer_engine.pytorch.offload.synchronizer import (
    DefaultOffloadSynchronizer,
    ManualOffloadSynchronizer,
)

LAYERS, WIDTH = 4, 64


@pytest.fixture(autouse=True)
def _every_size_moves(monkeypatch):
    monkeypatch.setattr(marks, "SMALLEST", 512)


def fail_now(grad):
    if Fails.now:
        raise KeyError("hook failed")


class Layer(torch.nn.Module):
    """tanh(x @ w) * tanh(x), with a failure of a kind in the backward of one layer."""

    def __init__(self, failure=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.failure = failure

    def forward(self, x):
        y = torch.tanh(x @ self.weight)
        if self.failure == "module":
            y = Fails.apply(y)
        if self.failure == "hook of a tensor":
            y.register_hook(fail_now)
        y = y * torch.tanh(x)
        if self.failure == "hook of the last node":
            y.grad_fn.register_prehook(fail_now)
        return y


FAILURES = ["module", "hook of a tensor", "hook of the last node", "hook of a parameter"]
SYNCHRONIZERS = {
    "default": lambda link: OffloadContext(DefaultOffloadSynchronizer(LAYERS, 2, link=link)),
    "default, one layer stays": lambda link: OffloadContext(
        DefaultOffloadSynchronizer(LAYERS, 3, link=link)
    ),
    "manual": lambda link: OffloadContext(ManualOffloadSynchronizer(LAYERS, link=link)),
    "first form": lambda link: hooks.CpuOffloadHookWithOffloadHandler(
        hooks.SynchronizedGroupOffloadHandler(2, LAYERS, link=link)
    ),
}
every_synchronizer = pytest.mark.parametrize("kind", SYNCHRONIZERS)


def model(failure=None, failing=1):
    torch.manual_seed(3)
    layers = torch.nn.ModuleList(Layer(failure if i == failing else None) for i in range(LAYERS))
    if failure == "hook of a parameter":
        layers[failing].weight.register_hook(fail_now)
    return layers


def inputs(seed):
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def forward(layers, x, context):
    for layer in layers:
        with context:
            x = layer(x)
        if isinstance(context, hooks.CpuOffloadHookWithOffloadHandler):
            x = hooks.GroupCommitFunction.apply(x, context)
        else:
            x = context.synchronize(x)
    return x.square().sum()


def reference_gradients(seed):
    """Gradients of the input and the weights without offloading."""
    layers, x = model(), inputs(seed)
    y = x
    for layer in layers:
        y = layer(y)
    y.square().sum().backward()
    return [x.grad, *(p.grad for p in layers.parameters())]


def assert_gradients(layers, x, seed):
    for actual, reference in zip(
        [x.grad, *(p.grad for p in layers.parameters())], reference_gradients(seed), strict=True
    ):
        torch.testing.assert_close(actual, reference)


def fail(loss, **options):
    Fails.now = True
    try:
        with pytest.raises(KeyError, match="failed"):
            loss.backward(**options)
    finally:
        Fails.now = False


@every_synchronizer
@pytest.mark.parametrize("failing", range(LAYERS))
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.sampled
def test_the_step_after_a_failed_backward_has_its_gradients(failure, failing, kind):
    context = SYNCHRONIZERS[kind](RecordedLink())
    layers = model(failure, failing)
    for step in range(3):
        if step == 1:
            fail(forward(layers, inputs(7), context))
            layers.zero_grad()
        x = inputs(step)
        loss = forward(layers, x, context)
        layers.zero_grad()
        loss.backward()
        assert_gradients(layers, x, step)


@every_synchronizer
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("failing", range(LAYERS))
@pytest.mark.sampled
def test_a_backward_of_an_old_graph_leaves_the_newer_forward_alone(failing, failure, kind):
    """The old graph's tensors are gone, or its hook raises; the newer one keeps its own."""
    context = SYNCHRONIZERS[kind](RecordedLink())
    layers = model(failure, failing)
    old = forward(layers, inputs(1), context)
    x = inputs(2)
    new = forward(layers, x, context)
    Fails.now = True
    with pytest.raises((KeyError, RuntimeError), match=r"failed|are gone"):
        old.backward()
    Fails.now = False
    layers.zero_grad()
    new.backward()
    assert_gradients(layers, x, 2)


@every_synchronizer
def test_the_backward_of_an_old_graph_raises_and_the_newer_one_runs(kind):
    context = SYNCHRONIZERS[kind](RecordedLink())
    layers, x = model(), inputs(2)
    old = forward(layers, inputs(1), context)
    new = forward(layers, x, context)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="its forward has run again"):
            old.backward(retain_graph=True)
    layers.zero_grad()
    new.backward()
    assert_gradients(layers, x, 2)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_backward_is_repeated_where_its_tensors_are_still_there(failure):
    """The backward fails in the last layer, before any tensor is released."""
    context = SYNCHRONIZERS["manual"](RecordedLink())
    layers, x = model(failure, LAYERS - 1), inputs(4)
    loss = forward(layers, x, context)
    for _ in range(2):
        fail(loss, retain_graph=True)
    layers.zero_grad()
    loss.backward()
    assert_gradients(layers, x, 4)


@every_synchronizer
def test_a_second_backward_of_a_retained_graph_leaves_a_newer_forward_alone(kind):
    context = SYNCHRONIZERS[kind](RecordedLink())
    layers, x = model(), inputs(6)
    old = forward(layers, inputs(5), context)
    old.backward(retain_graph=True)
    new = forward(layers, x, context)
    with pytest.raises(RuntimeError, match="are gone"):
        old.backward(retain_graph=True)
    layers.zero_grad()
    new.backward()
    assert_gradients(layers, x, 6)


def test_a_backward_inside_of_a_layers_forward_does_not_move_where_it_saves():
    """The tensors of layer 2 belong to layer 2, although layer 1's backward begins during its forward."""
    link = RecordedLink()
    context = OffloadContext(ManualOffloadSynchronizer(LAYERS, link=link))
    layers, x = model(), inputs(8)
    y = x
    for number, layer in enumerate(layers):
        with context:
            if number == 2:
                torch.autograd.grad(y.sum(), layers[1].weight, retain_graph=True)
            y = layer(y)
        y = context.synchronize(y)
    states = context.offload_synchronizer.layer_states
    assert all(states[number].fwd_gpu_tensor_group.tensor_list for number in (2, 3))


def test_two_graphs_with_separate_contexts_are_interleaved():
    contexts = [SYNCHRONIZERS["default"](RecordedLink()) for _ in range(2)]
    models, xs = [model(), model()], [inputs(10), inputs(11)]
    ys = list(xs)
    for layers in zip(*models, strict=True):
        for i, (layer, context) in enumerate(zip(layers, contexts, strict=True)):
            with context:
                ys[i] = layer(ys[i])
            ys[i] = context.synchronize(ys[i])
    (ys[0].square().sum() + ys[1].square().sum()).backward()
    for i in range(2):
        assert_gradients(models[i], xs[i], 10 + i)


def test_threads_have_separate_contexts():
    """Contexts overlap in time: the first is left while the second is open."""
    link = RecordedLink()
    contexts = [OffloadContext(DefaultOffloadSynchronizer(LAYERS, 2, link=link)) for _ in range(2)]
    entered, left = threading.Event(), threading.Event()
    inside, after = [], []

    def second():
        entered.wait(10)
        with contexts[1]:
            inside.append(marks.is_cpu_offload_enabled())
            left.set()
            done.wait(10)
            inside.append(marks.is_cpu_offload_enabled())
        after.append(marks.is_cpu_offload_enabled())

    done = threading.Event()
    thread = threading.Thread(target=second)
    thread.start()
    with contexts[0]:
        entered.set()
        left.wait(10)
    done.set()
    thread.join()
    assert inside == [True, True] and after == [False] and not marks.is_cpu_offload_enabled()


def test_a_backward_in_another_thread_reads_the_same_tensors():
    context = SYNCHRONIZERS["default"](RecordedLink())
    layers, x = model(), inputs(12)
    for _ in range(2):
        loss = forward(layers, x, context)
        layers.zero_grad()
        x.grad = None
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert_gradients(layers, x, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("failing", range(LAYERS))
@pytest.mark.parametrize("failure", FAILURES)
def test_a_gpu_keeps_the_tensors_of_a_forward_after_a_failed_backward(failure, failing):
    context = OffloadContext(DefaultOffloadSynchronizer(LAYERS, 2))
    layers = model(failure, failing).cuda()
    twin = model().cuda()
    twin.load_state_dict(layers.state_dict())
    for seed in range(2):
        old = forward(layers, inputs(seed).cuda(), context)
        x, y = (inputs(20 + seed).detach().cuda().requires_grad_() for _ in "xy")
        new = forward(layers, x, context)
        Fails.now = True
        with pytest.raises((KeyError, RuntimeError), match=r"failed|are gone"):
            old.backward()
        Fails.now = False
        layers.zero_grad()
        twin.zero_grad()
        new.backward()
        z = y
        for layer in twin:
            z = layer(z)
        z.square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        for p, q in zip(layers.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
