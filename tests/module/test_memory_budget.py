"""te.memory_plan(budget=...) proposes the cheapest options whose planned peak fits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.common.dispatch import Unsupported, use_backend
from transformer_engine.pytorch.inspect.memory_budget import RECOMPUTED, Options, cheapest

GIB = 2**30
TOKENS, HIDDEN, LAYERS = 512, 128, 4


class Peak(NamedTuple):
    peak: int


def peaks(options: Options) -> Peak:
    """1,000 bytes, less for each enabled option."""
    return Peak(
        1000
        - 100 * len(options.recomputed)
        - 200 * options.caches_inputs
        - 50 * options.checkpointed
    )


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1000, Options()),
        (999, Options(RECOMPUTED[:1])),
        (899, Options(RECOMPUTED)),
        (799, Options(RECOMPUTED, True)),
        (599, Options(RECOMPUTED, True, 1)),
        (549, Options(RECOMPUTED, True, 2)),
        (400, Options(RECOMPUTED, True, 4)),
        (399, Options(RECOMPUTED, True, 4)),
    ],
)
def test_the_cheapest_options_that_fit_are_chosen(budget: int, expected: Options):
    plan, options = cheapest(peaks, LAYERS, budget)
    assert (plan, options) == (peaks(expected), expected)


def test_options_that_save_nothing_or_are_unsupported_are_left_out():
    def plan(options: Options) -> Peak:
        if options.recomputed:
            raise Unsupported("quantized parameters")
        return Peak(100 if options.checkpointed else 1000)

    assert cheapest(plan, LAYERS, 500) == (Peak(100), Options(checkpointed=1))
    assert cheapest(plan, 0, 500) == (Peak(1000), Options())


def test_options_that_checkpointed_layers_do_not_support_are_left_out():
    def plan(options: Options) -> Peak:
        if options.checkpointed and "norm_columns" in options.recomputed:
            raise Unsupported("a checkpointed layer saves its input")
        return peaks(options)

    assert cheapest(plan, LAYERS, 550) == (Peak(550), Options(RECOMPUTED[:1], True, 3))
    assert cheapest(plan, LAYERS, 600) == (Peak(600), Options(RECOMPUTED, True))


@pytest.mark.parametrize("recipe", [recipes.Float8CurrentScaling(), recipes.DelayedScaling()])
def test_an_rms_norm_model_has_a_plan_for_every_budget(recipe: recipes.Recipe):
    model = stack("RMSNorm")
    with te.emulate():
        default = te.memory_plan(model, recipe, TOKENS)
        columns, checkpoints = (
            te.memory_plan(model, recipe, TOKENS, budget=b)
            for b in (0.9 * default.peak / GIB, 1e-6)
        )
    assert checkpoints.peak < columns.peak < default.peak
    assert checkpoints.options[-1] == "checkpoint=True of 0, 1, 2, 3"
    assert "norm_columns" not in "".join(checkpoints.options)


def stack(normalization: str = "LayerNorm") -> nn.Module:
    layer = lambda: te.LayerNormMLP(  # noqa: E731
        HIDDEN,
        4 * HIDDEN,
        normalization=normalization,
        activation="swiglu",
        bias=False,
        params_dtype=torch.bfloat16,
        device="meta",
    )
    return nn.Sequential(*(layer() for _ in range(LAYERS)))


def test_a_proposal_equals_the_plan_for_its_options():
    model, recipe = stack(), recipes.Float8CurrentScaling()
    with te.emulate():
        default = te.memory_plan(model, recipe, TOKENS)
        with use_backend(weight_columns="recomputed"):
            recomputed = te.memory_plan(model, recipe, TOKENS)
        assert te.memory_plan(model, recipe, TOKENS, budget=default.peak / GIB).options == ()
        proposed = te.memory_plan(model, recipe, TOKENS, budget=recomputed.peak / GIB)
        smallest = te.memory_plan(model, recipe, TOKENS, budget=1e-6)
    assert default.fits is None and recomputed.peak < default.peak
    assert proposed.options == ('te.use_backend(weight_columns="recomputed")',)
    assert proposed.fits and proposed.peak == recomputed.peak
    assert smallest.fits is False and smallest.peak < proposed.peak
    assert smallest.options[-1] == "checkpoint=True of 0, 1, 2, 3"
    assert not any(layer.checkpoint or layer.cache_quantized_activation_input for layer in model)
    assert "above the budget with these options:" in str(smallest)
    assert "within the budget" in str(proposed) and "budget" not in str(default)


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (0, ValueError, "budget=0 GiB is not positive"),
        (-1.5, ValueError, "budget=-1.5 GiB is not positive"),
        (float("inf"), ValueError, "budget=inf is not finite"),
        ("80", TypeError, "must be a number"),
    ],
)
def test_invalid_budgets_are_rejected(budget, error, message):
    with pytest.raises(error, match=message):
        te.memory_plan(stack(), None, TOKENS, budget=budget)
