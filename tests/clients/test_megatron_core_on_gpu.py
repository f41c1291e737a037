"""Megatron-core as published trains on this engine on a GPU, by its own schedule, data parallelism and optimizer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import processes

CASES = str(Path(__file__).parent / "megatron_gpu_cases.py")
EMULATED = ("mxfp8", "nvfp4")  # uses bfloat16 products if the hardware lacks the format

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.clients,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.core") is None,
        reason="megatron-core is not installed; `make test-clients` installs it",
    ),
]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def case_result(case: str, ranks: int = 1) -> Any:
    """Run a case in separate processes and return its printed result."""
    emulation = {"TE_EMULATE": "1"} if case.endswith(EMULATED) else {}
    said = processes.once([CASES, case], ranks, **emulation)
    return json.loads(said.splitlines()[-1])


def assert_trains(losses: list[float]) -> None:
    assert losses[-1] < losses[0] - 0.5, losses


def assert_alike(actual: list[float], expected: list[float], tolerance: float) -> None:
    assert actual == pytest.approx(expected, abs=tolerance)


def test_a_model_is_made_of_this_engine_s_layers():
    counts = {"LayerNormLinear": 2, "Linear": 2, "GroupedLinear": 4, "DotProductAttention": 2}
    assert case_result("layers") == counts


@pytest.mark.parametrize("recipe", ["bfloat16", "delayed", "tensorwise", "blockwise", *EMULATED])
def test_a_model_trains(recipe):
    losses = case_result(f"train {recipe}")
    assert_trains(losses)
    if recipe != "bfloat16":
        plain = case_result("train bfloat16")
        assert losses[0] != plain[0]  # it does quantize
        assert losses[0] == pytest.approx(plain[0], abs=0.02)


@pytest.mark.parametrize("recipe", ["bfloat16", "delayed"])
def test_gated_layers_with_grouped_heads_train(recipe):
    assert_trains(case_result(f"llama {recipe}"))


@pytest.mark.parametrize("recipe", ["bfloat16", "delayed", "tensorwise", "blockwise", *EMULATED])
def test_a_model_of_the_op_fuser_trains(recipe):
    result = case_result(f"op fuser {recipe}")
    assert result["chains"] == 2
    assert_trains(result["losses"])
    assert_alike(result["losses"][:1], case_result(f"train {recipe}")[:1], 0.01)


@pytest.mark.parametrize("recipe", ["bfloat16", "delayed"])
def test_a_gated_model_of_the_op_fuser_trains(recipe):
    result = case_result(f"op fuser llama {recipe}")
    assert result["chains"] == 2
    assert_trains(result["losses"])
    assert_alike(result["losses"][:1], case_result(f"llama {recipe}")[:1], 0.01)


# Losses after several steps differ more than gradients do: six steps of this learning rate enlarge roundings.
@pytest.mark.parametrize(
    "model",
    [
        "bfloat16",
        "delayed",
        "tensorwise",
        "blockwise",
        *EMULATED,
        "llama bfloat16",
        "llama delayed",
    ],
)
def test_gradients_of_the_op_fuser_are_as_exact_as_those_of_modules(model):
    errors = case_result(f"gradients of the op fuser {model}")
    if model.endswith("bfloat16"):
        assert errors["operations against modules"] < 2**-7
    else:
        assert 0 < errors["operations against bfloat16"] < 1.1 * errors["modules against bfloat16"]


@pytest.mark.parametrize("recipe", ["bfloat16", "delayed"])
def test_recomputation_changes_no_loss(recipe):
    assert_alike(case_result(f"recompute {recipe}"), case_result(f"train {recipe}"), 1e-3)


def test_this_engine_s_cross_entropy_is_megatron_s():
    assert_alike(case_result("cross entropy"), case_result("train bfloat16"), 0.02)


def test_this_engine_s_rotary_embedding_is_megatron_s():
    result = case_result("rope fusion")
    plain, fused = result["losses"]
    assert fused == pytest.approx(plain, abs=5e-3)
    assert result["gradient"] < 0.03


@pytest.mark.parametrize("recipe", ["bfloat16", "delayed"])
def test_the_distributed_optimizer_is_the_plain_one(recipe):
    assert_alike(case_result(f"distributed {recipe}"), case_result(f"train {recipe}"), 0.02)


@pytest.mark.parametrize("case", ["overlapped", "precision-aware", "fused accumulation"])
def test_options_of_the_optimizer_change_little(case):
    assert_alike(case_result(case), case_result("train bfloat16"), 0.05)


@pytest.mark.parametrize(
    "recipe, kind",
    [
        ("delayed", "Float8Tensor"),
        ("tensorwise", "Float8Tensor"),
        ("blockwise", "Float8BlockwiseQTensor"),
    ],
)
def test_fp8_parameters_train_as_bfloat16_ones(recipe, kind):
    result = case_result(f"parameters {recipe}")
    assert result["kinds"] == [kind]
    assert_alike(result["losses"], case_result(f"train {recipe}"), 0.02)


@pytest.mark.parametrize("whose", ["the engine", "megatron"])
@pytest.mark.parametrize("recipe", ["bfloat16", "delayed", "tensorwise", "blockwise"])
def test_graphs_train_as_plain_layers(whose, recipe):
    assert_alike(case_result(f"graphs of {whose} {recipe}"), case_result(f"train {recipe}"), 0.05)


def test_fused_router_and_permutation_are_megatron_s():
    assert_alike(case_result("experts bfloat16"), case_result("experts plain"), 0.05)


@pytest.mark.parametrize("recipe", ["bfloat16", "delayed", "tensorwise", "blockwise"])
def test_four_experts_train(recipe):
    assert_trains(case_result(f"experts {recipe}"))


@pytest.mark.parametrize("recipe", ["bfloat16", "delayed"])
def test_multi_latent_attention_trains(recipe):
    assert_trains(case_result(f"latent {recipe}"))


def test_a_distributed_checkpoint_continues():
    result = case_result("checkpoint")
    assert_alike(result["found"], result["expected"], 1e-3)


@two
@pytest.mark.parametrize("recipe", ["bfloat16", "delayed", "blockwise"])
def test_two_gpus_train_a_tensor_parallel_model(recipe):
    assert_trains(case_result(f"two tensor-parallel {recipe}", 2))


@two
def test_two_gpus_share_fp8_parameters():
    assert_alike(
        case_result("two data-parallel parameters", 2)["losses"], case_result("train delayed"), 0.02
    )


@two
def test_two_gpus_hold_two_experts_each():
    assert_trains(case_result("two expert-parallel", 2))


@two
def test_two_gpus_continue_from_a_distributed_checkpoint():
    result = case_result("two data-parallel checkpoint", 2)
    assert_alike(result["found"], result["expected"], 1e-3)
