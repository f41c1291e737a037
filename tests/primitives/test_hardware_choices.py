"""Every product of every recipe has a native backend on each simulated GPU whose tensor cores have the product."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.primitives.hardware_choices import PRODUCTS, choices, table
from transformer_engine.common.hardware import ROWS
from transformer_engine.pytorch.primitives.gemm import DEQUANTIZING

NVIDIA = [row for row in ROWS if row.vendor == "nvidia"]


@pytest.mark.parametrize("libraries", [True, False], ids=["nvmath", "torch and triton"])
@pytest.mark.parametrize("row", NVIDIA, ids=lambda row: row.architecture)
def test_no_product_that_the_hardware_has_is_dequantized(row, libraries):
    result = choices(row, libraries)
    for recipe, (capability, _) in PRODUCTS.items():
        slow = {
            name: backend for name, backend in result[recipe].items() if backend in DEQUANTIZING
        }
        if row.has(capability):
            assert slow == {}, recipe
        else:
            assert slow, f"{recipe} is not in the table of hardware, but has native backends"
            dense = {
                name: backend for name, backend in slow.items() if not name.startswith("grouped")
            }
            assert "reference" not in dense.values(), recipe  # groups are a loop of these products


def test_docs_contain_the_backends_of_every_simulated_gpu():
    """Regenerate: PYTHONPATH=. python -m tests.primitives.hardware_choices > docs/hardware.json"""
    written = json.loads((Path(__file__).parents[2] / "docs/hardware.json").read_text())
    products = {
        row: {name: result for name, result in of_row.items() if name != "layers"}
        for row, of_row in written.items()
    }
    assert products == table()
