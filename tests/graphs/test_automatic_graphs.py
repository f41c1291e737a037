"""te.graphed captures calls automatically, bitwise equal to eager calls, or reports why it does not."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, make_layer
from transformer_engine.pytorch.graphs import automatic
from transformer_engine.pytorch.graphs.signature import SameObject, module_standing

HIDDEN, TOKENS, BATCH = 64, 16, 4


def _x(seed=0, tokens=TOKENS):
    return torch.randn(tokens, BATCH, HIDDEN, generator=torch.Generator().manual_seed(seed))


def _layer(kind="Linear", **options):
    sized = {"out_features": HIDDEN} if "Linear" in kind else {}
    return make_layer(kind, device="cpu", **(sized | options))


def _step(call, module, recipe, seed, tokens=TOKENS, **keywords):
    x = _x(seed, tokens).requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(x, **keywords)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def _equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _entry_count(module):
    return module.forward.kept


def _reason(module, *args, **kwargs):
    explanation = te.explain(module, *args, **kwargs)
    (decision,) = [d for d in explanation.decisions if d.operation == "graphed"]
    return decision.chosen, next(
        (v.reason for v in decision.verdicts if v.backend == "captured"), None
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "TransformerLayer"])
@pytest.mark.sampled
def test_the_fourth_call_is_captured_and_all_calls_equal_eager_bitwise(kind, recipe, rerun):
    recipe = RECIPES[recipe]
    eager = _layer(kind)
    module = te.graphed(copy.deepcopy(eager))
    assert set(module.state_dict()) == set(eager.state_dict())
    for seed in range(6):
        assert _equal(_step(module, module, recipe, seed), _step(eager, eager, recipe, seed))
        assert _entry_count(module) == (seed >= 3)
    assert rerun.log == ["forward", "backward"] * 3


def test_explain_reports_how_many_calls_precede_the_capture(rerun):
    module = te.graphed(_layer(), after=2, signatures=1)
    x = _x().requires_grad_()
    assert _reason(module, x) == (
        "eager",
        "0 calls of this signature so far; it is captured after 2",
    )
    assert _reason(module, x) == (
        "eager",
        "1 calls of this signature so far; it is captured after 2",
    )
    module(x).sum().backward()
    module(x).sum().backward()
    assert _entry_count(module) == 1
    assert _reason(module, x) == ("captured", None)
    chosen, reason = _reason(module, _x(0, 8).requires_grad_())
    assert chosen == "eager"
    assert reason is not None
    assert reason.startswith("1 signatures are kept already")
    # for the two calls; calls inside explain run eagerly
    assert rerun.log == ["forward", "backward"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_a_cpu_every_call_is_eager_and_the_reason_is_reported():
    eager = _layer()
    module = te.graphed(copy.deepcopy(eager))
    for seed in range(5):
        assert _equal(_step(module, module, None, seed), _step(eager, eager, None, seed))
    assert _reason(module, _x()) == (
        "eager",
        "an argument is on cpu; a CUDA graph takes tensors of a GPU",
    )


def _capture(module, x):
    for _ in range(4):
        module(x).sum().backward()
    assert _entry_count(module) == 1
    return module


def test_values_frozen_by_a_capture_are_part_of_the_signature(rerun):
    module = te.graphed(_layer())
    x = _x().requires_grad_()
    _capture(module, x)
    calls = [
        lambda: module(_x(0, 8)),
        lambda: module(_x()),
        lambda: module(x.to(torch.float32, copy=True).transpose(0, 1).contiguous().transpose(0, 1)),
    ]
    for call in calls:
        call()
    with torch.no_grad():
        module(x)
    with te.autocast(recipe=RECIPES["current"]):
        module(x)
    module.eval()
    module(x)
    module.train()
    module.weight.data = module.weight.data.clone()
    module(x)
    module.bias.requires_grad_(False)
    module(x)
    assert len(module.forward._entries) == 1 + 8
    assert rerun.log == ["forward", "backward"]


def test_a_moved_parameter_is_read_at_its_new_address(rerun):
    eager = _layer()
    module = te.graphed(copy.deepcopy(eager))
    _capture(module, _x().requires_grad_())
    for layer in (eager, module):
        layer.weight.data = layer.weight.data * 2
        layer.zero_grad()
    assert _equal(_step(module, module, None, 3), _step(eager, eager, None, 3))


def test_a_written_setting_takes_effect(rerun):
    eager = _layer("LayerNormMLP")
    module = te.graphed(copy.deepcopy(eager))
    _capture(module, _x().requires_grad_())
    eager.activation = module.activation = "relu"
    assert torch.equal(module(_x(4)), eager(_x(4)))


class _Settings:
    """A model's configuration, an attribute of layers in other libraries."""

    def __init__(self):
        self.slope = 0.5
        self.heads = {"kept": [1, 2]}


class _Foreign(torch.nn.Module):
    """A caller's module with torch layers. Writes to their attributes are not reported."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.LayerNorm(HIDDEN), torch.nn.LeakyReLU(), torch.nn.Dropout(0.0), _layer()
        )
        self.config = _Settings()
        self.multiplier = 2.0
        self.shifts = [1.0, 2.0]
        self.mask = torch.ones(HIDDEN)
        self.activation = torch.nn.functional.gelu
        object.__setattr__(self, "hidden", torch.nn.LeakyReLU())  # not a child of the module

    def forward(self, x):
        return (
            self.hidden(self.activation(self.layers(x) * self.multiplier * self.mask))
            + self.shifts[0]
        )


def _replace_norm(module):
    old = module.layers[0]
    module.layers[0] = torch.nn.LayerNorm(HIDDEN)
    module.layers[0].weight, module.layers[0].bias = old.weight, old.bias


@pytest.mark.parametrize(
    "write",
    [
        lambda module: setattr(module.layers[0], "eps", 0.1),
        lambda module: setattr(module.layers[1], "negative_slope", 0.7),
        lambda module: setattr(module.layers[1], "inplace", True),
        lambda module: setattr(module.layers[2], "p", 0.5),
        lambda module: setattr(module.layers[3], "forward", lambda x: x),
        lambda module: setattr(module, "multiplier", 3.0),
        lambda module: setattr(module, "multiplier", 2),
        lambda module: setattr(module, "added", True),
        lambda module: module.shifts.__setitem__(0, 4.0),
        lambda module: setattr(module, "mask", torch.zeros(HIDDEN)),
        lambda module: setattr(module, "activation", torch.nn.functional.relu),
        lambda module: setattr(module.config, "slope", 0.1),
        lambda module: module.config.heads["kept"].append(3),
        lambda module: setattr(module, "config", _Settings()),
        lambda module: setattr(module.hidden, "negative_slope", 0.7),
        lambda module: object.__setattr__(module, "hidden", torch.nn.LeakyReLU()),
        _replace_norm,
    ],
)
def test_graph_is_not_replayed_after_a_write_to_a_foreign_layer(write, rerun):
    module = te.graphed(_Foreign())
    x = _x().requires_grad_()
    _capture(module, x)
    assert _reason(module, x) == ("captured", None)
    write(module)
    assert _reason(module, x) == (
        "eager",
        "0 calls of this signature so far; it is captured after 3",
    )


def test_graph_is_replayed_again_when_a_foreign_layers_setting_is_restored(rerun):
    module = te.graphed(_Foreign())
    x = _x().requires_grad_()
    _capture(module, x)
    for eps, chosen in ((0.1, "eager"), (1e-5, "captured")):
        module.layers[0].eps = eps
        assert _reason(module, x)[0] == chosen


def test_results_that_a_layer_stores_do_not_prevent_a_capture(rerun):
    class Router(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = _layer()

        def forward(self, x):
            y = self.inner(x)
            self.auxiliary_loss = y.square().mean()
            return y

    module = te.graphed(Router())
    x = _x().requires_grad_()
    for _ in range(8):
        module(x).sum().backward()
    assert _entry_count(module) == 1


@pytest.mark.parametrize(
    ("kind", "part"),
    [(torch.nn.ReLU, module_standing), (_Settings, SameObject), (object, SameObject)],
)
def test_a_signature_rejects_a_new_object_at_an_old_objects_address(kind, part):
    value = kind()
    first, repeated, address = part(value), part(value), id(value)
    assert first == repeated and hash(first) == hash(repeated)
    del value
    rest = []
    for _ in range(1000):
        rest.append(kind())
        assert part(rest[-1]) != first
        if id(rest[-1]) == address:
            break


def test_calls_that_never_repeat_a_signature_do_not_accumulate(rerun):
    module = te.graphed(_Foreign())
    x = _x().requires_grad_()
    _capture(module, x)
    for step in range(3 * automatic.EAGER_SIGNATURES):
        module.multiplier = 3.0 + step
        module(x)
    assert len(module.forward._entries) <= automatic.EAGER_SIGNATURES + 1
    module.multiplier = 2.0
    assert _reason(module, x) == ("captured", None)


def test_a_second_forward_before_the_backward_runs_eagerly(rerun):
    eager = _layer("LayerNormMLP")
    module = te.graphed(copy.deepcopy(eager))
    _capture(module, _x().requires_grad_())
    module.zero_grad()
    for call in (module, eager):
        first, second = _x(1).requires_grad_(), _x(2).requires_grad_()
        a, b = call(first), call(second)
        (a.square().sum() + b.square().sum()).backward()
        call.kept_grads = [first.grad, second.grad, *(p.grad for p in call.parameters())]
    assert all(
        torch.allclose(x, y, rtol=1e-5, atol=1e-5)
        for x, y in zip(module.kept_grads, eager.kept_grads, strict=True)
    )
    assert torch.equal(module.kept_grads[0], eager.kept_grads[0])
    first = module(_x(1).requires_grad_())
    assert _reason(module, _x(2).requires_grad_())[1].startswith(
        "an earlier call waits for its backward"
    )
    del first
    assert _reason(module, _x(2).requires_grad_()) == ("captured", None)


def test_outputs_belong_to_the_caller(rerun):
    module = te.graphed(_layer())
    _capture(module, _x().requires_grad_())
    with torch.no_grad():
        for _ in range(4):
            module(_x())
        first = module(_x(1))
        saved = first.clone()
        module(_x(2))
    assert torch.equal(first, saved)


def test_a_flag_passes_the_first_microbatch_to_the_graph(rerun):
    recipe = RECIPES["delayed"]
    eager = _layer("LayerNormMLP")
    module = te.graphed(copy.deepcopy(eager), after=1)
    for seed in range(6):
        first = seed % 2 == 0
        result = _step(module, module, recipe, seed, is_first_microbatch=first)
        assert _equal(result, _step(eager, eager, recipe, seed, is_first_microbatch=first))
        with torch.no_grad():
            for p, q in zip(eager.parameters(), module.parameters(), strict=True):
                p.mul_(1.25)
                q.mul_(1.25)
    assert _entry_count(module) == 1
    x = _x(9)
    with te.autocast(recipe=recipe):
        assert torch.equal(module(x, False), eager(x, False))


class _Outer(torch.nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.inner = _layer() if inner is None else inner

    def forward(self, x, other=None):
        return self.inner(x)


@pytest.mark.parametrize(
    ("inner", "other", "message"),
    [
        (None, object(), "an argument is of type object, whose present content a graph would keep"),
        (lambda: _layer(delay_wgrad_compute=True), None, "puts weight gradients off"),
    ],
)
def test_the_reason_against_a_capture_is_named(inner, other, message, rerun):
    module = te.graphed(_Outer(inner and inner()))
    for _ in range(5):
        module(_x(), other)
    assert rerun.log == []
    assert message in _reason(module, _x(), other)[1]


def test_hooks_inside_are_called_in_every_call(rerun):
    module = te.graphed(_Outer())
    records = []
    _capture(module, _x().requires_grad_())
    module.inner.register_forward_hook(lambda *_: records.append(1))
    module(_x().requires_grad_())
    assert records == [1]
    assert "has hooks" in _reason(module, _x())[1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_runs_the_module_itself(reentrant, rerun):
    module = te.graphed(_layer("LayerNormMLP"))
    x = _x().requires_grad_()
    for _ in range(5):
        te.checkpoint(module, x, use_reentrant=reentrant).sum().backward()
    assert rerun.log == []
    assert _entry_count(module) == 0


def test_saved_tensor_hooks_see_the_saved_tensors(rerun):
    module = te.graphed(_layer())
    _capture(module, _x().requires_grad_())
    records = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: records.append(t) or t, lambda t: t):
        module(_x().requires_grad_())
    assert records


def test_a_call_that_cannot_be_captured_runs_eagerly_and_warns_once(rerun, monkeypatch):
    def fails(body):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(rerun, "record", fails)
    eager = _layer()
    module = te.graphed(copy.deepcopy(eager))
    for seed in range(3):
        _step(module, module, None, seed)
        _step(eager, eager, None, seed)
    with pytest.warns(UserWarning, match="not permitted when stream is capturing"):
        result = _step(module, module, None, 3)
    assert _equal(result, _step(eager, eager, None, 3))
    assert "could not be captured" in _reason(module, _x(4).requires_grad_())[1]


def test_te_graphed_wraps_functions(rerun):
    call = te.graphed(lambda x, y=None: (x * 2, x + 1 if y is None else y))
    x = _x().requires_grad_()
    for _ in range(6):
        a, b = call(x, y=None)
        assert torch.equal(a, x * 2)
        assert torch.equal(b, x + 1)
        a.sum().backward()
    assert call.kept == 1


def test_copies_and_pickles_begin_without_graphs(rerun):
    module = te.graphed(_layer())
    _capture(module, _x().requires_grad_())
    twin = copy.deepcopy(module)
    assert _entry_count(twin) == 0
    assert twin.forward.module is twin
    assert torch.equal(twin(_x(3)), module(_x(3)))
    with torch.no_grad():
        twin.weight.zero_()
    assert module.weight.any()
    repeated = pickle.loads(pickle.dumps(_make_graphed_linear()))
    assert isinstance(repeated.forward, automatic.AutomaticGraph)


def _make_graphed_linear():
    return te.graphed(torch.nn.Linear(4, 4))


def test_reset_frees_graphs_and_captures_again(rerun):
    module = te.graphed(_layer())
    _capture(module, _x().requires_grad_())
    module.reset()
    assert _entry_count(module) == 0
    _capture(module, _x().requires_grad_())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(((3,), {}), TypeError), ((("x",), {}), TypeError), (((print,), {"after": 0}), ValueError)],
)
def test_objects_that_cannot_be_graphed_are_rejected(arguments, error):
    args, kwargs = arguments
    with pytest.raises(error):
        te.graphed(*args, **kwargs)


def test_a_module_is_graphed_once():
    module = te.graphed(_layer())
    with pytest.raises(ValueError, match="graphed already"):
        te.graphed(module)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "TransformerLayer"])
def test_automatic_cuda_graphs_are_bitwise_equal_to_eager_calls(kind, recipe):
    recipe = RECIPES[recipe]
    sized = {"out_features": HIDDEN} if "Linear" in kind else {}
    eager = make_layer(kind, device="cuda", **sized).to(torch.bfloat16)
    module = te.graphed(copy.deepcopy(eager))
    for seed in range(8):
        results = []
        for call in (module, eager):
            x = _x(seed).to("cuda", torch.bfloat16).requires_grad_()
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = call(x)
            y.square().sum().backward()
            results.append([y.detach(), x.grad, *(p.grad.clone() for p in call.parameters())])
        assert _equal(*results)
    assert _entry_count(module) == 1, te.explain(module, x)
