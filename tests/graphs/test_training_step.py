"""te.graphed(step): graphed training steps equal eager steps bitwise, or report what prevents them.

Without a GPU, a recording runs the step again. Its first run changes no memory, as a capture does.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, make_layer
from transformer_engine.pytorch.graphs.recorded_step import EntryGradients

HIDDEN, TOKENS, BATCH = 64, 16, 4
QUANTIZED = ["delayed", "current", "block"]


def data(seed, tokens=TOKENS, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, tokens, BATCH, HIDDEN, generator=generator).to(device)
    return x, y


class Training:
    """A model, an optimizer, and a step in the forms that users write.

    Args:
        kind: Layer from this package.
        recipe: Recipe name.
        form: Where the gradients are cleared: "first", "last", "in place" or "outside" of the step.
        optimizer: optimizer(parameters) -> the optimizer.
    """

    def __init__(self, kind="LayerNormMLP", recipe="none", form="first", optimizer=None, **options):
        self.model = make_layer(kind, device="cpu", **options)
        self.recipe = RECIPES[recipe]
        self.form = form
        self.optimizer = (optimizer or sgd)(self.model.parameters())

    def step(self, x, y):
        if self.form in ("first", "in place"):
            self.optimizer.zero_grad(set_to_none=self.form == "first")
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            out = self.model(x)
        loss = (out - y).square().mean()
        loss.backward()
        self.optimizer.step()
        if self.form == "last":
            self.optimizer.zero_grad()
        return loss.detach()

    def values(self):
        states = [
            v
            for s in self.optimizer.state.values()
            for v in s.values()
            if isinstance(v, torch.Tensor)
        ]
        return [p.detach() for p in self.model.parameters()] + states


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def fused_adam(parameters):
    return te.optimizers.FusedAdam(parameters, lr=1e-3, capturable=True)


def both(**options):
    return Training(**options), Training(**options)


def run(call, training, steps, first=0):
    losses = []
    for seed in range(first, first + steps):
        if training.form == "outside":
            training.optimizer.zero_grad()
        losses.append(call(*data(seed)))
    return losses


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def bit_equal(graphed, eager, call, steps):
    assert equal(run(call, graphed, steps), run(eager.step, eager, steps))
    assert equal(graphed.values(), eager.values())


@pytest.mark.parametrize("optimizer", [sgd, adamw, fused_adam])
@pytest.mark.parametrize("form", ["first", "last", "in place", "outside"])
def test_graphed_steps_are_bitwise_equal_to_eager_steps(form, optimizer, capture):
    graphed, eager = both(form=form, optimizer=optimizer, recipe="delayed")
    call = te.graphed(graphed.step)
    bit_equal(graphed, eager, call, 12)
    assert (call.kept, call.reason) == (1, None)
    # the first call decides what the function is, three more are counted
    assert capture.log == ["step"] * 8
    gradients = [[p.grad for p in training.model.parameters()] for training in (graphed, eager)]
    assert [g is None for g in gradients[0]] == [g is None for g in gradients[1]]
    assert equal(*[[g for g in local if g is not None] for local in gradients])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "TransformerLayer"])
def test_graphed_layers_and_recipes_are_bitwise_equal_to_eager_steps(kind, recipe, capture):
    sized = {"out_features": HIDDEN} if "Linear" in kind else {}
    graphed, eager = both(kind=kind, recipe=recipe, **sized)
    call = te.graphed(graphed.step)
    bit_equal(graphed, eager, call, 8)
    assert call.kept == 1
    states = [
        [buffer for layer in training.model.modules() for buffer in delayed(layer)]
        for training in (graphed, eager)
    ]
    assert equal(*states)


def delayed(layer):
    scaling = getattr(layer, "fp8_meta", None) or {}
    return [
        tensor
        for direction in ("scaling_fwd", "scaling_bwd")
        if hasattr(scaling.get(direction), "amax_history")
        for tensor in (scaling[direction].scale, scaling[direction].amax_history)
    ]


@pytest.mark.slow
def test_a_thousand_graphed_steps_have_eager_losses(capture):
    graphed, eager = both(kind="Linear", recipe="delayed", out_features=HIDDEN)
    call = te.graphed(graphed.step)
    actual, expected = (
        run(one, training, 1000) for one, training in ((call, graphed), (eager.step, eager))
    )
    assert equal(actual, expected)
    assert len(capture.log) == 996


@pytest.mark.parametrize("recipe", ["none", *QUANTIZED])
def test_microbatches_accumulate_inside_a_step(recipe, capture):
    def make():
        training = Training(recipe=recipe)

        def step(x, y):
            training.optimizer.zero_grad()
            total = torch.zeros(())
            for number, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
                first = {} if training.recipe is None else {"is_first_microbatch": number == 0}
                with te.autocast(enabled=training.recipe is not None, recipe=training.recipe):
                    loss = (training.model(a, **first) - b).square().mean()
                loss.backward()
                total = total + loss.detach()
            training.optimizer.step()
            return total

        return training, step

    (graphed, step), (eager, plain) = make(), make()
    call = te.graphed(step)
    assert equal(run(call, graphed, 9), run(plain, eager, 9))
    assert equal(graphed.values(), eager.values())
    assert call.kept == 1


def test_a_step_without_an_optimizer_accumulates_over_calls(capture):
    graphed, eager = both()

    def microstep(training):
        def step(x, y):
            loss = (training.model(x) - y).square().mean()
            loss.backward()
            return loss.detach()

        return step

    call, plain = te.graphed(microstep(graphed)), microstep(eager)
    for seed in range(30):
        assert torch.equal(call(*data(seed)), plain(*data(seed)))
        if seed % 3 == 2:
            for training in (graphed, eager):
                training.optimizer.step()
                training.optimizer.zero_grad(set_to_none=False)
    assert equal(graphed.values(), eager.values())
    assert call.kept >= 1 and capture.log


def test_each_shape_has_a_graph(capture):
    graphed, eager = both()
    call = te.graphed(graphed.step, signatures=2)
    for number in range(27):
        batch = data(number, tokens=(16, 8, 4)[number % 3])
        assert torch.equal(call(*batch), eager.step(*batch))
    assert call.kept == 2
    call(*data(0, tokens=16))
    assert call.reason.startswith("2 signatures are kept already")


def test_a_learning_rate_in_a_tensor_changes_without_a_capture(capture):
    rates = [torch.tensor(0.05), torch.tensor(0.05)]
    graphed, eager = (
        Training(
            optimizer=lambda p, rate=rate: te.optimizers.FusedAdam(p, lr=rate, capturable=True)
        )
        for rate in rates
    )
    call = te.graphed(graphed.step)
    for step in range(10):
        for training in (graphed, eager):
            training.optimizer.param_groups[0]["lr"].fill_(0.05 / (1 + step))
        assert torch.equal(call(*data(step)), eager.step(*data(step)))
    assert call.kept == 1
    assert equal(graphed.values(), eager.values())


def test_a_learning_rate_on_the_host_is_named(capture):
    graphed, eager = both()
    call = te.graphed(graphed.step)
    for step in range(8):
        for training in (graphed, eager):
            training.optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        assert torch.equal(call(*data(step)), eager.step(*data(step)))
    assert call.kept == 0
    assert call.reason.startswith(
        "since the previous call, this changed: lr of SGD; keep it in a tensor"
    )


def test_graphed_steps_update_quantized_parameters(capture):
    def make():
        with te.quantized_model_init(recipe=RECIPES["current"]):
            model = te.Linear(HIDDEN, HIDDEN, device="cpu")
        training = Training()
        training.model, training.recipe = model, RECIPES["current"]
        training.optimizer = te.optimizers.FusedAdam(
            model.parameters(), lr=1e-2, master_weights=True, capturable=True
        )
        return training

    torch.manual_seed(0)
    graphed = make()
    torch.manual_seed(0)
    eager = make()
    call = te.graphed(graphed.step)
    assert equal(run(call, graphed, 10), run(eager.step, eager, 10))
    assert call.kept == 1
    assert torch.equal(graphed.model.weight.dequantize(), eager.model.weight.dequantize())


def test_a_scaler_skips_steps_that_overflow(capture):
    class Scaled(Training):
        def __init__(self):
            super().__init__(optimizer=fused_adam)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

        def step(self, x, y):
            self.optimizer.zero_grad()
            loss = (self.model(x) - y).square().mean()
            self.scaler.scale(loss).backward()
            self.optimizer.step(grad_scaler=self.scaler)
            self.scaler.update()
            return loss.detach()

    graphed, eager = Scaled(), Scaled()
    call = te.graphed(graphed.step)
    for seed in range(14):
        x, y = data(seed)
        x = x * float("inf") if seed in (3, 9) else x
        assert torch.equal(call(x, y).nan_to_num(), eager.step(x, y).nan_to_num())
        assert torch.equal(graphed.scaler._scale, eager.scaler._scale)
    assert equal(graphed.values(), eager.values())


def test_results_belong_to_the_caller_and_keep_their_structure(capture):
    training = Training()

    def step(batch, *, name):
        loss = training.step(batch["x"], batch["y"])
        return {"loss": loss, "name": name, "sizes": (batch["x"].shape[0], None)}

    call = te.graphed(step)
    results = []
    for seed in range(8):
        x, y = data(seed)
        results.append(call({"x": x, "y": y}, name="train"))
    assert call.kept == 1
    assert len({result["loss"].item() for result in results}) == 8
    assert all(result["name"] == "train" and result["sizes"] == (16, None) for result in results)


class Counting(Training):
    steps = 0

    def step(self, x, y):
        self.steps += 1
        return super().step(x, y)


class Drawing(Training):
    def step(self, x, y):
        return super().step(x * (1.0 + 0.0 * random.random()), y)


class Listing(Training):
    def __init__(self):
        super().__init__()
        self.losses = []

    def step(self, x, y):
        self.losses.append(super().step(x, y))
        return self.losses[-1]


class Reporting(Training):
    def step(self, x, y):
        return super().step(x, y).item()


class HostAdam(Training):
    def __init__(self):
        super().__init__(optimizer=te.optimizers.FusedAdam)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Counting, "the previous call changed self.steps"),
        (Drawing, "the previous call changed a random generator of the host"),
        (Listing, "the previous call changed self.losses"),
        (Reporting, "the previous call changed its result"),
        (
            HostAdam,
            "the previous call changed step of FusedAdam; construct the optimizer with capturable=True",
        ),
    ],
)
def test_state_on_the_host_prevents_a_capture_and_is_named(kind, message, capture):
    graphed, eager = kind(), kind()
    call = te.graphed(graphed.step)
    for seed in range(8):
        actual, expected = call(*data(seed)), eager.step(*data(seed))
        assert actual == expected
    assert call.kept == 0 and capture.log == []
    assert call.reason.startswith(message)
    assert equal(graphed.values(), eager.values())


def test_module_and_parameter_hooks_prevent_a_capture(capture):
    training = Training()
    call = te.graphed(training.step)
    run(call, training, 1)
    handle = training.model.register_forward_hook(lambda *_: None)
    run(call, training, 1)
    assert "has hooks" in call.reason
    handle.remove()
    next(training.model.parameters()).register_hook(lambda grad: grad)
    run(call, training, 1)
    assert call.reason == "a parameter has hooks, which a replay would not call"


def test_an_input_that_requires_a_gradient_is_named(capture):
    training = Training()
    call = te.graphed(lambda batch: training.step(batch["x"], batch["y"]))
    x, y = data(0)
    call({"x": x, "y": y})
    call({"x": x.requires_grad_(), "y": y})
    assert call.reason.startswith("argument batch['x'] requires a gradient")


def test_reading_the_previous_calls_gradient_prevents_a_capture(capture):
    training, eager = both(form="last")

    def logging(local):
        def step(x, y):
            norms = [p.grad.norm() for p in local.model.parameters() if p.grad is not None]
            local.optimizer.zero_grad()
            loss = (local.model(x) - y).square().mean()
            loss.backward()
            local.optimizer.step()
            return loss.detach(), norms

        return step

    call, plain = te.graphed(logging(training)), logging(eager)
    with pytest.warns(UserWarning, match="reads a gradient of the previous call before it sets"):
        for seed in range(8):
            (a, norms), (b, rest) = call(*data(seed)), plain(*data(seed))
            assert torch.equal(a, b) and equal(norms, rest)
    assert call.kept == 0
    assert equal(training.values(), eager.values())


def test_the_optimizer_reads_the_previous_calls_gradients_in_place(capture):
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    gradients = EntryGradients([parameter])
    with gradients.watched():
        optimizer.step()
        assert gradients.results() == [None]
    assert gradients.replaced == [False]
    assert torch.equal(parameter.detach(), torch.zeros(4)) and type(parameter.grad) is torch.Tensor


def test_a_failed_capture_keeps_the_previous_steps_state(capture, monkeypatch):
    graphed, eager = both(optimizer=adamw, recipe="delayed")
    call = te.graphed(graphed.step)
    record = capture.record

    def fails(body):
        record(body)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(capture, "record", fails)
    with pytest.warns(
        UserWarning, match=r"not permitted when stream is capturing.*move \.item\(\)"
    ):
        bit_equal(graphed, eager, call, 9)
    assert call.kept == 0
    assert call.reason.startswith("it could not be captured: operation not permitted")


def test_a_steps_error_is_raised_with_its_line(capture):
    training = Training()
    real = training.optimizer.step

    def fails():
        real()
        raise ArithmeticError("too large")

    call = te.graphed(training.step)
    run(call, training, 4)
    training.optimizer.step = fails
    with pytest.raises(ArithmeticError, match="too large") as raised:
        run(call, training, 1)
    assert raised.traceback[-1].name == "fails"


def test_settings_are_part_of_the_signature(capture):
    graphed, eager = both(kind="Linear", out_features=HIDDEN)
    call = te.graphed(graphed.step)
    bit_equal(graphed, eager, call, 8)
    assert call.reason is None
    for training in (graphed, eager):
        training.model.eval()
    bit_equal(graphed, eager, call, 1)
    assert call.reason.startswith(
        "since the previous call, this changed: a setting, parameter or buffer of Linear"
    )
    for training in (graphed, eager):
        training.model.train()
    bit_equal(graphed, eager, call, 1)
    assert call.reason is None


def test_a_loaded_state_is_captured_again(capture):
    graphed, eager = both()
    call = te.graphed(graphed.step)
    bit_equal(graphed, eager, call, 8)
    for training in (graphed, eager):
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    bit_equal(graphed, eager, call, 8)
    assert call.reason is None and call.kept == 2


def test_copies_and_pickles_begin_without_graphs_and_reset_frees_them(capture):
    training = Training()
    call = te.graphed(training.step)
    run(call, training, 8)
    assert call.kept == 1 and copy.deepcopy(call).kept == 0
    call.reset()
    assert call.kept == 0
    run(call, training, 8)
    assert call.kept == 1
    with pytest.raises(ValueError, match="graphed already"):
        te.graphed(call)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_a_cpu_steps_run_eagerly_and_the_reason_is_reported():
    graphed, eager = both(recipe="delayed", optimizer=adamw)
    call = te.graphed(graphed.step)
    bit_equal(graphed, eager, call, 6)
    assert call.reason == "argument x is on cpu; a CUDA graph takes tensors of a GPU"
    explanation = te.explain(call, *data(0))
    assert "argument x is on cpu" in str(explanation)


class OnGpu:
    """A TransformerLayer stack on a GPU with an optimizer that can be captured."""

    def __init__(self, recipe, optimizer, dropout):
        options = {"hidden_dropout": dropout, "attention_dropout": 0.0}
        self.model = torch.nn.Sequential(
            make_layer("TransformerLayer", device="cuda", **options),
            make_layer("LayerNormMLP", device="cuda"),
        ).to(torch.bfloat16)
        self.recipe = recipe
        rate = torch.tensor(1e-3, device="cuda")
        self.optimizer = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=rate, fused=True, capturable=True),
            "fused_adam": lambda p: te.optimizers.FusedAdam(
                p, lr=rate, master_weights=True, capturable=True
            ),
        }[optimizer](self.model.parameters())

    def step(self, x, y):
        self.optimizer.zero_grad()
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            out = self.model(x)
        loss = (out.float() - y).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


def _gpu_losses(call, training, steps):
    losses = []
    for seed in range(steps):
        x, y = data(seed, device="cuda")
        training.optimizer.param_groups[0]["lr"].fill_(1e-3 / (1 + seed % 7))
        losses.append(call(x.bfloat16(), y))
    return torch.stack(losses)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", ["adamw", "fused_adam"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_cuda_graphed_steps_have_eager_losses(recipe, optimizer, dropout):
    results = []
    with te.deterministic():
        for is_graphed in (True, False):
            torch.manual_seed(3)
            training = OnGpu(RECIPES[recipe], optimizer, dropout)
            torch.manual_seed(4)
            call = te.graphed(training.step) if is_graphed else training.step
            results.append(_gpu_losses(call, training, 20))
            if is_graphed:
                assert (call.kept, call.reason) == (1, None)
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
def test_a_thousand_cuda_graphed_steps_have_eager_losses_and_constant_memory(recipe):
    results = []
    with te.deterministic():
        for is_graphed in (True, False):
            training = OnGpu(RECIPES[recipe], "adamw", 0.0)
            call = te.graphed(training.step) if is_graphed else training.step
            losses = [_gpu_losses(call, training, 20)]
            before = torch.cuda.memory_allocated()
            losses.append(_gpu_losses(call, training, 980))
            if is_graphed:
                assert torch.cuda.memory_allocated() - before <= losses[1].nbytes
            results.append(torch.cat(losses))
    assert torch.equal(*results)


@pytest.mark.gpu
def test_a_cuda_step_that_waits_for_the_gpu_runs_eagerly_and_names_the_line():
    training = OnGpu(None, "adamw", 0.0)

    def step(x, y):
        loss = training.step(x, y)
        return loss if loss.item() >= 0 else -loss

    call = te.graphed(step)
    with pytest.warns(UserWarning, match=r"in test_training_step\.py:\d+, .*loss\.item\(\)"):
        _gpu_losses(call, training, 8)
    assert call.kept == 0
    assert torch.rand(2, device="cuda").isfinite().all()


@pytest.mark.gpu
def test_optimizers_that_count_on_the_host_are_named():
    training = OnGpu(None, "adamw", 0.0)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    call = te.graphed(training.step)
    for seed in range(3):
        x, y = data(seed, device="cuda")
        call(x.bfloat16(), y)
    assert call.reason == "AdamW counts its steps on the host; construct it with capturable=True"
