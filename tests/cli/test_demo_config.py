"""Sizes and options: the settings of a run, and settings that are rejected before anything is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transformer_engine_tools.demo.config import (
    CPU_SIZES,
    HIGH_PRECISION,
    RECIPES,
    Execution,
    RunConfig,
    learning_rate,
    list_recipes,
    make_recipe,
    resolve,
    restore,
)
from transformer_engine_tools.demo.optimizer import MasterAdamW


def config(**changes: Any) -> RunConfig:
    return resolve("cpu", {"hidden": 64, "heads": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "fp7"}, r"--recipe 'fp7' does not exist; choose one of delayed, current"),
        ({"steps": 0}, r"--steps 0 is below 1"),
        ({"hidden": 100}, r"--hidden 100 is not a positive multiple of 32; try 96"),
        ({"sequence": 8}, r"--seq 8 is not a positive multiple of 32; try 32"),
        ({"heads": 3}, r"--hidden 64 and --heads 3 give a head width of 21.3333"),
        ({"learning_rate": 2.0}, r"--lr 2.0 is not between 0 and 1"),
    ],
)
def test_an_impossible_size_is_rejected_with_a_remedy(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_cuda_without_a_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no CUDA device; use --device cpu"):
        resolve("cuda", {})
    assert resolve("auto", {}).device == "cpu"


def test_an_unknown_device_is_rejected():
    with pytest.raises(
        ValueError, match=r"--device 'tpu' does not exist; choose one of auto, cpu, cuda"
    ):
        resolve("tpu", {})


def test_options_left_out_take_the_sizes_of_the_device():
    default = resolve("cpu", {"steps": None, "seed": None})
    assert default.as_dict() == {
        "recipe": "delayed",
        "device": "cpu",
        "seed": 0,
        "data": None,
        "optimizer": "adamw",
        "experts": 0,
        "framework": "torch",
        **CPU_SIZES,
    }
    assert default.precision == "float32"


def test_the_recipe_none_trains_one_model():
    assert config(recipe="none").runs == (HIGH_PRECISION,)
    assert config(recipe="block").runs == ("block", HIGH_PRECISION)


@pytest.mark.parametrize("hidden", [64, 128, 512, 768])
def test_the_feed_forward_width_suits_block_scaling(hidden: int):
    width = config(hidden=hidden, heads=hidden // 32).feed_forward
    assert width % 128 == 0
    assert hidden * 8 / 3 <= width < hidden * 8 / 3 + 128


def test_every_recipe_name_has_a_recipe():
    classes = {type(make_recipe(name)) for name in RECIPES if name != "none"}
    assert len(classes) == 5
    assert make_recipe("none") is None


def test_a_checkpoint_keeps_its_config():
    saved = config(seed=5, steps=40)
    assert restore(saved.as_dict(), "auto", {"steps": None, "seed": 5}) == saved


def test_an_option_that_contradicts_the_checkpoint_is_rejected():
    with pytest.raises(
        ValueError,
        match=r"--steps 80 contradicts the checkpoint, which has 40; leave the option out",
    ):
        restore(config(steps=40).as_dict(), "auto", {"steps": 80}, step=39)


def test_more_steps_extend_a_finished_run_only():
    saved = config(steps=40).as_dict()
    assert restore(saved, "auto", {"steps": 80}, step=40) == config(steps=80)
    with pytest.raises(
        ValueError, match=r"--steps 20 contradicts .* a larger number extends a run"
    ):
        restore(saved, "auto", {"steps": 20}, step=40)


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    rates = [learning_rate(step, 100, 1.0) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert max(rates) == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


def test_steps_below_the_resolution_of_bfloat16_add_up():
    weight = torch.nn.Parameter(torch.full((4, 4), 256.0, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight])
    optimizer.adam.param_groups[0]["weight_decay"] = 0.0
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.set_rate(0.1)
        optimizer.step()
    # The spacing of bfloat16 at 256 is 2 above and 1 below: each step of 0.1 alone would round to nothing.
    assert torch.equal(weight, torch.full_like(weight, 254.0))


def test_recipe_names_are_those_of_the_installed_framework():
    assert (*list_recipes(), "none") == RECIPES


@pytest.mark.parametrize(
    ("execution", "changes", "captures"),
    [
        (Execution(), {}, True),
        (Execution(graphs=False), {}, False),
        (Execution(observe=True), {}, False),
        (Execution(offload_layers=1), {}, False),
        (Execution(), {"experts": 4}, False),
        (Execution(), {"device": "cpu"}, False),
        (Execution(graphs=True), {"device": "cpu"}, True),
    ],
)
def test_steps_are_captured_by_default_on_cuda(execution, changes, captures):
    # A RunConfig for CUDA needs a GPU.
    config: Any = SimpleNamespace(**{**resolve("cpu", {}).as_dict(), "device": "cuda", **changes})
    assert execution.captures(config) == captures
