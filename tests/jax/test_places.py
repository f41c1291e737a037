"""Token distribution over devices: rows at offsets, invalid expert indices, missing axes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jax.test_sharding import run_on_eight_devices


@pytest.fixture(scope="module")
def facts() -> dict:
    return run_on_eight_devices(Path(__file__).with_name("host_places.py"))


@pytest.mark.parametrize("dealt", ["ALL_GATHER 1", "ALL_GATHER 2", "RING 1"])
def test_offsets_refer_to_the_sequence_in_its_original_order(facts, dealt):
    assert facts[dealt] < 1e-5


@pytest.mark.parametrize("balanced", [False, True])
def test_context_parallelism_takes_its_axis_from_the_mesh_resource(facts, balanced):
    assert facts[f"resource, balanced={balanced}"] < 1e-5
    assert facts[f"resource, balanced={balanced}, collectives"] > 0
    assert facts["resource, one token"] < 1e-5


def test_an_axis_missing_from_the_mesh_is_rejected(facts):
    for name in ("no axis", "no axis, a layer"):
        assert (
            "context_parallel_axis='tp' is not an axis of the mesh in use, which has ('cp',)"
            in facts[name]
        )


def test_a_manual_axis_is_rejected_by_its_name(facts):
    assert "context_parallel_axis='cp' is manual here, inside shard_map" in facts["manual"]


@pytest.mark.parametrize("what", ["values", "delayed scaling"])
def test_shard_map_adds_gradients_and_merges_states_by_default(facts, what):
    assert facts[what] < 1e-5


@pytest.mark.parametrize("choices", ["below", "all below", "above"])
def test_tokens_with_an_invalid_expert_index_are_not_sent(facts, choices):
    result = facts[choices]
    assert result["difference"] < 1e-5
    assert sum(result["sent"]) == result["real"]


@pytest.mark.parametrize("capacity", [28, 5])
def test_passes_of_dispatch_and_combine_equal_the_gradients_of_jax(facts, capacity):
    result = facts[f"passes, capacity {capacity}"]
    assert len(result) == 6
    assert {name: difference for name, difference in result.items() if not difference < 1e-6} == {}


def test_experts_are_dispatched_inside_shard_map_alone(facts):
    assert "axis='ep' of the EpConfig is not manual here" in facts["outside"]
    assert "axis 'ep' has 2 devices, the placement of experts 4;" in facts["fewer"]


def test_expert_parallelism_takes_its_axis_from_the_mesh_resource(facts):
    assert facts["axis"] == "experts"
