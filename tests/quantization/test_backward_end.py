"""Delayed gradient scales: one step at the end of every backward pass, whichever modules took part."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.functions import scale_update
from transformer_engine.pytorch.quantization import DelayedScalingRequest
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

WIDTH, ROWS, LENGTH, MARGIN = 32, 16, 6, 1


def delayed() -> DelayedScaling:
    return DelayedScaling(amax_history_len=LENGTH, margin=MARGIN)


def delayed_request_recipe() -> CustomRecipe:
    request = DelayedScalingRequest(amax_history_len=LENGTH, margin=MARGIN)
    return CustomRecipe(qfactory=lambda role: request)


RECIPES = {"delayed": delayed, "custom": delayed_request_recipe}


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]()


@pytest.fixture(autouse=True)
def _nothing_compiled_left():
    yield
    torch._dynamo.reset()


class Watched(nn.Module):
    """A layer, and the largest gradient that its output got in each backward of it."""

    def __init__(self, layer: nn.Module, slot: int = 0):
        super().__init__()
        self.layer = layer
        self.slot = slot
        self.amaxes: list[float] = []

    def forward(self, x: Tensor, *more: object) -> Tensor:
        y = self.layer(x, *more)
        if y.requires_grad:
            y.register_hook(lambda grad: self.amaxes.append(float(grad.detach().abs().max())))
        return y

    def steps(self) -> list[float]:
        """The amaxes of past passes, the oldest first, as the gradient's history has them."""
        history = self._state().amax_history[1:, self.slot]
        return [float(amax) for amax in history if amax != 0]

    def has_followed(self, *passes: list[float]) -> bool:
        """Whether each pass (a list with the amaxes from its backward calls) made one step."""
        (state,) = self.layer.fp8_meta["scaling_bwd"].delayed_states
        largest = [max(amaxes) for amaxes in passes]
        fp8_max = state.recipe.fp8_format.value.max_bwd
        scale = fp8_max / max(largest) / 2**MARGIN if passes else 1.0
        assert float(state.amax_history[0, self.slot]) == 0.0
        assert self.steps() == largest
        return bool(torch.isclose(state.scale[self.slot].cpu(), torch.tensor(scale), rtol=1e-6))

    def _state(self):
        (state,) = self.layer.fp8_meta["scaling_bwd"].delayed_states
        return state


def linear(device, **options) -> Watched:
    return Watched(te.Linear(WIDTH, WIDTH, device=device, params_dtype=torch.float32, **options))


def tokens(device, **options) -> Tensor:
    return torch.randn(ROWS, WIDTH, device=device, **options)


def layer_loss(y: Tensor, size: float = 1.0) -> Tensor:
    return y.float().square().sum() * size


# Ways to run a backward. Each leaves two layers and, for each, the passes that it had to follow.


def _frozen_first(a, b, recipe, x):
    a.requires_grad_(False)
    for _ in range(3):
        with te.autocast(recipe=recipe):
            y = b(a(x.detach()))
        layer_loss(y).backward()
    return [], [[amax] for amax in b.amaxes]


def _constant_input(a, b, recipe, x):
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = b(a(x.detach()))
        layer_loss(y).backward()
    return [[amax] for amax in a.amaxes], [[amax] for amax in b.amaxes]


def _teacher_in_the_same_block(a, b, recipe, x):
    for _ in range(2):
        with te.autocast(recipe=recipe):
            with torch.no_grad():
                target = a(x)
            y = b(x)
        layer_loss(y - target).backward()
    return [], [[amax] for amax in b.amaxes]


def _low_rank_adapter(a, b, recipe, x):
    base, adapter = a.requires_grad_(False), b
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = base(x.detach()) + adapter(x.detach())
        layer_loss(y).backward()
    return [], [[amax] for amax in b.amaxes]


def _backward_twice(a, b, recipe, x):
    with te.autocast(recipe=recipe):
        loss = layer_loss(b(a(x)))
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    return [[amax] for amax in a.amaxes], [[amax] for amax in b.amaxes]


def _several_losses(a, b, recipe, x):
    with te.autocast(recipe=recipe):
        hidden = a(x)
        y = b(hidden)
    layer_loss(hidden, 3.0).backward(retain_graph=True)
    layer_loss(y).backward()
    return [[amax] for amax in a.amaxes], [[amax] for amax in b.amaxes]


def _part_of_the_graph(a, b, recipe, x):
    with te.autocast(recipe=recipe):
        hidden = a(x)
        y = b(hidden)
    torch.autograd.grad(layer_loss(y), [b.layer.weight])
    return [], [[amax] for amax in b.amaxes]


def _forwards_before_backwards(a, b, recipe, x):
    outputs = []
    for size in (1.0, 2.0, 3.0):
        with te.autocast(recipe=recipe):
            outputs.append(b(a(size * x)))
    for y in outputs:
        layer_loss(y).backward()
    return [[amax] for amax in a.amaxes], [[amax] for amax in b.amaxes]


def _call_twice(a, b, recipe, x):
    with te.autocast(recipe=recipe):
        y = b(a(b(x)))
    layer_loss(y).backward()
    return [a.amaxes], [b.amaxes]


def _no_backward(a, b, recipe, x):
    with te.autocast(recipe=recipe):
        b(a(x))
    return [], []


def _another_thread(a, b, recipe, x):
    with te.autocast(recipe=recipe):
        loss = layer_loss(b(a(x)))
    worker = threading.Thread(target=loss.backward)
    worker.start()
    worker.join()
    return [a.amaxes], [b.amaxes]


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, raises):
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.raises:
            raise ZeroDivisionError
        return grad, None


def _good_after_a_raising_one(a, b, recipe, x):
    for raises in (True, False):
        with te.autocast(recipe=recipe):
            y = b(_Raises.apply(a(x), raises))
        if raises:
            with pytest.raises(ZeroDivisionError):
                layer_loss(y, 3.0).backward()
        else:
            layer_loss(y).backward()
    return [a.amaxes], [b.amaxes]  # b's gradient of the pass that raised is seen in the next step


def _differentiate_by_hand(a, b, recipe, x):
    with te.autocast(recipe=recipe):
        y = b(x)
        a(x)
    grad = torch.full_like(y, 3e-5)
    y.grad_fn.apply(grad)  # outside the engine, where no pass ends
    return [], [[float(grad.max())]]


def _own_checkpoint(reentrant):
    def run(a, b, recipe, x):
        for _ in range(2):
            with te.autocast(recipe=recipe):
                y = a(te.checkpoint(b, x, use_reentrant=reentrant))
            layer_loss(y).backward()
        return [[amax] for amax in a.amaxes], [[amax] for amax in b.amaxes]

    return run


def _torchs_checkpoint(a, b, recipe, x):
    """Its second run and the backward of that are one pass with the rest."""
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = a(torch_checkpoint(b, x, use_reentrant=True))
            layer_loss(y).backward()
    return [[amax] for amax in a.amaxes], [[amax] for amax in b.amaxes]


WAYS = {
    "a frozen first layer": _frozen_first,
    "an input without gradient": _constant_input,
    "a teacher in the same block": _teacher_in_the_same_block,
    "a low-rank adapter": _low_rank_adapter,
    "a retained graph": _backward_twice,
    "several losses": _several_losses,
    "part of the graph": _part_of_the_graph,
    "forwards before backwards": _forwards_before_backwards,
    "a layer called twice": _call_twice,
    "no backward": _no_backward,
    "another thread": _another_thread,
    "a good pass after one that raised": _good_after_a_raising_one,
    "a node called by hand": _differentiate_by_hand,
    "te.checkpoint, reentrant": _own_checkpoint(True),
    "te.checkpoint, by hooks": _own_checkpoint(False),
    "torch's reentrant checkpoint": _torchs_checkpoint,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_pass_is_one_step_for_the_layers_that_it_went_through(way, recipe, device):
    a, b = linear(device), linear(device)
    passes_a, passes_b = WAYS[way](a, b, recipe, tokens(device, requires_grad=True))
    assert a.has_followed(*passes_a)
    assert b.has_followed(*passes_b)


def test_gradients_that_fp8_cannot_hold_at_a_scale_of_one_survive_behind_a_frozen_layer(device):
    a, b = linear(device), linear(device)
    a.requires_grad_(False)
    x = tokens(device)
    exact = copy.deepcopy(b.layer)
    for _ in range(3):
        b.zero_grad()
        with te.autocast(recipe=delayed()):
            hidden = a(x)
            layer_loss(b(hidden), 1e-6).backward()
    layer_loss(exact(hidden), 1e-6).backward()
    error = (b.layer.weight.grad - exact.weight.grad).norm() / exact.weight.grad.norm()
    assert 0 < float(error) < 0.1  # E5M2 has two bits after the first


LAYERS = {
    "linear": (lambda device: te.Linear(WIDTH, WIDTH, device=device), 0),
    "layernorm_linear": (lambda device: te.LayerNormLinear(WIDTH, WIDTH, device=device), 0),
    "layernorm_mlp": (lambda device: te.LayerNormMLP(WIDTH, 64, device=device), 2),
    "layernorm_mlp_recomputed": (
        lambda device: te.LayerNormMLP(WIDTH, 64, checkpoint=True, device=device),
        2,
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_follows_behind_a_frozen_one_of_its_kind(kind, recipe, device):
    make, slot = LAYERS[kind]
    first, second = Watched(make(device), slot), Watched(make(device), slot)
    first.requires_grad_(False)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = second(first(tokens(device)))
        layer_loss(y).backward()
    assert first.has_followed()
    assert second.has_followed(*[[amax] for amax in second.amaxes])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_follow_behind_a_frozen_layer(dtype, device):
    first, second = (
        te.GroupedLinear(2, WIDTH, WIDTH, device=device, params_dtype=dtype) for _ in range(2)
    )
    first.requires_grad_(False)
    splits, grads = [ROWS, ROWS], []
    for _ in range(2):
        with te.autocast(recipe=delayed()):
            x = torch.randn(2 * ROWS, WIDTH, device=device, dtype=dtype)
            y = second(first(x, splits), splits)
        y.register_hook(grads.append)
        layer_loss(y).backward()
    (state,) = second.fp8_meta["scaling_bwd"].delayed_states
    for i in range(2):
        amaxes = [float(grad.split(splits)[i].abs().max()) for grad in grads]
        assert state.amax_history[-2:, 2 * i].tolist() == amaxes
    assert first.fp8_meta["scaling_bwd"].scale.unique().tolist() == [1.0]


def test_attention_follows_behind_a_frozen_projection(device, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "1")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    frozen = te.Linear(64, 64, device=device, params_dtype=dtype).requires_grad_(False)
    attention = te.DotProductAttention(2, 32, qkv_format="bshd", attn_mask_type="no_mask")
    recipe = DelayedScaling(amax_history_len=LENGTH, fp8_dpa=True)
    key = torch.randn(2, 64, 2, 32, device=device, dtype=dtype, requires_grad=True)
    grads = []
    for _ in range(2):
        with te.autocast(recipe=recipe):
            query = frozen(torch.randn(2, 64, 64, device=device, dtype=dtype)).unflatten(
                -1, (2, 32)
            )
            y = attention(query, key, key)
        y.register_hook(grads.append)
        layer_loss(y, 1e-3).backward()
    (state,) = attention.fp8_meta["scaling_bwd"].delayed_states
    assert state.amax_history[-2:, 3].tolist() == [float(grad.abs().max()) for grad in grads]
    assert frozen.fp8_meta["scaling_bwd"].scale.unique().tolist() == [1.0]


@pytest.mark.parametrize("frozen", ["self_attention", "layernorm_mlp"])
def test_a_transformer_layer_trains_with_a_frozen_part(frozen, device):
    layer = te.TransformerLayer(
        64, 128, 2, hidden_dropout=0.0, attention_dropout=0.0, device=device
    )
    getattr(layer, frozen).requires_grad_(False)
    x = torch.randn(16, 2, 64, device=device, requires_grad=True)
    for _ in range(2):
        with te.autocast(recipe=delayed()):
            y = layer(x, attention_mask=None)
        layer_loss(y).backward()
    states = [
        (name, module.fp8_meta["scaling_bwd"].scale)
        for name, module in layer.named_modules()
        if isinstance(module, (te.LayerNormLinear, te.Linear, te.LayerNormMLP))
    ]
    assert len(states) == 3
    assert all(bool(scale[0] != 1) for _, scale in states)


COMPILED_WAYS = [
    "a frozen first layer",
    "an input without gradient",
    "a teacher in the same block",
    "a low-rank adapter",
    "forwards before backwards",
    "no backward",
]


@pytest.mark.parametrize("way", COMPILED_WAYS)
def test_compiled_layers_get_the_scales_of_eager_ones(way, device):
    x = tokens(device)

    def outcome(compiles):
        Manager.reset()
        torch._dynamo.reset()
        torch.manual_seed(3)
        a, b = linear(device), linear(device)
        for watched in (a, b):
            if compiles:
                watched.forward = torch.compile(watched.layer, fullgraph=True, backend="aot_eager")
        WAYS[way](a, b, delayed(), x.clone().requires_grad_())
        states = [w.layer.fp8_meta[key] for w in (a, b) for key in ("scaling_fwd", "scaling_bwd")]
        return [t.clone() for state in states for t in (state.scale, state.amax_history)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = zip(outcome(False), outcome(True), strict=True)
        assert all(torch.equal(eager, compiled) for eager, compiled in pairs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("calls", [1, 2])
def test_a_layer_in_one_graph_gets_the_scales_of_eager_mode(calls, device):
    """For any number of calls per graph, the call whose backward pass runs last determines the update."""

    def outcome(compiles):
        Manager.reset()
        torch._dynamo.reset()
        torch.manual_seed(3)
        layer = te.Linear(WIDTH, WIDTH, device=device)

        def run(x):
            for _ in range(calls):
                x = layer(x)
            return x

        function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiles else run
        records = []
        for step in range(4):
            x = (tokens(device) * (step + 1)).requires_grad_()
            with te.autocast(recipe=delayed()):
                y = function(x)
            layer_loss(y).backward()
            state = layer.fp8_meta["scaling_bwd"]
            records += [x.grad, state.scale.clone(), state.amax_history.clone()]
        return records

    pairs = zip(outcome(False), outcome(True), strict=True)
    assert [torch.equal(eager, compiled) for eager, compiled in pairs] == [True] * 12


def test_a_pass_that_raised_is_forgotten(device):
    layer = linear(device)
    for _ in range(scale_update._MAX_RUNNING_PASSES + 10):
        with te.autocast(recipe=delayed()):
            y = layer(_Raises.apply(tokens(device, requires_grad=True), True))
        with pytest.raises(ZeroDivisionError):
            layer_loss(y).backward()
    assert len(scale_update._passes) <= scale_update._MAX_RUNNING_PASSES + 1


def test_stateless_recipes_ask_for_no_update(device, monkeypatch):
    queries = []
    monkeypatch.setattr(scale_update, "update_all", lambda forward: queries.append(forward))
    with te.autocast(recipe=Float8CurrentScaling()):
        y = te.Linear(WIDTH, WIDTH, device=device)(tokens(device))
    y.sum().backward()
    assert queries == []


@pytest.mark.parametrize(
    "way", ["te.checkpoint, reentrant", "torch's reentrant checkpoint", "a layer called twice"]
)
def test_a_pass_updates_once_however_it_is_nested(way, device, monkeypatch):
    updates = []
    monkeypatch.setattr(scale_update, "update_all", lambda forward: updates.append(forward))
    a, b = linear(device), linear(device)
    WAYS[way](a, b, delayed(), tokens(device, requires_grad=True))
    assert updates == [False] * (1 if way == "a layer called twice" else 2)
