"""Layers' training steps on every simulated GPU: each operation is native where the hardware has it."""

from __future__ import annotations

import json

import pytest

from tests.primitives.hardware_choices import PRODUCTS, SIMULATIONS
from tests.primitives.hardware_layers import LAYERS, RECIPES, Choices, run_choices
from tests.support.programs import ROOT
from transformer_engine.common.hardware import ROWS, Hardware
from transformer_engine.pytorch.primitives.gemm import DEQUANTIZING

NVIDIA = {row.architecture: row for row in ROWS if row.vendor == "nvidia"}
NOT_NATIVE = {*DEQUANTIZING, "emulated"}
LIBRARIES, ALONE, TESTED = SIMULATIONS
# One row per generation; every row takes a process that runs for seconds.
COVER = (("8.0", LIBRARIES), ("8.9", ALONE), ("10.0", TESTED), ("12.0", LIBRARIES))
EVERY = [(architecture, name) for architecture in NVIDIA for name in SIMULATIONS]
# A recipe's products in the product table.
FORMATS = {"delayed": "float8", "current": "float8"}
# Triton before the first release with native MXFP8 and NVFP4 products: libraries multiply them.
OLDER = [row for row in NVIDIA.values() if row.triton < row.scaled_dot]


def is_native_in_hardware(row: Hardware, simulation: str, operation: str, recipe: str) -> bool:
    """Whether the hardware, with a simulation's libraries, supports a recipe's operation."""
    if operation in ("gemm", "grouped_gemm"):
        return row.has(PRODUCTS[FORMATS.get(recipe, recipe)][0])
    if operation == "fp8_attention":
        if recipe == "mxfp8":
            return simulation == TESTED and row.has("cudnn mxfp8 attention")
        return simulation != ALONE and row.has("cudnn fp8 attention")
    return True


def assert_native(row: Hardware, simulation: str, result: Choices) -> None:
    """Check that no layer operation that the hardware has is emulated."""
    assert result.keys() == LAYERS.keys()
    for layer, of_layer in result.items():
        assert layer.endswith("fp8_dpa") or of_layer.keys() == RECIPES.keys()
        for recipe, passes in of_layer.items():
            assert passes.keys() == {"forward", "backward"} and passes["forward"]
            for name, operations in passes.items():
                slow = {
                    operation
                    for operation, backends in operations.items()
                    if NOT_NATIVE & set(backends.split(", "))
                    and is_native_in_hardware(row, simulation, operation, recipe)
                }
                assert slow == set(), (layer, recipe, name)


@pytest.mark.parametrize(
    ("architecture", "simulation"),
    [pytest.param(*case, marks=[] if case in COVER else pytest.mark.slow) for case in EVERY],
)
def test_every_training_step_operation_is_native_if_the_hardware_has_it(architecture, simulation):
    result = run_choices(architecture, *SIMULATIONS[simulation])
    assert_native(NVIDIA[architecture], simulation, result)
    # Regenerate: PYTHONPATH=. python -m tests.primitives.hardware_choices > docs/hardware.json
    assert (
        json.loads((ROOT / "docs/hardware.json").read_text())[architecture]["layers"][simulation]
        == result
    )


def test_every_documented_layer_is_native_if_the_hardware_has_it():
    written = json.loads((ROOT / "docs/hardware.json").read_text())
    for architecture, of_row in written.items():
        for simulation, result in of_row["layers"].items():
            assert_native(NVIDIA[architecture], simulation, result)


@pytest.mark.parametrize("row", OLDER, ids=lambda row: row.architecture)
@pytest.mark.parametrize("simulation", [pytest.param(LIBRARIES, marks=pytest.mark.slow), ALONE])
def test_libraries_multiply_where_the_oldest_triton_has_no_native_product(row, simulation):
    oldest = ".".join(map(str, row.triton))
    result = run_choices(row.architecture, *SIMULATIONS[simulation], "--triton", oldest)
    assert_native(row, simulation, result)
    for of_layer in result.values():
        for recipe in of_layer.keys() & {"mxfp8", "nvfp4"}:
            for operations in of_layer[recipe].values():
                backends = [
                    operations[name] for name in ("gemm", "grouped_gemm") if name in operations
                ]
                assert not any("triton" in backend for backend in backends), recipe


def test_documented_layers_contain_every_simulated_gpu():
    written = json.loads((ROOT / "docs/hardware.json").read_text())
    assert written.keys() == NVIDIA.keys()
    for of_row in written.values():
        assert of_row["layers"].keys() == SIMULATIONS.keys()
        for layers in of_row["layers"].values():
            assert layers.keys() == LAYERS.keys()
            steps = [passes for of_layer in layers.values() for passes in of_layer.values()]
            assert all(passes["forward"] for passes in steps)
            operations = {
                name for passes in steps for of_pass in passes.values() for name in of_pass
            }
            assert operations >= {
                "norm",
                "quantize",
                "gemm",
                "attention",
                "activation",
                "grouped_gemm",
            }
