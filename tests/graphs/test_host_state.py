"""te.graphed(step): state on the host that a replay would not repeat prevents a capture, or is in the signature."""

from __future__ import annotations

import random
import types

import numpy
import pytest
import torch

import transformer_engine.pytorch as te
from tests.graphs.test_training_step import data
from tests.support.recorder import CaptureRecorder
from transformer_engine.common.dispatch import observing
from transformer_engine.pytorch.graphs.automatic import OBSERVED

HIDDEN = 64
config = types.ModuleType("config")
config.scale = 1.0
scale = mean = 1.0


class Trainer:
    """A layer and an optimizer with equal initial values in each instance."""

    model: torch.nn.Module
    factor = 1.0

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(HIDDEN, HIDDEN)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def loss(self, x, y):
        self.optimizer.zero_grad()
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


class Scaled:
    """A callable loss function with its own settings."""

    def __init__(self):
        self.weight = 1.0
        self.inner = types.SimpleNamespace(bias=0.0)

    def __call__(self, out, y):
        return (out - y).square().mean() * self.weight + self.inner.bias


def equal_calls(call, eager, first, count):
    for seed in range(first, first + count):
        assert torch.equal(call(*data(seed)), eager(*data(seed))), seed


def graph(make, calls=8):
    """Compare calls to two equal steps, one of them graphed; return both steps."""
    call, eager = te.graphed(make()), make()
    equal_calls(call, eager, 0, calls)
    return call, eager


def reason_against_capture(make):
    """Reason reported by a step whose calls equal eager calls and that has no graph."""
    call, _ = graph(make)
    assert call.kept == 0
    return call.reason


def test_a_replay_repeats_the_numbers_of_the_capture(capture):
    trainer = Trainer()
    unread = [1.0] * 65
    call = te.graphed(lambda x, y: trainer.loss(x, y).detach() * unread[0])
    for seed in range(6):
        call(*data(seed))
    assert call.kept == 1
    loss = call(*data(0))
    trainer.model.load_state_dict(Trainer().model.state_dict())
    first = call(*data(0))
    trainer.model.load_state_dict(Trainer().model.state_dict())
    unread[0] = 100.0
    assert torch.equal(call(*data(0)), first) and not torch.equal(first, loss)


def test_a_step_that_reads_a_value_on_the_host_is_named(capture):
    trainer = Trainer()

    def step(x, y):
        loss = trainer.loss(x, y).detach()
        return loss if loss.item() >= 0 else -loss

    call = te.graphed(step)
    with pytest.warns(UserWarning, match=r"_local_scalar_dense.* not permitted .*move \.item\(\)"):
        for seed in range(6):
            call(*data(seed))
    assert call.kept == 0


def test_a_callable_objects_state_is_compared(capture):
    class Counting(Trainer):
        steps = 0

        def __call__(self, x, y):
            self.steps += 1
            return self.loss(x * self.steps, y).detach()

    assert reason_against_capture(Counting).startswith("the previous call changed self.steps")


@pytest.mark.parametrize("name", ["weight", "inner.bias"])
def test_a_callables_settings_that_a_step_reads_are_part_of_the_signature(name, capture):
    losses = []

    def make():
        trainer, loss_of = Trainer(), Scaled()
        losses.append(loss_of)

        def step(x, y):
            trainer.optimizer.zero_grad()
            loss = loss_of(trainer.model(x), y)
            loss.backward()
            trainer.optimizer.step()
            return loss.detach()

        return step

    call, eager = graph(make)
    assert call.kept == 1
    for loss_of in losses:
        setattr(loss_of if name == "weight" else loss_of.inner, name.rpartition(".")[2], 100.0)
    equal_calls(call, eager, 8, 1)
    assert call.reason == f"since the previous call, this changed: variable loss_of.{name}"
    equal_calls(call, eager, 9, 5)
    assert (call.kept, call.reason) == (2, None)


@pytest.mark.parametrize("position", ["variable", "module"])
def test_an_autograd_result_that_the_next_step_reads_prevents_a_capture(position, capture):
    def make():
        trainer = Trainer()
        holder = types.SimpleNamespace() if position == "variable" else trainer.model
        holder.average = torch.zeros(())

        def step(x, y):
            loss = trainer.loss(x, y)
            holder.average = 0.9 * holder.average.detach() + 0.1 * loss
            return holder.average.detach()

        return step

    assert (
        "average" in reason_against_capture(make)
        if position == "variable"
        else "Linear" in reason_against_capture(make)
    )


def test_an_autograd_result_in_a_layer_is_named(capture):
    class Router(torch.nn.Linear):
        auxiliary = None

        def forward(self, x):
            out = super().forward(x)
            self.auxiliary = out.square().mean()
            return out

    def make():
        trainer = Trainer()
        torch.manual_seed(0)
        trainer.model = Router(HIDDEN, HIDDEN)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05)
        return lambda x, y: trainer.loss(x, y).detach()

    assert reason_against_capture(make).startswith("the previous call changed auxiliary of Router")


def test_an_argument_that_a_step_writes_is_named(capture):
    totals = torch.zeros(2)

    def make():
        trainer = Trainer()

        def step(x, y, total):
            loss = trainer.loss(x, y)
            total += loss.detach()
            return loss.detach()

        return step

    call, eager = te.graphed(make()), make()
    for seed in range(8):
        assert torch.equal(call(*data(seed), totals[0]), eager(*data(seed), totals[1]))
    assert call.kept == 0 and totals[0] == totals[1]
    assert call.reason.startswith("the previous call changed argument total")


def test_an_inference_tensor_is_named(capture):
    trainer = Trainer()
    call = te.graphed(lambda x, y, offset: trainer.loss(x, y).detach() + offset)
    with torch.inference_mode():
        offset = torch.ones(())
    for seed in range(3):
        call(*data(seed), offset)
    assert call.reason.startswith("argument offset is an inference tensor")


GENERATORS = {
    "random": lambda: random.random,
    "random.Random": lambda: random.Random(0).random,
    "object of random.Random": lambda: _draw(random.Random(0)),
    "SystemRandom": lambda: _draw(random.SystemRandom()),
    "numpy": lambda: numpy.random.rand,
    "numpy.Generator": lambda: numpy.random.default_rng(0).random,
    "numpy.MT19937": lambda: _draw(numpy.random.Generator(numpy.random.MT19937(0))),
    "numpy.RandomState": lambda: numpy.random.RandomState(0).rand,
    "torch.Generator": lambda: _torch_draw(torch.Generator()),
    "torch": lambda: _torch_draw(None),
}


def _draw(generator):
    return lambda: generator.random()


def _torch_draw(generator):
    return lambda: torch.rand((), generator=generator).item()


@pytest.mark.parametrize("name", GENERATORS)
def test_host_random_generators_prevent_a_capture(name, capture):
    trainer, draw = Trainer(), GENERATORS[name]()
    call = te.graphed(lambda x, y: trainer.loss(x * (1.0 + draw()), y).detach())
    for seed in range(8):
        call(*data(seed))
    assert call.kept == 0
    assert call.reason.startswith("the previous call changed a random generator of the host")


def test_a_layers_random_generator_prevents_a_capture(capture):
    class Noisy(torch.nn.Linear):
        def __init__(self):
            super().__init__(HIDDEN, HIDDEN)
            self.noise = random.Random(0)

        def forward(self, x):
            return super().forward(x) * self.noise.random()

    def make():
        trainer = Trainer()
        torch.manual_seed(0)
        trainer.model = Noisy()
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05)
        return lambda x, y: trainer.loss(x, y).detach()

    assert "variable trainer.model.noise" in reason_against_capture(make)


def test_a_global_variable_that_shares_the_name_of_an_attribute_is_not_read():
    """`mean` changes after each call; the step reads a tensor's method `mean`."""
    monkey = CaptureRecorder()
    trainer = Trainer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_engine.pytorch.graphs.build.graph_recorder", monkey.in_pool)
        patch.setattr("transformer_engine.pytorch.graphs.automatic.records", lambda device: True)
        call = te.graphed(lambda x, y: trainer.loss(x, y).mean().detach())
        for seed in range(8):
            patch.setitem(globals(), "mean", float(call(*data(seed))))
    assert (call.kept, call.reason) == (1, None)


def _scaled(x):
    return [part * scale for part in x.chunk(2)]


def _scale_by_module_global(x):
    return [x * config.scale]


def _scale_by_class_attribute(x):
    return [x * Trainer.factor]


class Layer(torch.nn.Linear):
    """A layer whose forward pass reads a global variable."""

    def forward(self, x):
        return super().forward(x) * scale


@pytest.mark.parametrize(
    ("parts", "owner", "name"),
    [
        (_scaled, None, "scale"),
        (_scale_by_module_global, config, "scale"),
        (_scale_by_class_attribute, Trainer, "factor"),
    ],
)
def test_global_variables_of_nested_functions_are_part_of_the_signature(
    parts, owner, name, capture, monkeypatch
):
    def make():
        trainer = Trainer()
        return lambda x, y: (
            lambda: trainer.loss(torch.cat([part + 0 for part in parts(x)]), y).detach()
        )()

    call, eager = graph(make)
    assert call.kept == 1
    if owner is None:
        monkeypatch.setitem(globals(), name, 3.0)
    else:
        monkeypatch.setattr(owner, name, 3.0)
    equal_calls(call, eager, 8, 1)
    assert call.reason.startswith("since the previous call, this changed: global variable")
    equal_calls(call, eager, 9, 6)
    assert (call.kept, call.reason) == (2, None)


def test_global_variables_of_methods_and_forward_passes_are_part_of_the_signature(
    capture, monkeypatch
):
    class Own(Trainer):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = Layer(HIDDEN, HIDDEN)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

        def step(self, x, y):
            return self.shifted(self.loss(x, y))

        def shifted(self, loss):
            return loss.detach() + config.scale

    call, eager = graph(lambda: Own().step)
    assert call.kept == 1
    monkeypatch.setattr(config, "scale", 5.0)
    equal_calls(call, eager, 8, 2)
    monkeypatch.setitem(globals(), "scale", 3.0)
    equal_calls(call, eager, 10, 1)
    assert call.reason == "since the previous call, this changed: global variable scale"


def test_a_model_in_an_inner_function_belongs_to_the_step(capture):
    def make():
        trainer = Trainer()

        def outputs(x):
            return [(lambda: trainer.model(part))() for part in x.chunk(2)]

        def step(x, y):
            trainer.optimizer.zero_grad()
            loss = (torch.cat(outputs(x)) - y).square().mean()
            loss.backward()
            trainer.optimizer.step()
            return loss.detach()

        step.model = trainer.model
        return step

    call, eager = graph(make)
    assert call.kept == 1
    for step in (call.function, eager):
        step.model.eval()
    equal_calls(call, eager, 8, 1)
    assert "of Linear" in call.reason


def test_no_calls_result_has_an_autograd_graph(capture):
    trainer, other = Trainer(), torch.nn.Linear(HIDDEN, HIDDEN)

    def step(x, y):
        trainer.loss(x, y)
        return {"loss": (other(x) - y).square().mean()}

    call = te.graphed(step)
    results = [call(*data(seed))["loss"] for seed in range(8)]
    assert call.kept == 1
    assert [result.requires_grad for result in results] == [False] * 8


def test_a_memory_pool_is_freed_with_its_last_graph(capture, monkeypatch):
    trainer = Trainer()
    call = te.graphed(lambda x, y: trainer.loss(x, y).detach())
    pools = []
    record = capture.record

    def record_values(body):
        pools.append(capture.pool)
        return record(body)

    monkeypatch.setattr(capture, "record", record_values)
    for seed in range(6):
        call(*data(seed))
    for seed in range(6):
        call(*data(seed, tokens=8))
    call.reset()
    for seed in range(6):
        call(*data(seed))
    assert len(pools) == 3
    assert pools[0] is pools[1] and pools[2] is not pools[0]


def test_eager_results_and_gradients_are_synchronized_with_the_callers_stream(capture):
    trainer = Trainer()
    call = te.graphed(lambda x, y: trainer.loss(x, y).detach())
    for seed in range(4):
        capture.handed_over.clear()
        result = call(*data(seed))
        assert any(tensor is result for tensor in capture.handed_over)
        for parameter in trainer.model.parameters():
            assert any(tensor is parameter.grad for tensor in capture.handed_over)


@pytest.mark.parametrize("error", [AttributeError, TypeError, AssertionError])
def test_an_unexpected_capture_error_is_raised(error, capture, monkeypatch):
    trainer = Trainer()
    call = te.graphed(lambda x, y: trainer.loss(x, y).detach())
    for seed in range(4):
        call(*data(seed))

    def fails(body):
        raise error("a fault")

    monkeypatch.setattr(capture, "record", fails)
    with pytest.raises(error, match="a fault"):
        call(*data(4))


def test_a_capture_without_memory_is_tried_again(capture, monkeypatch):
    trainer = Trainer()
    call = te.graphed(lambda x, y: trainer.loss(x, y).detach())
    for seed in range(4):
        call(*data(seed))

    def fails(body):
        raise torch.OutOfMemoryError("out of memory")

    with (
        monkeypatch.context() as patch,
        pytest.warns(UserWarning, match="could not be captured: out of mem"),
    ):
        patch.setattr(capture, "record", fails)
        call(*data(4))
    for seed in range(4):
        call(*data(seed))
    assert (call.kept, call.reason) == (1, None)


def test_an_observer_makes_calls_run_eagerly_with_that_reason(capture):
    trainer = Trainer()
    call = te.graphed(lambda x, y: trainer.loss(x, y).detach())
    layer = te.graphed(te.Linear(HIDDEN, HIDDEN, device="cpu"))
    for seed in range(6):
        call(*data(seed))
        layer(data(seed)[0])
    with observing(lambda operation, request: None):
        call(*data(6))
        layer(data(6)[0])
    assert call.reason == layer.forward.reason == OBSERVED
    call(*data(7))
    assert call.reason is None


@pytest.mark.gpu
def test_a_cuda_graph_is_captured_again_after_a_reset():
    trainer = Trainer()
    trainer.model.cuda()
    call = te.graphed(lambda x, y: trainer.loss(x, y).detach())
    for _ in range(2):
        for seed in range(6):
            call(*data(seed, device="cuda"))
        assert (call.kept, call.reason) == (1, None)
        gradient = trainer.model.weight.grad
        call.reset()
    assert gradient.isfinite().all()


@pytest.mark.gpu
def test_eager_cuda_results_outlive_another_streams_work():
    trainer = Trainer()
    trainer.model.cuda()
    call = te.graphed(
        lambda x, y: trainer.loss(x, y).detach() + torch.zeros(1 << 20, device="cuda"), after=64
    )
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    x, y = data(0, device="cuda")
    torch.cuda.synchronize()
    for _ in range(8):
        with torch.cuda.stream(streams[0]):
            result = call(x, y)
            expected = result[0].clone()
            torch.cuda._sleep(20_000_000)
            actual = result.clone()
            del result
        with torch.cuda.stream(streams[1]):
            call(x, y)
        torch.cuda.synchronize()
        assert torch.equal(actual, expected.expand_as(actual))
