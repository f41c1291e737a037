"""Launch counts for a warm forward and backward pass per layer and recipe, which may only fall."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.support.fast_path import needs_fast_path
from tests.support.programs import output_without_gpu

# (kernels, products, torch operations). Lower a figure when a change needs fewer launches.
LAUNCHES = {
    "linear/none": (0, 3, 0),
    "linear/delayed": (5, 3, 0),
    "linear/current": (6, 3, 0),
    "linear/block": (3, 3, 0),
    "layernorm_linear/none": (3, 3, 0),
    "layernorm_linear/delayed": (8, 3, 0),
    "layernorm_linear/current": (8, 3, 0),
    "layernorm_linear/block": (6, 3, 0),
    "layernorm_mlp/none": (5, 6, 0),
    "layernorm_mlp/delayed": (11, 6, 1),
    "layernorm_mlp/current": (14, 6, 0),
    "layernorm_mlp/block": (9, 6, 0),
    "layer/none": (8, 12, 2),
    "layer/delayed": (20, 12, 3),
    "layer/current": (28, 12, 2),
    "layer/block": (18, 12, 2),
    "rotary_layer/none": (10, 12, 2),
    "rotary_layer/delayed": (22, 12, 3),
    "rotary_layer/current": (30, 12, 2),
    "rotary_layer/block": (20, 12, 2),
    "separate_layer/none": (10, 12, 2),
    "separate_layer/delayed": (22, 12, 3),
    "separate_layer/current": (30, 12, 2),
    "separate_layer/block": (20, 12, 2),
}


@needs_fast_path
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_warm_pass_launches_no_more_than_before():
    result = json.loads(output_without_gpu("tests/module/launch_counts.py").splitlines()[-1])
    launches = {
        case: (
            counts.pop("kernels", 0),
            counts.pop("products", 0),
            sum(counts.values()),
        )
        for case, counts in result.items()
    }
    assert launches == LAUNCHES


@needs_fast_path
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_compiled_backward_pass_compares_the_saved_inputs_of_its_layer():
    result = json.loads(output_without_gpu("tests/module/saved_inputs.py").splitlines()[-1])
    x, gamma, weight = [128, 1, 512], [512], [512, 512]
    assert result == {
        "linear": [x, weight],
        "layernorm_linear": [x, gamma, weight],
        "layernorm_mlp": [x, gamma, [1024, 512], weight],
    }
