"""`te info` reports the choices that the tables of backends make."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from tests.support.command import te as run_te
from transformer_engine.common import optional
from transformer_engine.common.dispatch import interventions, tables
from transformer_engine.common.hardware import NO_GPU, Hardware, nvidia
from transformer_engine_tools.demo.config import RECIPES
from transformer_engine_tools.machine import _row, fp8_route, jax_machine
from transformer_engine_tools.survey import Survey, survey


@pytest.fixture(scope="module")
def survey_result() -> Survey:
    return survey("cuda" if torch.cuda.is_available() else "cpu")


def test_json_has_the_documented_keys():
    result = run_te("info", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert set(report) == {"machine", "recipes", "operations", "unused_operations"}
    assert set(report["machine"]) == {
        "version",
        "python",
        "device",
        "capability",
        "hardware",
        "memory",
        "libraries",
        "jax",
    }
    assert set(report["machine"]["jax"]) == {"versions", "devices", "fp8"}
    assert report["machine"]["libraries"]["torch"] == torch.__version__
    assert [entry["recipe"] for entry in report["recipes"]] == list(RECIPES)
    for operation in report["operations"]:
        assert set(operation) == {"operation", "recipes", "chosen", "backends"}
        for backend in operation["backends"]:
            assert set(backend) == {"backend", "reason", "chosen"}


def test_the_readable_form_names_every_recipe_and_operation(survey_result: Survey):
    result = run_te("info")
    assert result.exit_code == 0, result.output
    for report in survey_result.recipes:
        assert report.recipe in result.output
    for finding in survey_result.findings:
        assert finding.operation in result.output
    assert "compute capability" in result.output
    assert "info --why prints" in result.output and "lower priority" not in result.output


def test_the_reasons_and_unused_operations_are_printed_on_request():
    result = run_te("info", "--why")
    assert result.exit_code == 0, result.output
    assert "why the others are not used" in result.output
    assert "operations that a TransformerLayer does not use" in result.output


def test_one_backend_is_chosen_and_the_others_have_reasons(survey_result: Survey):
    for finding in survey_result.findings:
        assert {verdict.backend for verdict in finding.verdicts} == set(
            tables[finding.operation].names()
        )
        assert sum(verdict.chosen for verdict in finding.verdicts) == 1
        assert all(verdict.chosen or verdict.reason for verdict in finding.verdicts)


def test_every_table_is_either_used_or_listed_as_unused(survey_result: Survey):
    assert {finding.operation for finding in survey_result.findings} | set(
        survey_result.unused
    ) == set(tables)
    assert {"gemm", "quantize", "norm", "activation"} <= {
        finding.operation for finding in survey_result.findings
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
def test_without_a_gpu_every_quantized_recipe_is_emulated(survey_result: Survey):
    status = {report.recipe: report.status for report in survey_result.recipes}
    assert status.pop("none") == "native"
    assert set(status.values()) == {"emulated"}


def test_the_survey_leaves_the_tables_as_they_were(survey_result: Survey):
    assert survey_result.findings and not interventions


def test_jax_has_its_versions_its_devices_and_its_fp8_products():
    jax = pytest.importorskip("jax")
    described = jax_machine()
    assert described.versions["jax"] == jax.__version__ and set(described.versions) == {
        "jax",
        "jaxlib",
        "flax",
    }
    assert all(device.device_kind in described.devices for device in jax.devices())
    assert "--xla_gpu_enable_triton_gemm is" in described.fp8


def test_missing_jax_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optional, "installed", lambda module: False)
    described = jax_machine()
    assert described.devices == 'not installed; pip install ".[jax]" in a checkout of this package'
    assert not described.versions and not described.fp8


def test_the_row_of_the_hardware_names_gpus_and_capabilities():
    text = _row(asdict(nvidia(12, 0)))
    assert text.startswith("nvidia 12.0 (RTX 5090, ") and "mxfp8 products" in text
    assert "treated as 12.1" in _row(asdict(nvidia(12, 3)))
    assert _row({}) == "none: operations run on the CPU"


@pytest.mark.parametrize(
    ("row", "value", "words"),
    [
        (NO_GPU, None, "reference, in float32 on the CPU; --flag is not set"),
        (nvidia(8, 0), None, "compute capability 8.0 has no fp8 products"),
        (nvidia(9, 0), "false", "scaled: cuBLASLt multiplies by the scales; --flag is false"),
        (nvidia(9, 0), None, "set XLA_FLAGS=--flag=false"),
        (nvidia(9, 0), "true", "direct: scales are applied after cuBLASLt; --flag is true"),
    ],
)
def test_fp8_products_of_jax_depend_on_the_gpu_and_the_flag(
    row: Hardware, value: str | None, words: str
):
    assert words in fp8_route(row, "flag", value)
