"""make_graphed_callables: replays are bitwise equal to eager calls, and capturing changes no state."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, make_layer
from transformer_engine.pytorch import graph
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker
from transformer_engine.pytorch.graphs import arguments
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.runtime.capture import CudaRecorder

HIDDEN, TOKENS, BATCH = 64, 16, 4


def _x(seed=0, shape=(TOKENS, BATCH, HIDDEN)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _layer(kind, **options):
    sized = {"out_features": HIDDEN} if "Linear" in kind else {}
    return make_layer(kind, device="cpu", **(sized | options))


def _state(module):
    """A module's scales, amax histories and buffers, which a step changes."""
    scales = [
        (state.scale.clone(), state.amax_history.clone())
        for layer in module.modules()
        if isinstance(layer, te.module.base.TransformerEngineBaseModule)
        for key in ("scaling_fwd", "scaling_bwd")
        for state in layer.numerics.delayed_states(key)
    ]
    return [t for pair in scales for t in pair] + [b.clone() for b in module.buffers()]


def _equal(a, b):
    return len(a) == len(b) and all(
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def _step(call, module, recipe, seed, **keywords):
    x = _x(seed).requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(x, **keywords)
    y.square().sum().backward()
    return [
        y.detach().clone(),
        x.grad.clone(),
        *(None if p.grad is None else p.grad.clone() for p in module.parameters()),
    ]


def _graph(module, recipe=None, **options):
    return te.make_graphed_callables(
        module, (_x(99).requires_grad_(),), enabled=recipe is not None, recipe=recipe, **options
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"]
)
@pytest.mark.sampled
def test_three_graphed_steps_are_bitwise_equal_to_eager_steps(kind, recipe, rerun):
    recipe = RECIPES[recipe]
    eager = _layer(kind)
    replayed = _graph(copy.deepcopy(eager), recipe)
    for seed in range(3):
        expected = _step(eager, eager, recipe, seed)
        actual = _step(replayed, replayed, recipe, seed)
        assert _equal(actual, expected)
        assert _equal(_state(replayed), _state(eager))
    assert rerun.log == ["forward", "backward"] * 3


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_capturing_changes_no_scales_gradients_or_random_states(recipe, rerun):
    recipe = RECIPES[recipe]
    module = torch.nn.Sequential(
        _layer("LayerNormMLP"), torch.nn.BatchNorm1d(BATCH), torch.nn.Dropout(0.5)
    )
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    if recipe is not None:
        _step(module, module, recipe, 1)
    before, random = _state(module), torch.get_rng_state()
    gradients = [p.grad for p in module.parameters()]
    values = [g.clone() for g in gradients]
    assert not graph.is_graph_capturing()
    _graph(module, recipe)
    assert _equal(_state(module), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is g for p, g in zip(module.parameters(), gradients, strict=True))
    assert _equal([p.grad for p in module.parameters()], values)
    assert not graph.is_graph_capturing()


def test_states_created_by_warm_up_equal_a_first_calls_states(rerun):
    module = _graph(_layer("Linear"), RECIPES["delayed"])
    for key in ("scaling_fwd", "scaling_bwd"):
        (state,) = module.numerics.delayed_states(key)
        assert torch.equal(state.scale, torch.ones_like(state.scale))
        assert not state.amax_history.any()


def test_a_model_graphed_in_pieces_equals_the_eager_model(rerun):
    recipe = RECIPES["delayed"]
    eager = torch.nn.ModuleList(
        [_layer("LayerNormMLP"), _layer("Linear"), _layer("LayerNormLinear")]
    )
    pieces = copy.deepcopy(eager)
    result = te.make_graphed_callables(
        tuple(pieces),
        tuple((_x().requires_grad_(),) for _ in pieces),
        enabled=(True, False, True),
        recipe=recipe,
    )
    assert [name for name, _ in rerun.recordings] == ["forward"] * 3 + ["backward"] * 3
    assert all(a is b for a, b in zip(result, pieces, strict=True))

    def through(layers, middle):
        x = _x(5).requires_grad_()
        with te.autocast(recipe=recipe):
            y = layers[0](x)
            with te.autocast(enabled=middle):
                y = layers[1](y)
            y = layers[2](y)
        y.square().sum().backward()
        return [y.detach().clone(), x.grad]

    for _ in range(2):
        assert _equal(through(result, False), through(eager, False))
    assert _equal(_state(pieces), _state(eager))


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "TransformerLayer", "GroupedLinear"])
@pytest.mark.sampled
def test_cached_weights_are_updated_in_the_first_microbatch_only(kind, recipe, rerun):
    recipe = RECIPES[recipe]
    eager = _layer(kind)
    replayed = copy.deepcopy(eager)
    call, sample = replayed, _x(99).requires_grad_()
    if kind == "GroupedLinear":
        call, sample = _Grouped(replayed), sample
        eager_call = _Grouped(eager)
    else:
        eager_call = eager
    graphed = te.make_graphed_callables(
        call, (sample,), enabled=True, recipe=recipe, cache_quantized_params=True
    )
    for step in range(2):
        for microbatch in range(2):
            first = microbatch == 0
            expected = _step(
                eager_call, eager, recipe, 10 * step + microbatch, is_first_microbatch=first
            )
            actual = _step(
                graphed, replayed, recipe, 10 * step + microbatch, is_first_microbatch=first
            )
            assert _equal(actual, expected)
            assert _equal(_state(replayed), _state(eager))
        with torch.no_grad():  # the optimizer's step, which the next first microbatch has to see
            for p, q in zip(eager.parameters(), replayed.parameters(), strict=True):
                p.mul_(1.5)
                q.mul_(1.5)


class _Remembering(te.Linear):
    """A layer as in other libraries: the first call after `is_first_microbatch = True` is the first."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.is_first_microbatch = True

    def forward(self, inp):
        y = super().forward(inp, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return y


@pytest.mark.parametrize("caches", [True, False])
def test_modules_that_store_the_first_microbatch_flag_follow_it(caches, rerun):
    recipe = RECIPES["delayed"]
    eager = _Remembering(HIDDEN, HIDDEN, device="cpu")
    replayed = copy.deepcopy(eager)
    graphed = _graph(replayed, recipe, cache_quantized_params=caches)
    assert replayed.is_first_microbatch
    for step in range(2):
        for microbatch in range(2):
            first = microbatch == 0
            eager.is_first_microbatch = first or not caches
            report = {"is_first_microbatch": first} if caches else {}
            seed = 10 * step + microbatch
            assert _equal(
                _step(graphed, replayed, recipe, seed, **report), _step(eager, eager, recipe, seed)
            )
        with torch.no_grad():
            for p, q in zip(eager.parameters(), replayed.parameters(), strict=True):
                p.mul_(1.5)
                q.mul_(1.5)


class _Grouped(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, is_first_microbatch=None):
        return self.layer(x.view(-1, HIDDEN), [32, 32], is_first_microbatch).view(TOKENS, BATCH, -1)


def test_weight_gradient_sums_begin_with_the_first_microbatch(rerun):
    eager = _layer("Linear", fuse_wgrad_accumulation=True)
    replayed = copy.deepcopy(eager)
    for layer in (eager, replayed):
        layer.weight.main_grad = torch.full((HIDDEN, HIDDEN), 7.0)
        layer.weight.grad_added_to_main_grad = False
    recipe = RECIPES["current"]
    graphed = _graph(replayed, recipe, cache_quantized_params=True)
    assert torch.equal(replayed.weight.main_grad, torch.full((HIDDEN, HIDDEN), 7.0))
    assert not replayed.weight.grad_added_to_main_grad
    for seed, first in ((0, True), (1, False), (2, True)):
        _step(eager, eager, recipe, seed, is_first_microbatch=first)
        _step(graphed, replayed, recipe, seed, is_first_microbatch=first)
        assert torch.equal(replayed.weight.main_grad, eager.weight.main_grad)
    assert replayed.weight.grad_added_to_main_grad


def test_replayed_tied_modules_add_to_one_weight_gradient_sum(rerun):
    eager = torch.nn.ModuleList([_layer("Linear", fuse_wgrad_accumulation=True) for _ in range(2)])
    eager[1].weight = eager[0].weight
    replayed = copy.deepcopy(eager)
    for layers in (eager, replayed):
        layers[0].weight.main_grad = torch.full((HIDDEN, HIDDEN), 7.0)
    graphed = te.make_graphed_callables(
        tuple(replayed),
        tuple((_x(seed).requires_grad_(),) for seed in range(2)),
        enabled=False,
        cache_quantized_params=True,
    )
    for seed, first in ((0, True), (1, False), (2, True)):
        for layers in (eager, graphed):
            x = _x(seed)
            layers[1](
                layers[0](x, is_first_microbatch=first), is_first_microbatch=first
            ).sum().backward()
        assert torch.equal(replayed[0].weight.main_grad, eager[0].weight.main_grad)


def test_delayed_weight_gradients_are_replayed_on_request(rerun):
    eager = _layer("Linear", delay_wgrad_compute=True)
    replayed = copy.deepcopy(eager)
    called = []
    replayed.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    graphed = _graph(replayed)
    assert called == []
    for seed in range(2):
        actual, expected = _step(graphed, replayed, None, seed), _step(eager, eager, None, seed)
        assert _equal(actual[:2], expected[:2])
        graphed.backward_dw()
        eager.backward_dw()
        assert torch.equal(replayed.weight.grad, eager.weight.grad)
    assert called == [1, 1]


def test_gradients_accumulate_over_replays_outside_graph_memory(rerun):
    eager = _layer("Linear")
    replayed = _graph(copy.deepcopy(eager))
    for seed in range(3):
        _step(eager, eager, None, seed)
        _step(replayed, replayed, None, seed)
    assert _equal([p.grad for p in replayed.parameters()], [p.grad for p in eager.parameters()])
    statics = {
        r.data_ptr()
        for _, recording in rerun.recordings
        for r in recording.results
        if r is not None
    }
    assert not statics & {p.grad.data_ptr() for p in replayed.parameters()}


def test_inputs_are_copied_to_the_samples_unless_they_are_the_samples(rerun):
    sample = _x().requires_grad_()
    module = te.make_graphed_callables(_layer("Linear"), (sample,))
    with torch.no_grad():
        sample.fill_(3.0)
    module(sample)
    assert sample.mean() == 3.0
    module(_x(7))
    assert torch.equal(sample, _x(7))


class _Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = _layer("Linear")

    def forward(self, pair, *, scale, extra=None):
        first, second = pair["a"]
        y = self.layer(first) * scale
        return {"y": y, "mask": (y > 0), "none": None, "sum": y + second}


def test_nested_arguments_keywords_and_outputs_keep_their_structure(rerun):
    eager = _Nested()
    replayed = copy.deepcopy(eager)

    def arguments(seed):
        return ({"a": (_x(seed).requires_grad_(), _x(seed + 1))},), {
            "scale": torch.tensor(2.0 + seed)
        }

    args, kwargs = arguments(0)
    graphed = te.make_graphed_callables(replayed, (args), sample_kwargs=kwargs)
    args, kwargs = arguments(3)
    expected, actual = eager(*args, **kwargs), graphed(*args, **kwargs, ignored=1)
    assert list(actual) == list(expected)
    assert torch.equal(actual["y"], expected["y"])
    assert torch.equal(actual["mask"], expected["mask"])
    assert not actual["mask"].requires_grad
    assert actual["none"] is None
    with pytest.raises(TypeError, match="keyword scale was captured"):
        graphed(*args)


class _Choosing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = _layer("Linear")

    def forward(self, x, *, kind, scale=None, at=None, added=None):
        y = self.layer(x) * (2 if kind == "double" else 1)
        return (y if added is None else y + added["to"][at]) * (1 if scale is None else scale)


class _Scaled(torch.nn.Module):
    def __init__(self, **defaults):
        super().__init__()
        self.layer = _layer("Linear")

    def forward(self, x, scale=None, power=1, *, mode="plain", **more):
        y = self.layer(x) ** power * (1 if scale is None else scale)
        return y + sum(value for value in more.values() if value is not None) * (
            1 if mode == "plain" else 2
        )


_UNCAPTURED = {
    "tensor": {"scale": torch.tensor(3.0)},
    "number": {"power": 2},
    "text": {"mode": "other"},
    "None instead of a default": {"mode": None},
    "number of another type": {"power": 1.0},
    "in **kwargs": {"offset": torch.tensor(1.0)},
}


@pytest.mark.parametrize("argument", _UNCAPTURED)
@pytest.mark.parametrize("records", [True, False], ids=["graph", "without a GPU"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_keyword_that_was_not_captured_raises_before_anything_runs(
    argument, records, training, request
):
    if not records and torch.cuda.is_available():
        pytest.skip("calls are captured on a machine with a GPU")
    log = request.getfixturevalue("rerun").log if records else []
    module = _Scaled().train(training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # without a GPU
        graphed = te.make_graphed_callables(module, (_x(),))
    replays = len(log)
    (name,) = _UNCAPTURED[argument]
    with pytest.raises(TypeError, match=f"keyword {name}=.* was not captured, .*sample_kwargs"):
        graphed(_x(3), **_UNCAPTURED[argument])
    assert len(log) == replays
    graphed.train(not training)  # the module's own forward runs in the other mode
    twin = _Scaled()
    twin.load_state_dict(module.state_dict())
    assert torch.equal(
        graphed(_x(3), **_UNCAPTURED[argument]), twin(_x(3), **_UNCAPTURED[argument])
    )


def test_a_keyword_without_effect_is_accepted_without_being_captured(rerun):
    module = _Scaled()
    expected = module(_x(3))
    graphed = te.make_graphed_callables(module, (_x(),))
    assert torch.equal(
        graphed(_x(3), scale=None, power=1, mode="plain", inference_context=None), expected
    )


def test_keywords_other_than_tensors_are_constants_in_the_graph(rerun):
    eager = _Choosing()

    def keywords(seed, **changed):
        return {
            "kind": "double",
            "scale": None,
            "at": 1,
            "added": {"to": (_x(9), _x(seed))},
        } | changed

    graphed = te.make_graphed_callables(copy.deepcopy(eager), (_x(),), sample_kwargs=keywords(1))
    x = _x(3)
    assert torch.equal(graphed(x, **keywords(4), mask=None), eager(x, **keywords(4)))
    replays = len(rerun.log)
    for changed, message in (
        ({"kind": "single"}, "a keyword's 'single' was captured as 'double'"),
        ({"at": 0}, "a keyword's 0 was captured as 1"),
        ({"at": True}, "a keyword's True was captured as 1"),
        ({"scale": _x(5)}, "was captured as None, which the graph keeps"),
    ):
        with pytest.raises(ValueError, match=message):
            graphed(x, **keywords(4, **changed))
    with pytest.raises(TypeError, match="a tensor was captured"):
        graphed(x, **keywords(4, added={"to": (_x(9), None)}))
    assert len(rerun.log) == replays


@pytest.mark.parametrize("wrong", [object(), [print], torch.nn.Identity()])
def test_a_keyword_whose_content_may_change_is_rejected(rerun, wrong):
    with pytest.raises(
        TypeError, match="a graph takes tensors, and in keywords None, numbers, text"
    ):
        te.make_graphed_callables(_Choosing(), (_x(),), sample_kwargs={"kind": wrong})


def test_an_input_with_another_shape_is_rejected_and_changes_nothing(rerun):
    sample = _x().requires_grad_()
    module = te.make_graphed_callables(_layer("Linear"), (sample,))
    before = sample.detach().clone()
    for wrong, message in (
        (torch.ones(8, BATCH, HIDDEN), "Capture one for each shape"),
        (_x().to(torch.complex64), "is torch.complex64; .* convert it to torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            module(wrong)
    with pytest.raises(TypeError, match="2 positional arguments; 1 were captured"):
        module(_x(), _x())
    assert torch.equal(sample, before)
    assert rerun.log == []


def test_a_backward_after_a_later_forward_is_rejected(rerun):
    module = _graph(_layer("Linear"))
    first = module(_x(1).requires_grad_())
    module(_x(2).requires_grad_())
    with pytest.raises(RuntimeError, match="the graph's forward has been replayed since"):
        first.sum().backward()


def test_a_module_in_the_other_mode_runs_its_own_forward(rerun):
    module = _graph(_layer("TransformerLayer", hidden_dropout=0.5))
    module.eval()
    x = _x(4)
    assert torch.equal(module(x), module(x))
    assert rerun.log == []


def test_a_module_in_evaluation_has_a_forward_only(rerun):
    eager = _layer("LayerNormMLP").eval()
    module = te.make_graphed_callables(copy.deepcopy(eager), (_x(),))
    with torch.no_grad():
        assert torch.equal(module(_x(2)), eager(_x(2)))
    assert [name for name, _ in rerun.recordings] == ["forward"]


def test_a_reset_graph_raises(rerun):
    module = _graph(_layer("Linear"))
    module.reset()
    with pytest.raises(RuntimeError, match="has been reset"):
        module(_x())


def test_a_graphed_module_is_copied_before_and_not_after(rerun):
    with pytest.raises(TypeError, match="copy it before make_graphed_callables"):
        copy.deepcopy(_graph(_layer("Linear")))


def test_scales_are_updated_after_the_global_state_was_reset(rerun):
    recipe = RECIPES["delayed"]
    eager = _layer("Linear")
    replayed = _graph(copy.deepcopy(eager), recipe)
    for seed in range(2):
        FP8GlobalStateManager.reset()
        assert _equal(_step(replayed, replayed, recipe, seed), _step(eager, eager, recipe, seed))
    assert _equal(_state(replayed), _state(eager))


def _numbers(tracker):
    """The tracked state, which on a GPU may be kept as a generator."""
    state = tracker.get_states()["model-parallel-rng"]
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


def test_tracked_random_states_are_restored_after_capture(rerun):
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    layer = _layer(
        "MultiheadAttention", attention_dropout=0.3, get_rng_state_tracker=lambda: tracker
    )
    before = _numbers(tracker)
    _graph(layer)
    assert torch.equal(_numbers(tracker), before)


def test_graphed_dropout_draws_the_same_numbers_as_eager(rerun):
    eager = _layer("TransformerLayer", hidden_dropout=0.3, attention_dropout=0.2)
    replayed = _graph(copy.deepcopy(eager))
    for seed in range(2):
        torch.manual_seed(seed)
        expected = _step(eager, eager, None, seed)
        torch.manual_seed(seed)
        assert _equal(_step(replayed, replayed, None, seed), expected)


# Schedules.


def test_a_pipeline_order_gives_one_callable_per_chunk_and_microbatch(rerun):
    eager = torch.nn.ModuleList([_layer("Linear"), _layer("Linear")])
    layers = copy.deepcopy(eager)
    samples = tuple((_x(i).requires_grad_(),) for i in range(4))
    result = te.make_graphed_callables(tuple(layers), samples, _order=[1, 1, 2, -2, 2, -2, -1, -1])
    assert isinstance(result, tuple)
    assert len(result) == 4
    bodies = [name for name, _ in rerun.recordings]
    assert bodies == ["forward"] * 3 + ["backward", "forward"] + ["backward"] * 3
    for seed in range(2):
        for m in range(2):
            x = _x(seed + m).requires_grad_()
            y = result[2 + m](result[m](x))
            e = _x(seed + m).requires_grad_()
            expected = eager[1](eager[0](e))
            assert torch.equal(y, expected)
            y.square().sum().backward()
            expected.square().sum().backward()
            assert torch.equal(x.grad, e.grad)
    assert _equal([p.grad for p in layers.parameters()], [p.grad for p in eager.parameters()])


def test_buffers_are_shared_if_the_order_permits(rerun):
    layers = (_layer("Linear"), _layer("Linear"))
    samples = tuple((_x(i).requires_grad_(),) for i in range(4))
    result = te.make_graphed_callables(
        layers, samples, _order=[1, 2, -2, -1, 1, 2, -2, -1], _reuse_graph_input_output_buffers=True
    )
    inputs = [door.runs.block.inputs[0].data_ptr() for door in result]
    assert len(set(inputs)) == 2
    x = _x(8).requires_grad_()
    assert torch.equal(result[3](result[1](x)), layers[1](layers[0](x)))


def test_the_order_may_contain_weight_gradient_steps(rerun):
    layers = tuple(_layer("Linear", delay_wgrad_compute=True) for _ in range(2))
    samples = tuple((_x(i).requires_grad_(),) for i in range(2))
    te.make_graphed_callables(
        layers, samples, _order=[1, 2, -2, -2.5, -1, -1.5], _num_layers_per_chunk=1
    )
    assert [name for name, _ in rerun.recordings] == [
        "forward",
        "forward",
        "backward",
        "weight_gradients",
        "backward",
        "weight_gradients",
    ]


@pytest.mark.parametrize(
    ("order", "layers", "per_chunk", "message"),
    [
        ([1, 2, -2], 2, None, "give each once forward and once backward per microbatch"),
        ([1, -1], 2, [1], "not for 1 chunks of 2 modules"),
        ([1, 2, -1, -2], 3, None, "cannot be split evenly into 2 chunks"),
        ([-1, 1], 1, None, "has no forward before it"),
        ([], 1, None, "_order is empty"),
        ([1, 0, -1], 1, None, "holds 0"),
        ([1, -1, -1.25], 1, 1, "a weight gradient of chunk c"),
        ([1, -1, -1.5], 2, 2, "_num_layers_per_chunk of 1"),
    ],
)
def test_an_order_whose_counts_do_not_fit_is_rejected(order, layers, per_chunk, message):
    with pytest.raises(ValueError, match=message):
        te.make_graphed_callables(
            tuple(_layer("Linear") for _ in range(layers)),
            tuple((_x(),) for _ in range(2)),
            _order=order,
            _num_layers_per_chunk=per_chunk,
        )


# Calls that raise an error before anything runs.


def _with_hook():
    layer = _layer("Linear")
    layer.register_forward_hook(lambda *_: None)
    return layer


def _with_trained_buffer():
    module = torch.nn.Sequential(_layer("Linear"))
    module.register_buffer("table", torch.ones(2, requires_grad=True))
    return module


@pytest.mark.parametrize(
    ("module", "arguments", "error", "message"),
    [
        (lambda: [_layer("Linear")], {}, TypeError, "cannot be called"),
        (lambda: (), {}, ValueError, "empty tuple"),
        (_with_hook, {}, RuntimeError, "has hooks"),
        (_with_trained_buffer, {}, RuntimeError, "buffer table wants a gradient"),
        (lambda: (_layer("Linear"), _layer("Linear").eval()), {}, RuntimeError, "some are not"),
        (lambda: _layer("Linear"), {"sample_args": (3,)}, TypeError, "a graph takes tensors"),
        (lambda: _layer("Linear"), {"sample_args": 3}, TypeError, "give a tuple of tensors"),
        (
            lambda: _layer("Linear"),
            {"sample_args": (_x(),), "enabled": (True, True)},
            ValueError,
            "has 2 entries",
        ),
        (
            lambda: _layer("Linear"),
            {"sample_args": (_x(),), "enabled": torch.ones(2)},
            TypeError,
            "enabled",
        ),
        (
            lambda: _layer("Linear"),
            {"sample_args": (_x(),), "num_warmup_iters": -1},
            ValueError,
            "num_warmup_iters",
        ),
        (
            lambda: _layer("Linear"),
            {"sample_args": (_x(),), "_reuse_graph_input_output_buffers": True},
            ValueError,
            "needs _order",
        ),
        (
            lambda: _layer("Linear"),
            {"sample_args": (_x(),), "capture_time_hooks": [{"sometime": {}}]},
            ValueError,
            "its keys are",
        ),
        (
            lambda: _layer("Linear"),
            {"sample_args": (_x(),), "enabled": True, "fp8_enabled": True},
            ValueError,
            "both set",
        ),
    ],
)
def test_an_invalid_call_is_rejected(module, arguments, error, message):
    arguments = {"sample_args": (_x(),)} | arguments
    with pytest.raises(error, match=message):
        te.make_graphed_callables(module(), **arguments)


def test_an_input_that_nothing_depends_on_is_rejected_unless_allowed(rerun):
    def function(x, unused):
        return x * 2

    samples = (_x().requires_grad_(), _x().requires_grad_())
    with pytest.raises(RuntimeError, match="input 1 wants a gradient"):
        te.make_graphed_callables(function, samples)
    call = te.make_graphed_callables(function, samples, allow_unused_input=True)
    a, b = _x(1).requires_grad_(), _x(2).requires_grad_()
    call(a, b).sum().backward()
    assert torch.equal(a.grad, torch.full_like(a, 2))
    assert b.grad is None


def test_a_call_must_pass_its_microbatch_where_weights_are_cached(rerun):
    module = _graph(_layer("Linear"), RECIPES["current"], cache_quantized_params=True)
    with pytest.raises(ValueError, match="pass True or False"):
        module(_x())


def test_deprecated_names_warn_and_behave_the_same(rerun):
    with (
        pytest.warns(DeprecationWarning, match="fp8_enabled is deprecated; use enabled"),
        pytest.warns(DeprecationWarning, match="fp8_recipe is deprecated; use recipe"),
    ):
        module = te.make_graphed_callables(
            _layer("Linear"),
            (_x().requires_grad_(),),
            fp8_enabled=True,
            fp8_recipe=RECIPES["current"],
        )
    assert module.fp8


def test_hooks_run_while_capturing_and_not_at_replays(rerun):
    records = []
    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    hooks = {kind: {0: lambda module, kind=kind: records.append(kind)} for kind in kinds}
    round_it = []
    module = _graph(
        _layer("Linear"),
        num_warmup_iters=2,
        capture_time_hooks=[hooks],
        pre_warmup_hook=lambda: round_it.append("before"),
        post_warmup_hook=lambda: round_it.append("after"),
    )
    assert records == list(kinds) * 3
    assert round_it == ["before", "after"]
    _step(module, module, recipe=None, seed=0)
    assert len(records) == 12
    with pytest.raises(RuntimeError, match="has to return None"):
        _graph(_layer("Linear"), capture_time_hooks=[{"forward_hooks": {0: lambda module: 1}}])
    assert not graph.is_graph_capturing()


# Without a GPU.


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to capture on")
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_without_a_gpu_callables_are_wrapped_and_run_eagerly(recipe):
    recipe = RECIPES[recipe]
    eager = _layer("LayerNormMLP")
    with pytest.warns(UserWarning, match="CUDA graphs need a GPU"):
        wrapped = _graph(copy.deepcopy(eager), recipe, cache_quantized_params=recipe is not None)
    for seed in range(2):
        first = {} if recipe is None else {"is_first_microbatch": seed == 0}
        assert _equal(
            _step(wrapped, wrapped, recipe, seed, **first),
            _step(eager, eager, recipe, seed, **first),
        )
        assert _equal(_state(wrapped), _state(eager))
    with pytest.raises(ValueError, match="Capture one for each shape"):
        wrapped(torch.ones(2, HIDDEN), **first)
    wrapped.reset()
    wrapped.backward_dw()


def test_states_are_saved_and_restored_by_the_names_that_clients_call():
    recipe = RECIPES["delayed"]
    module = torch.nn.Sequential(_layer("Linear"), _layer("LayerNormMLP"))
    _step(module, module, recipe, 0)
    before = _state(module)
    saved = graph.save_fp8_tensors([module], recipe)
    _step(module, module, recipe, 1)
    graph.restore_fp8_tensors([module], saved)
    assert _equal(_state(module), before)
    assert graph.save_fp8_tensors([module], RECIPES["current"]) is None
    graph.restore_fp8_tensors([module], None)
    with pytest.raises(RuntimeError, match="give the same modules"):
        graph.restore_fp8_tensors([module], graph.save_fp8_tensors([module[0]], recipe))


def test_an_unowned_tensor_shares_memory_without_keeping_it_alive():
    x = torch.arange(12.0).view(3, 4)
    alias = graph.make_weak_ref(x.t())
    assert torch.equal(alias, x.t())
    x.fill_(2.0)
    assert alias.mean() == 2.0
    gc.collect()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"])
def test_cuda_graphs_are_bitwise_equal_to_eager_calls(kind, recipe):
    recipe = RECIPES[recipe]
    sized = {"out_features": HIDDEN} if "Linear" in kind else {}
    eager = make_layer(kind, device="cuda", **sized).to(torch.bfloat16)
    replayed = copy.deepcopy(eager)
    sample = _x(99).to("cuda", torch.bfloat16).requires_grad_()
    graphed = te.make_graphed_callables(
        replayed, (sample,), enabled=recipe is not None, recipe=recipe
    )

    def step(module, seed):
        x = _x(seed).to("cuda", torch.bfloat16).requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x)
        y.square().sum().backward()
        return [y.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in module.parameters())]

    for seed in range(4):
        assert _equal(step(graphed, seed), step(eager, seed))
        assert _equal(_state(replayed), _state(eager))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_cuda_graphs_update_cached_weights_in_the_first_microbatch(recipe):
    recipe = RECIPES[recipe]
    eager = make_layer("LayerNormMLP", device="cuda").to(torch.bfloat16)
    replayed = copy.deepcopy(eager)
    sample = _x(99).to("cuda", torch.bfloat16).requires_grad_()
    graphed = te.make_graphed_callables(
        replayed, (sample,), enabled=True, recipe=recipe, cache_quantized_params=True
    )
    for step in range(2):
        for microbatch in range(3):
            results = []
            for module in (graphed, eager):
                x = _x(step * 3 + microbatch).to("cuda", torch.bfloat16).requires_grad_()
                with te.autocast(recipe=recipe):
                    y = module(x, is_first_microbatch=microbatch == 0)
                y.square().sum().backward()
                results.append([y.detach().clone(), x.grad.clone()])
            assert _equal(*results)
        with torch.no_grad():
            for p, q in zip(eager.parameters(), replayed.parameters(), strict=True):
                p.mul_(1.25)
                q.mul_(1.25)


FAILING = {
    "an error of Python": lambda: 1 // 0,
    "a copy from the host": lambda: torch.tensor([1.0, 2.0], device="cuda"),
    "a wait": lambda: torch.ones(1, device="cuda").item(),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAILING)
def test_a_failed_capture_leaves_everything_usable(name):
    recorder, stream = CudaRecorder(), torch.cuda.current_stream()

    def body():
        torch.rand(4, device="cuda")
        return (FAILING[name](),)

    with pytest.raises((ZeroDivisionError, RuntimeError)):
        recorder.record(body)
    assert torch.cuda.current_stream() == stream
    torch.manual_seed(3)
    first = torch.rand(4, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4, device="cuda"), first)
    recording = CudaRecorder().record(lambda: (torch.rand(4, device="cuda"),))
    torch.manual_seed(3)
    recording.replay()
    assert torch.equal(recording.results[0], first)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])
def test_a_clients_own_capture_updates_cached_weights_by_the_flag(recipe, monkeypatch):
    """Megatron-core captures layers itself, without a first microbatch, and sets the flag itself."""
    layer = _layer("LayerNormMLP", activation="swiglu")
    with torch.no_grad(), te.autocast(recipe=RECIPES[recipe]):
        before = layer(_x(), is_first_microbatch=True)
        layer.fc1_weight.mul_(-1.0)
        monkeypatch.setattr(
            "transformer_engine.pytorch.quantization.global_state.has_cuda", lambda: True
        )
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert FP8GlobalStateManager.fp8_graph_capturing()
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True)
        saved = layer(_x(), is_first_microbatch=False)
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)
        renewed = layer(_x(), is_first_microbatch=False)
    assert (saved - before).norm() < 0.2 * before.norm()
    assert (renewed - before).norm() > before.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_replaying_a_clients_own_capture_reads_the_flag(recipe):
    layer = te.Linear(HIDDEN, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(128, HIDDEN, device="cuda", dtype=torch.bfloat16)
    captured = torch.cuda.CUDAGraph()
    with torch.no_grad(), te.autocast(recipe=RECIPES[recipe]):
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)
        for first in (True, False, False):
            layer(x, is_first_microbatch=first)
        torch.cuda.synchronize()
        with torch.cuda.graph(captured):
            y = layer(x, is_first_microbatch=False)
    captured.replay()
    before = y.clone()
    with torch.no_grad():
        layer.weight.neg_()
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True)
    captured.replay()
    assert torch.equal(y, before)
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)
    captured.replay()
    assert torch.equal(y, -before)


def test_samples_may_be_lists(rerun):
    layers = [_layer("Linear"), _layer("Linear")]
    eager = copy.deepcopy(layers)
    result = te.make_graphed_callables(
        tuple(layers), [(_x(99),), (_x(98),)], sample_kwargs=[{}, {}]
    )
    for graphed, plain in zip(result, eager, strict=True):
        assert torch.equal(graphed(_x()), plain(_x()))


@pytest.mark.gpu
@pytest.mark.parametrize("aside", [True, False])
def test_referenced_gradient_accumulators_are_captured_from_a_side_stream(aside):
    """Wrappers reference accumulators for hooks; captures exclude the default stream's and raise an error."""
    layer = te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream() if aside else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        saved = [p.expand_as(p).grad_fn.next_functions[0][0] for p in layer.parameters()]
    torch.cuda.current_stream().wait_stream(stream)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    if not aside:
        with pytest.raises(RuntimeError, match=r"create the wrapper under torch\.cuda\.stream"):
            te.make_graphed_callables(layer, (x,))
        assert torch.rand(2, device="cuda").isfinite().all(), "random states go on"
        return
    graphed = te.make_graphed_callables(layer, (x,))
    graphed(x).sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(layer.parameters(), expected, strict=True))
    assert len(saved) == 2


class _Called(torch.nn.Module):
    """A module whose `__call__` changes the result's form, as Megatron-core's layers do."""

    def __init__(self):
        super().__init__()
        self.layer = _layer("Linear")

    def forward(self, x):
        return self.layer(x), None

    def __call__(self, x):
        return super().__call__(x)[:1]


def test_a_call_method_of_the_class_defines_the_capture(rerun):
    module = _Called()
    expected = module.layer(_x())
    (graphed,) = te.make_graphed_callables(
        (module,), ((_x(99).requires_grad_(),),), _order=[1, -1], allow_unused_input=True
    )
    actual = graphed(_x().requires_grad_())
    assert isinstance(actual, tuple) and len(actual) == 1
    assert torch.equal(actual[0], expected)


def test_modules_and_tensors_outside_the_gpu_are_rejected():
    """A graph neither records nor replays work outside the GPU."""

    def record_query(module, x):
        samples = arguments.list_samples((x,), None, True, 1, False)
        return arguments.CaptureRequest((module,), (0,), samples, (), None, (), None, (), True)

    module = _layer("Linear")
    with pytest.raises(ValueError, match=r"sample 0 holds a tensor on cpu; .* give samples on it"):
        arguments.check_places(record_query(module, _x()))
    with pytest.raises(ValueError, match=r'Linear\.weight is on cpu; .* call module\.to\("cuda"\)'):
        arguments.check_places(record_query(module, torch.ones(1).as_subclass(_OnAGpu)))


class _OnAGpu(torch.Tensor):
    is_cuda = True
