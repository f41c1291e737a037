"""megatron-fsdp as published shards models of this engine, also those whose parameters are FP8."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests.clients import processes
from tests.support import pages

CASES = str(Path(__file__).parent / "fsdp_gpu_cases.py")
RECIPES = ["delayed", "current", "block"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.clients,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron_fsdp") is None,
        reason="megatron-fsdp is not installed; `make test-clients` installs it",
    ),
]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
GPUS = [pytest.param(1, id="one_gpu"), pytest.param(2, id="two_gpus", marks=two)]


def losses(case: str, ranks: int = 1) -> list[float]:
    """Run a case in separate processes and return its losses; all ranks have the same data."""
    return json.loads(processes.once([CASES, case], ranks).splitlines()[-1])


def assert_alike(actual: list[float], expected: list[float], tolerance: float) -> None:
    assert actual[-1] < actual[0] - 0.1, actual
    assert actual == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("ranks", GPUS)
@pytest.mark.parametrize("strategy", range(4))
def test_every_strategy_trains_as_no_sharding(strategy, ranks):
    assert_alike(losses(f"zero {strategy}", ranks), losses("zero 0"), 0.02)


@pytest.mark.parametrize("recipe", RECIPES)
def test_sharded_layers_quantize(recipe):
    assert_alike(losses(f"zero 3 {recipe}"), losses("zero 3"), 0.1)
    assert losses(f"zero 3 {recipe}") != losses("zero 3")


@pytest.mark.parametrize("ranks", GPUS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", ["parameters", "parameters not kept"])
def test_fp8_parameters_train_as_bfloat16_ones(case, recipe, ranks):
    assert_alike(losses(f"{case} {recipe}", ranks), losses(f"zero 3 {recipe}"), 0.02)


@pytest.mark.parametrize("ranks", GPUS)
@pytest.mark.parametrize("case", ["meta", *(f"meta parameters {recipe}" for recipe in RECIPES)])
def test_a_model_without_storage_is_made_when_it_is_sharded(case, ranks):
    result = losses(case, ranks)
    assert result[-1] < result[0] - 0.1, result


@pytest.mark.parametrize("ranks", GPUS)
def test_this_engine_s_optimizer_takes_decoupled_gradients(ranks):
    assert_alike(losses("decoupled", ranks), losses("zero 3"), 0.02)


def test_the_example_of_the_page_runs(tmp_path):
    (example,) = pages.examples("megatron.md", "python-clients-gpu")
    processes.output(["-c", example], tmp_path)
