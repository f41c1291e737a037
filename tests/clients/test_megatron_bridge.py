"""Megatron-Bridge as published runs on this engine, on a CPU: models of its providers, LoRA, checkpoint conversion."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.processes import output
from tests.support.programs import ROOT

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.bridge") is None,
        reason="megatron-bridge is not installed; `make test-clients` installs it",
    ),
]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    script = Path(__file__).parent / "megatron_bridge_cases.py"
    return json.loads(output([str(script)], ROOT).splitlines()[-1])


def case_result(results: dict[str, Any], case: str) -> Any:
    """One case's result; fails with its traceback if it raised."""
    assert not isinstance(results[case], str), results[case]
    return results[case]


@pytest.mark.parametrize("case", ["float32", "fp8", "full layer", "full layer fp8"])
def test_a_model_of_a_provider_trains(results, case):
    first, *_, last = case_result(results, f"train {case}")
    assert last < first - 0.3


def test_lora_trains_alike_by_modules_and_by_operations(results):
    losses = case_result(results, "lora")
    for before, first, *_, last in losses.values():
        assert first == pytest.approx(before, abs=1e-6) and last < first - 0.02
    assert losses["True"] == pytest.approx(losses["False"], abs=1e-3)


def test_a_checkpoint_of_hugging_face_is_converted_both_ways(results):
    converted = case_result(results, "convert")
    assert converted["largest"] > 1.0 and converted["error"] < 1e-4 * converted["largest"]
    assert converted["equal"]
