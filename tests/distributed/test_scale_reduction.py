"""Amaxes of delayed scaling over two ranks: aligned although the ranks do not free their layers at the same time."""

from __future__ import annotations

import gc

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
    assert int((first != 1).sum()) == 3 * 3  # of each layer the input, the weight, the output's gradient


def _frozen_first(device):
    torch.manual_seed(1)
    recipe = DelayedScaling(amax_history_len=2)
    frozen, trained = (te.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
    frozen.requires_grad_(False)
    for _ in range(2):
        _train((frozen, trained), recipe, torch.randn(16, WIDTH, device=device) * (dist.get_rank() + 1))
    return _scales((frozen, trained))


def test_gradient_scales_behind_a_frozen_layer_are_those_of_all_ranks(tmp_path):
    first, second = run_on_ranks(_frozen_first, 2, tmp_path)
    assert torch.equal(first, second)
    assert float(first[8]) != 1.0
