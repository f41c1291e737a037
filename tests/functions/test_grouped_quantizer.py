"""When quantizers fuse into a grouped quantizer, and equality between fused and separate results."""

from __future__ import annotations

import pytest
import torch

from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, FLOAT8
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.functions.grouped_quantizer import grouped
from transformer_engine.pytorch.primitives.grouped_gemm import make_groups
from transformer_engine.pytorch.quantization import RecipeState
from transformer_engine.pytorch.tensor import Float8BlockQuantizer, Float8CurrentScalingQuantizer

SPLITS = (48, 0, 80)


def make_quantizers(recipe, device) -> list:
    state = RecipeState.create(recipe, mode="forward", num_quantizers=9, device=device)
    return state.make_quantizers()


@pytest.mark.parametrize(
    "recipe, rows, matrices",
    [
        (DelayedScaling(), FLOAT8, FLOAT8),
        (Float8CurrentScaling(), FLOAT8, FLOAT8),
        (Float8BlockScaling(), BLOCK_1D, BLOCK_2D),
    ],
)
def test_a_recipes_quantizers_fuse_into_one(recipe, rows, matrices, device):
    quantizers = make_quantizers(recipe, device)
    inputs, weights = grouped(quantizers[0::3], False), grouped(quantizers[1::3], True)
    assert inputs is not None and weights is not None
    assert (inputs.format, weights.format) == (rows, matrices)


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()])
def test_a_grouped_quantizer_equals_separate_quantizers(recipe, device):
    x = torch.randn(sum(SPLITS), 128, device=device, dtype=torch.bfloat16)
    joint, alone = make_quantizers(recipe, device), make_quantizers(recipe, device)
    one = grouped(joint[0::3], False)
    assert one is not None
    result = one.rows(x, make_groups(SPLITS, x.shape[0], x.device), True, True)
    codes = [
        quantizer.encode(part, True, True)
        for quantizer, part in zip(alone[0::3], x.split(SPLITS), strict=True)
    ]
    expected = torch.cat(
        [getattr(c, "_data" if hasattr(c, "_data") else "_rowwise_data") for c in codes]
    )
    assert torch.equal(result.codes.view(torch.uint8), expected)
    if isinstance(recipe, DelayedScaling):
        for actual, other in zip(joint, alone, strict=True):
            assert torch.equal(actual.amax, other.amax)


def test_delayed_slots_with_unequal_distances_are_not_fused(device):
    quantizers = make_quantizers(DelayedScaling(), device)
    assert grouped([quantizers[0], quantizers[3], quantizers[4]], False) is None
    other = make_quantizers(DelayedScaling(), device)
    assert grouped([quantizers[0], other[3], quantizers[6]], False) is None
    standalone = [quantizers[0].replaying(quantizers[0].replay_state())] * 2
    assert grouped(standalone, False) is None


def test_quantizers_with_different_settings_are_not_fused(device):
    first = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, device)
    second = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, device, amax_epsilon=1.0)
    assert grouped([first, first], False) is not None
    assert grouped([first, second], False) is None


def test_quantizers_with_other_block_shapes_are_not_fused():
    flat = Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=1)
    square = Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=2)
    assert grouped([flat] * 2, True) is None and grouped([square] * 2, False) is None
    assert grouped([flat] * 2, False) is not None and grouped([square] * 2, True) is not None
