"""Named random states: independence, continuation, and rejected arguments."""

from __future__ import annotations

import types

import numpy
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from transformer_engine.pytorch.distributed import (
    CudaRNGStatesTracker,
    get_all_rng_states,
    graph_safe_rng_available,
    set_all_rng_states,
)
from transformer_engine.pytorch.distributed.rng import RngSnapshot


@pytest.fixture
def tracker():
    torch.manual_seed(5)
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1)
    tracker.add("other", 2)
    return tracker


def _draw(device):
    return torch.rand(8, device=device)


def test_a_fork_does_not_advance_the_default_generator(tracker, device):
    torch.manual_seed(5)
    expected = _draw(device)
    torch.manual_seed(5)
    with tracker.fork():
        _draw(device)
    assert torch.equal(_draw(device), expected)


def test_a_named_state_continues_from_fork_to_fork(tracker, device):
    with tracker.fork("other"):
        expected = torch.cat((_draw(device), _draw(device)))
    fresh = CudaRNGStatesTracker()
    fresh.add("other", 2)
    parts = []
    for _ in range(2):
        with fresh.fork("other"):
            parts.append(_draw(device))
        _draw(device)
    assert torch.equal(torch.cat(parts), expected)


def test_each_named_state_starts_from_its_seed(tracker, device):
    with tracker.fork():
        first = _draw(device)
    with tracker.fork("other"):
        second = _draw(device)
    torch.manual_seed(1)
    assert torch.equal(first, _draw(device)) and not torch.equal(first, second)


def test_a_fork_restores_the_default_generator_when_the_block_raises(tracker, device):
    torch.manual_seed(5)
    expected = _draw(device)
    torch.manual_seed(5)
    with pytest.raises(ZeroDivisionError), tracker.fork():
        _draw(device).add_(1 // 0)
    assert torch.equal(_draw(device), expected)


@pytest.mark.parametrize("seed", [-7, 7.0, torch.tensor(7), numpy.int64(7)])
@pytest.mark.parametrize("name", [3, ("tensor", 0), "text"])
def test_names_are_anything_hashable_and_seeds_any_whole_number(name, seed, device):
    tracker = CudaRNGStatesTracker()
    tracker.add(name, seed)
    with tracker.fork(name):
        result = _draw(device)
    torch.manual_seed(int(seed))
    assert torch.equal(result, _draw(device))
    other = CudaRNGStatesTracker()
    other.set_states(types.MappingProxyType(tracker.get_states()))
    with pytest.raises(ValueError, match=f"seed {int(seed)} is in use"):
        tracker.add("other", seed)
    with tracker.fork(name):
        second = _draw(device)
    if device.type == "cpu":
        with other.fork(name):
            assert torch.equal(second, _draw(device))


def test_names_and_seeds_are_used_once_and_unknown_names_list_the_known(tracker):
    with pytest.raises(ValueError, match="seed 1"):
        tracker.add("third", 1)
    with pytest.raises(ValueError, match="'other'"):
        tracker.add("other", 3)
    with pytest.raises(ValueError, match="model-parallel-rng, other"), tracker.fork("nonesuch"):
        pass


def test_reset_clears_names_and_seeds(tracker):
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.add("other", 1)
    assert list(tracker.get_states()) == ["other"]


def test_get_states_is_a_new_dict_that_set_states_takes(tracker):
    states = tracker.get_states()
    assert set(states) == {"model-parallel-rng", "other"}
    states.pop("other")
    assert "other" in tracker.get_states()
    tracker.set_states(states)
    assert list(tracker.get_states()) == ["model-parallel-rng"]
    assert list(get_all_rng_states()) == ["model-parallel-rng"]


def test_get_all_states_returns_the_last_set_states():
    before = get_all_rng_states()
    states = {"name": torch.get_rng_state()}
    set_all_rng_states(states)
    assert get_all_rng_states() is states
    set_all_rng_states(before)


def test_graph_safe_states_need_cuda(device):
    assert graph_safe_rng_available() == (device.type == "cuda")


def test_a_snapshot_replays_all_states_repeatedly_and_then_continues(tracker, device):
    def block():
        with tracker.fork():
            tracked = _draw(device)
        return torch.cat((_draw(device), tracked))

    snapshot = RngSnapshot(lambda: tracker)
    first = block()
    for _ in range(2):
        with snapshot.replay():
            assert torch.equal(block(), first)
    after = block()
    torch.manual_seed(5)
    fresh = CudaRNGStatesTracker()
    fresh.add("model-parallel-rng", 1)
    tracker = fresh
    assert torch.equal(block(), first) and torch.equal(block(), after)


@pytest.mark.gpu
def test_a_graph_draws_new_numbers_from_a_registered_state_at_every_replay():
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1)
    x = torch.zeros(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    for state in get_all_rng_states().values():
        graph.register_generator_state(state)
    with torch.cuda.graph(graph), tracker.fork():
        x.copy_(torch.rand_like(x))
    graph.replay()
    first = x.clone()
    graph.replay()
    assert not torch.equal(first, x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_torchs_checkpoint_repeats_draws_from_trackers(reentrant, nested, tracker, device):
    """Twice, from two trackers; later draws are the same as without a checkpoint."""

    def train_model(checkpointed):
        torch.manual_seed(5)
        trackers = [tracker, CudaRNGStatesTracker()]
        trackers[0].reset()
        for number, one in enumerate(trackers):
            one.add("model-parallel-rng", 1 + number)
        drawn = []

        def function(x):
            for one in trackers:
                with one.fork():
                    drawn.append(_draw(device))
                    x = x * drawn[-1]
            return x.sin()

        def call(x):
            return checkpoint(function, x, use_reentrant=reentrant)

        x = torch.ones(8, device=device, requires_grad=True)
        y = x
        for _ in range(2):
            if not checkpointed:
                y = function(y)
            elif nested:
                y = checkpoint(call, y, use_reentrant=reentrant)
            else:
                y = call(y)
        after = []
        for one in trackers:
            with one.fork():
                after.append(_draw(device))
        y.sum().backward()
        for one in trackers:
            with one.fork():
                after.append(_draw(device))
        return [y.detach(), x.grad, *after], get_all_rng_states() is trackers[1].states_

    (expected, registered), (actual, repeated) = train_model(False), train_model(True)
    assert registered == repeated
    assert all(
        torch.equal(ours, reference) for ours, reference in zip(actual, expected, strict=True)
    )
