"""Pools of delayed scaling hold live states, and ranks agree on the states that they reduce."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.functions import weight_gradient
from transformer_engine.pytorch.primitives.scale_update import triton as fused_update
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager
from transformer_engine.pytorch.quantization import RecipeState, delayed_scaling

WIDTH = 32


def run(layer, device, recipe=None) -> None:
    with te.autocast(recipe=recipe or DelayedScaling(amax_history_len=4)):
        y = layer(torch.randn(16, WIDTH, device=device))
    y.sum().backward()


def entries() -> int:
    """Everything that an update has to go through."""
    return sum(len(pool.members) for pool in delayed_scaling.registry.pools.values())


def test_a_hundred_deleted_layers_leave_only_the_live_one(device):
    live = te.Linear(WIDTH, WIDTH, device=device)
    run(live, device)
    for _ in range(100):
        run(te.Linear(WIDTH, WIDTH, device=device), device)
    gc.collect()
    run(live, device)
    assert entries() == 2
    assert len(delayed_scaling.registry.pools) == 2


def test_alternating_recipes_leaves_the_states_of_one(device):
    layer = te.Linear(WIDTH, WIDTH, device=device)
    recipes = [DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=4, margin=1)]
    for i in range(20):
        run(layer, device, recipes[i % 2])
    assert entries() == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(layer, device, Float8CurrentScaling())
    assert entries() == 0
    assert delayed_scaling.registry.pools == {}


def test_every_new_group_or_recipe_leaves_no_empty_pool(device):
    for margin in range(5):
        run(te.Linear(WIDTH, WIDTH, device=device), device, DelayedScaling(margin=margin))
    gc.collect()
    for forward in (True, False):
        Manager.reduce_and_update_fp8_tensors(forward)
    assert delayed_scaling.registry.pools == {}


def _state(recipe, columns, device):
    return RecipeState.create(recipe, mode="forward", num_quantizers=columns, device=device)


def test_states_of_two_devices_are_updated_separately():
    recipe = DelayedScaling(amax_history_len=2)
    states = [_state(recipe, 2, device) for device in ("cpu", "meta", "cpu", "meta")]
    for i, state in enumerate(states):
        delayed_scaling.register(state, True, recipe, None)
        state.amax_history[0].fill_(2.0**i)
    results = [(pool.device.type, pool.states) for pool in delayed_scaling.registry.pools.values()]
    assert results == [("cpu", states[::2]), ("meta", states[1::2])]
    delayed_scaling.update_all(True)
    assert [state.scale.tolist() for state in states[::2]] == [[448.0, 448.0], [112.0, 112.0]]


def test_deleted_states_keep_their_place_in_the_reduced_buffer(device, monkeypatch):
    reduced = []

    def all_reduce(tensor, op, group):
        reduced.append(tensor.tolist())

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    recipe, group = DelayedScaling(amax_history_len=2), object()
    states = [_state(recipe, columns, device) for columns in (1, 2, 2, 1, 1)]
    for i, state in enumerate(states):
        delayed_scaling.register(state, True, recipe, group)
        state.amax_history[0].fill_(i + 1.0)
    delayed_scaling.update_all(True)
    assert reduced == [[1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 5.0]]
    for i in (1, 2):
        states[i] = None
    state = None
    delayed_scaling.unregister(states[3])  # every rank does, so this one leaves no gap
    for i in (0, 4):
        states[i].amax_history[0].fill_(7.0)
    for _ in range(2):
        delayed_scaling.update_all(True)
    assert reduced[1:] == [[7.0, 0.0, 0.0, 0.0, 0.0, 7.0], [0.0] * 6]
    assert entries() == 3
    assert [states[i].scale.tolist() for i in (0, 4)] == [[64.0], [64.0]]
    del states[:]
    delayed_scaling.update_all(True)
    assert reduced[3:] == [[0.0] * 6]


def test_a_layer_that_died_in_a_compiled_graphs_pool_is_left_out(device):
    torch._dynamo.reset()
    recipe = DelayedScaling(amax_history_len=3)
    dead, live = te.Linear(WIDTH, WIDTH, device=device), te.Linear(WIDTH, WIDTH, device=device)
    twin = copy.deepcopy(live)
    run(dead, device, recipe)

    def step(layer, x):
        with te.autocast(recipe=recipe):
            return layer(x)

    x = torch.randn(16, WIDTH, device=device)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for function, layer in ((step, twin), (compiled, live)):
        function(layer, x).sum().backward()
    del dead
    gc.collect()
    for function, layer in ((step, twin), (compiled, live)):
        function(layer, 3 * x).sum().backward()
    for key in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(live.fp8_meta[key].scale, twin.fp8_meta[key].scale)
    torch._dynamo.reset()


@pytest.mark.gpu
def test_tables_of_addresses_of_the_dead_are_not_used(device):
    for _ in range(fused_update._KEPT + 5):
        layer = te.Linear(WIDTH, WIDTH, device=device)
        for _ in range(2):
            run(layer, device)
        state = layer.fp8_meta["scaling_fwd"]
        assert bool((state.scale[:2] != 1).all())
    assert len(fused_update._tables) <= fused_update._KEPT


def test_placeholders_of_gradients_do_not_add_up(device):
    for width in range(1, 100):
        weight_gradient.dummy_gradient((width, 8), torch.float32, device)
    assert len(weight_gradient._dummy_wgrads) <= weight_gradient._KEPT
    first = weight_gradient.dummy_gradient((8, 8), torch.float32, device)
    assert (
        first.data_ptr() == weight_gradient.dummy_gradient((8, 8), torch.float32, device).data_ptr()
    )
