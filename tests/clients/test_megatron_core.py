"""Megatron-core as published runs on this engine, on a CPU: models, parts of experts, checkpoints, our attention."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.processes import once, output
from tests.support.programs import ROOT

HERE = Path(__file__).parent
LOSSES = (
    "float32",
    "bfloat16",
    "delayed",
    "tensorwise",
    "blockwise",
    "mxfp8",
    "nvfp4",
    "fp8_parameters",
    "llama",
    "qk_layernorm",
    "op_fuser",
    "op_fuser_llama",
    "op_fuser_fp8",
    "cross_entropy",
)
PARALLEL = (
    "context p2p",
    "context all_gather",
    "context a2a",
    "context p2p, own attention",
    "tensor",
    "tensor and sequence",
    "pipeline",
    "experts allgather",
    "experts alltoall",
    "experts ncclep",
)

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.core") is None,
        reason="megatron-core is not installed; `make test-clients` installs it",
    ),
]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(output([str(HERE / "megatron_cases.py")], ROOT).splitlines()[-1])


def case_result(results: dict[str, Any], case: str) -> Any:
    """One case's result; fails with its traceback if it raised."""
    assert not isinstance(results[case], str), results[case]
    return results[case]


def test_every_feature_of_the_engine_is_found(results):
    """Except for the features that docs/megatron.md explains."""
    assert len(case_result(results, "flags")) > 30
    absent = {name for name, remote in case_result(results, "flags").items() if not remote}
    asks_for_cuda = (
        set() if torch.cuda.is_available() else {"dist_checkpointing.strategies.torch HAVE_TE"}
    )
    assert absent == asks_for_cuda


@pytest.mark.parametrize("case", LOSSES)
def test_a_model_trains(results, case):
    first, *_, last = case_result(results, f"train {case}")
    assert last < first - 0.5


@pytest.mark.parametrize("case", ["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_a_recipe_begins_where_high_precision_does(results, case):
    assert case_result(results, f"train {case}")[0] == pytest.approx(
        case_result(results, "train bfloat16")[0], abs=5e-3
    )
    # it does quantize
    assert case_result(results, f"train {case}")[0] != case_result(results, "train bfloat16")[0]


def test_the_operation_fuser_gives_the_losses_of_modules(results):
    for fused, modules in (
        ("op_fuser", "float32"),
        ("op_fuser_llama", "llama"),
        ("op_fuser_fp8", "delayed"),
    ):
        # codes next to a tie move with a bias's rounding
        bound = 2e-2 if fused == "op_fuser_fp8" else 1e-3
        assert case_result(results, f"train {fused}") == pytest.approx(
            case_result(results, f"train {modules}"), abs=bound
        )


def test_engine_cross_entropy_equals_megatron(results):
    assert case_result(results, "train cross_entropy") == pytest.approx(
        case_result(results, "train float32"), abs=1e-5
    )


def test_the_engine_optimizer_equals_adamw(results):
    assert case_result(results, "fused_adam") == pytest.approx(
        case_result(results, "train float32"), abs=1e-3
    )


def test_recomputation_changes_no_bit(results):
    assert case_result(results, "recomputed") is True


@pytest.mark.parametrize("case", ["float32", "llama", "qk_layernorm", "of a T5"])
def test_our_attention_in_the_layer_spec_gives_megatron_s_logits_and_gradients(results, case):
    differences = case_result(results, f"own attention {case}")
    assert differences["logits"] <= 1e-6
    assert differences["gradients"] <= 1e-6


@pytest.mark.parametrize(
    "case", ["own generation", "own dynamic generation"], ids=["static", "dynamic"]
)
def test_generation_with_megatron_contexts_equals_the_full_pass(results, case):
    assert case_result(results, case) <= 1e-5


def test_extra_states_that_name_megatron_s_loader_are_loaded(results):
    assert case_result(results, "extra_states") == {"named": True, "same": True}


def test_a_distributed_checkpoint_round_trips(results):
    assert case_result(results, "distributed_checkpoint") is True


@pytest.mark.parametrize("case", ["permutation", "router"])
def test_fused_expert_functions_equal_megatron(results, case):
    for name, difference in case_result(results, case).items():
        assert difference <= 1e-6, name


def test_layers_have_no_attribute_that_data_parallelism_empties(results):
    assert case_result(results, "public_attributes") == []


def test_the_example_of_the_page_runs(results):
    assert case_result(results, "example") == {"errors": ""}


@pytest.mark.parametrize("case", PARALLEL)
def test_two_ranks_compute_what_one_rank_computes(case):
    said = once([str(HERE / "megatron_parallel_cases.py")], 1)
    for name, difference in case_result(json.loads(said.splitlines()[-1]), case).items():
        assert difference <= 1e-5, name
