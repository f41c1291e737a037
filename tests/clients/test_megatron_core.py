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
LOSSES = ("float32", "bfloat16", "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4", "fp8_parameters", "llama",
          "qk_layernorm", "op_fuser", "op_fuser_llama", "op_fuser_fp8", "cross_entropy")  # fmt: skip
PARALLEL = ("context p2p", "context all_gather", "context a2a", "context p2p, own attention", "tensor",
            "tensor and sequence", "pipeline", "experts allgather", "experts alltoall", "experts ncclep")  # fmt: skip

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
        reason="megatron-core is not installed; `make test-clients` installs it",
    ),
]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(output([str(HERE / "megatron_cases.py")], ROOT).splitlines()[-1])


def of(results: dict[str, Any], case: str) -> Any:
    """Return the result of a case; fail with its traceback if it raised."""
    assert not isinstance(results[case], str), results[case]
    return results[case]


def test_every_feature_of_the_engine_is_found(results):
    """Except for the features that docs/megatron.md explains."""
    assert len(of(results, "flags")) > 30
    absent = {name for name, there in of(results, "flags").items() if not there}
    asks_for_cuda = set() if torch.cuda.is_available() else {"dist_checkpointing.strategies.torch HAVE_TE"}
    assert absent == asks_for_cuda


@pytest.mark.parametrize("case", LOSSES)
def test_a_model_trains(results, case):
    first, *_, last = of(results, f"train {case}")
    assert last < first - 0.5


@pytest.mark.parametrize("case", ["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_a_recipe_begins_where_high_precision_does(results, case):
    assert of(results, f"train {case}")[0] == pytest.approx(of(results, "train bfloat16")[0], abs=5e-3)
    assert of(results, f"train {case}")[0] != of(results, "train bfloat16")[0]  # it does quantize


def test_the_operation_fuser_gives_the_losses_of_modules(results):
    for fused, modules in (("op_fuser", "float32"), ("op_fuser_llama", "llama"), ("op_fuser_fp8", "delayed")):
        bound = (
            2e-2 if fused == "op_fuser_fp8" else 1e-3
        )  # codes next to a tie move with the rounding of a bias
        assert of(results, f"train {fused}") == pytest.approx(of(results, f"train {modules}"), abs=bound)


def test_this_engine_s_cross_entropy_is_megatron_s(results):
    assert of(results, "train cross_entropy") == pytest.approx(of(results, "train float32"), abs=1e-5)


def test_this_engine_s_optimizer_is_adamw(results):
    assert of(results, "fused_adam") == pytest.approx(of(results, "train float32"), abs=1e-3)


def test_recomputation_changes_no_bit(results):
    assert of(results, "recomputed") is True


@pytest.mark.parametrize("case", ["float32", "llama", "qk_layernorm", "of a T5"])
def test_our_attention_in_the_layer_spec_gives_megatron_s_logits_and_gradients(results, case):
    differences = of(results, f"own attention {case}")
    assert differences["logits"] <= 1e-6
    assert differences["gradients"] <= 1e-6


@pytest.mark.parametrize("case", ["own generation", "own dynamic generation"], ids=["static", "dynamic"])
def test_generation_with_megatron_s_contexts_is_the_full_computation(results, case):
    assert of(results, case) <= 1e-5


def test_extra_states_that_name_megatron_s_loader_are_loaded(results):
    assert of(results, "extra_states") == {"named": True, "same": True}


def test_a_distributed_checkpoint_comes_back(results):
    assert of(results, "distributed_checkpoint") is True


@pytest.mark.parametrize("case", ["permutation", "router"])
def test_fused_parts_of_experts_are_megatron_s_own(results, case):
    for name, difference in of(results, case).items():
        assert difference <= 1e-6, name


def test_no_layer_has_an_attribute_that_data_parallelism_empties(results):
    assert of(results, "public_attributes") == []


def test_the_example_of_the_page_runs(results):
    assert of(results, "example") == {"errors": ""}


@pytest.mark.parametrize("case", PARALLEL)
def test_two_ranks_compute_what_one_rank_computes(case):
    said = once([str(HERE / "megatron_parallel_cases.py")], 1)
    for name, difference in of(json.loads(said.splitlines()[-1]), case).items():
        assert difference <= 1e-5, name
