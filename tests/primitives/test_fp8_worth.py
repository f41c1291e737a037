"""Where FP8 is not worthwhile, the reason is a sentence; the measurements behind the fit agree with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from transformer_engine.pytorch.functions.precision import reason_against_fp8

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "cublaslt_h200.json"
KINDS = ("delayed", "current", "block")


@pytest.mark.parametrize("kind", KINDS)
def test_small_layers_stay_in_bfloat16_and_large_ones_do_not(kind):
    assert "save" in (reason_against_fp8(128, 1024, 1024, kind) or "")
    assert reason_against_fp8(8192, 4096, 4096, kind) is None


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_stays_worthwhile_with_more_tokens(kind):
    answers = [
        reason_against_fp8(m, 2048, 2048, kind) is None for m in (128, 512, 2048, 8192, 32768)
    ]
    assert answers == sorted(answers)


@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_is_close_to_the_fastest_measured_step(kind):
    for step in json.loads(MEASURED.read_text())["steps"]:
        quantized = reason_against_fp8(step["tokens"], step["width"], step["width"], kind) is None
        chosen = step[kind] if quantized else step["bf16"]
        assert chosen <= min(step[kind], step["bf16"]) * 1.03 + 0.004, step


def test_a_recipe_that_was_not_measured_is_an_error():
    with pytest.raises(ValueError, match="choose one of delayed, current, block"):
        reason_against_fp8(1, 1, 1, "nvfp4")
