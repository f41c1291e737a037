"""Maxima of delayed scaling over two ranks: over which group, and for layers that are freed at different times."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from transformer_engine.common.recipe import DelayedScaling

WIDTH = 32


def _train(layers, recipe, x):
    with te.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
        y = x
        for layer in layers:
            y = layer(y)
    y.square().sum().backward()


def _scales(layers):
    states = [layer.fp8_meta[key] for layer in layers for key in ("scaling_fwd", "scaling_bwd")]
    return torch.cat([state.scale for state in states])


def _one_rank_collects_later(device):
    torch.manual_seed(1)
    recipe = DelayedScaling(amax_history_len=2)
    first, middle, last = (te.Linear(WIDTH, WIDTH, device=device) for _ in range(3))
    x = torch.randn(16, WIDTH, device=device) * (dist.get_rank() + 1)
    _train((first, middle, last), recipe, x)
    if dist.get_rank() == 0:
        gc.disable()
        middle.itself = middle  # a cycle, which counting references does not free
    del middle
    other = te.Linear(8 * WIDTH, WIDTH, device=device)
    other.weight.data.copy_(torch.linspace(-1, 1, 8 * WIDTH).expand(WIDTH, -1))
    for size in (1.0, 4.0):
        _train((first, last), recipe, size * x)
        _train((other,), recipe, torch.cat([size * x] * 8, dim=1))
    return _scales((first, last, other))


def test_a_layer_that_one_rank_frees_later_leaves_all_scales_equal(tmp_path):
    first, second = run_on_ranks(_one_rank_collects_later, 2, tmp_path)
    assert torch.equal(first, second)
    assert int((first != 1).sum()) == 3 * 3  # per layer: input, weight, output gradient


def _frozen_first(device):
    torch.manual_seed(1)
    recipe = DelayedScaling(amax_history_len=2)
    frozen, trained = (te.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
    frozen.requires_grad_(False)
    for _ in range(2):
        _train(
            (frozen, trained), recipe, torch.randn(16, WIDTH, device=device) * (dist.get_rank() + 1)
        )
    return _scales((frozen, trained))


def test_gradient_scales_behind_a_frozen_layer_are_those_of_all_ranks(tmp_path):
    first, second = run_on_ranks(_frozen_first, 2, tmp_path)
    assert torch.equal(first, second)
    assert float(first[8]) != 1.0


def _scales_of_two_steps(block, device, compiled=False):
    """A layer's scales after two steps; the second rank's values are twice as large as the first rank's."""
    torch.manual_seed(1)
    layer = te.Linear(WIDTH, WIDTH, device=device)

    def forward(x):
        with block():
            y = layer(x)
        return y

    forward = torch.compile(forward, backend="eager") if compiled else forward
    values = torch.linspace(-1, 1, 16 * WIDTH, device=device).view(16, WIDTH) * (
        dist.get_rank() + 1
    )
    for size in (1.0, 3.0):
        forward(size * values).square().sum().backward()
    return _scales((layer,))


def _train_in_blocks(device):
    recipes = [DelayedScaling(amax_history_len=2, reduce_amax=reduce) for reduce in (True, False)]
    blocks = (
        lambda: te.autocast(recipe=recipes[0], amax_reduction_group=dist.group.WORLD),
        lambda: te.autocast(recipe=recipes[0]),
        lambda: te.fp8_autocast(fp8_recipe=recipes[0]),
        lambda: te.autocast(recipe=recipes[1]),
        lambda: te.autocast(recipe=recipes[1], amax_reduction_group=dist.group.WORLD),
    )
    return torch.stack([_scales_of_two_steps(block, device) for block in blocks])


@pytest.mark.filterwarnings("ignore:fp8_autocast is deprecated")
def test_without_a_group_maxima_are_reduced_over_all_ranks_if_the_recipe_reduces_them(tmp_path):
    first, second = run_on_ranks(_train_in_blocks, 2, tmp_path)
    of_all = first[:1].expand(3, -1)
    assert torch.equal(first[:3], of_all) and torch.equal(second[:3], of_all)
    # the input's scale; this rank has the largest values
    assert torch.equal(second[3:, 0], of_all[:2, 0])
    assert torch.equal(first[3:, 0], 2 * of_all[:2, 0])


def _compiled_without_a_group(device):
    recipe = DelayedScaling(amax_history_len=2)
    both = [
        _scales_of_two_steps(lambda: te.autocast(recipe=recipe), device, compiled)
        for compiled in (False, True)
    ]
    return torch.stack(both)


@pytest.mark.slow
def test_a_compiled_step_without_a_group_reduces_over_all_ranks(tmp_path):
    first, second = run_on_ranks(_compiled_without_a_group, 2, tmp_path)
    assert torch.equal(first, second) and torch.equal(first[0], first[1])
