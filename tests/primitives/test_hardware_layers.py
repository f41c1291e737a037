"""Training steps of layers on every simulated GPU: each operation has a native backend where the hardware has one."""

from __future__ import annotations

import json

import pytest

from tests.primitives.hardware_choices import LIBRARIES, PRODUCTS
from tests.primitives.hardware_layers import LAYERS, RECIPES, choices_on
from tests.support.programs import ROOT
from transformer_engine.common.hardware import ROWS, Hardware

NVIDIA = {row.architecture: row for row in ROWS if row.vendor == "nvidia"}
NOT_NATIVE = {"reference", "widen", "emulated"}
# One row of each generation; every row takes a process of seconds.
COVER = (("8.0", True), ("8.9", False), ("10.0", True), ("12.0", True), ("12.1", False))
EVERY = [(architecture, libraries) for architecture in NVIDIA for libraries in (True, False)]
# A recipe's products in the table of products.
FORMATS = {"delayed": "float8", "current": "float8"}


def needed(row: Hardware, libraries: bool, operation: str, recipe: str) -> bool:
    """Whether the hardware, with these libraries, has an operation of a recipe."""
    if operation in ("gemm", "grouped_gemm"):
        return row.has(PRODUCTS[FORMATS.get(recipe, recipe)][0])
    if operation == "fp8_attention":
        formats = {"delayed": "cudnn fp8 attention", "current": "cudnn fp8 attention"}
        return libraries and recipe in formats and row.has("cudnn fp8 attention")
    return True


@pytest.mark.parametrize(
    ("architecture", "libraries"),
    [pytest.param(*case, marks=[] if case in COVER else pytest.mark.slow) for case in EVERY],
)
def test_every_operation_of_a_training_step_is_native_where_the_hardware_has_it(architecture, libraries):
    row = NVIDIA[architecture]
    found = choices_on(architecture, libraries)
    assert found.keys() == LAYERS.keys()
    for layer, of_layer in found.items():
        assert layer.endswith("fp8_dpa") or of_layer.keys() == RECIPES.keys()
        for recipe, passes in of_layer.items():
            for name, operations in passes.items():
                slow = {
                    operation
                    for operation, backends in operations.items()
                    if NOT_NATIVE & set(backends.split(", ")) and needed(row, libraries, operation, recipe)
                }
                assert slow == set(), (layer, recipe, name)
    # Regenerate: PYTHONPATH=. python -m tests.primitives.hardware_choices > docs/hardware.json
    name = next(name for name, installed in LIBRARIES.items() if installed is libraries)
    assert json.loads((ROOT / "docs/hardware.json").read_text())[architecture]["layers"][name] == found


def test_documented_layers_contain_every_simulated_gpu():
    written = json.loads((ROOT / "docs/hardware.json").read_text())
    assert written.keys() == NVIDIA.keys()
    for of_row in written.values():
        assert of_row["layers"].keys() == LIBRARIES.keys()
        for layers in of_row["layers"].values():
            assert layers.keys() == LAYERS.keys()
            steps = [passes for of_layer in layers.values() for passes in of_layer.values()]
            assert all(passes["forward"] for passes in steps)
            operations = {name for passes in steps for of_pass in passes.values() for name in of_pass}
            assert operations >= {"norm", "quantize", "gemm", "attention", "activation", "grouped_gemm"}
