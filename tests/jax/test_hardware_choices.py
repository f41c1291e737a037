"""Every cast and product of every recipe has a native backend on each simulated GPU whose hardware has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.jax.hardware_choices import PRODUCTS, choices, table
from transformer_engine.common.hardware import ROWS

NVIDIA = [row for row in ROWS if row.vendor == "nvidia"]
NOT_NATIVE = ("reference", "decoded", "widen", "ragged_dot", "dequantized")


@pytest.mark.parametrize("row", NVIDIA, ids=lambda row: row.architecture)
def test_operations_with_hardware_support_are_not_dequantized(row):
    result = choices(row, True)
    for recipe, (capability, _) in PRODUCTS.items():
        casts = {name: backend for name, backend in result[recipe].items() if "cast" in name}
        assert set(casts.values()) <= {"triton"}, recipe
        slow = {name: backend for name, backend in result[recipe].items() if backend in NOT_NATIVE}
        if row.has(capability):
            assert slow == {}, recipe
        else:
            assert slow, f"{recipe} is not in the table of hardware, but has native backends"


@pytest.mark.parametrize("row", NVIDIA, ids=lambda row: row.architecture)
def test_without_triton_products_with_one_byte_scales_are_left_to_xla_where_the_hardware_has_them(
    row,
):
    result = choices(row, False)
    for recipe in ("mxfp8", "nvfp4"):
        products = {result[recipe][name] for name in ("output", "grad_input", "grad_weight")}
        assert products == {"scaled_matmul" if row.has(PRODUCTS[recipe][0]) else "widen"}


def test_docs_contain_the_backends_of_every_simulated_gpu():
    """Regenerate: PYTHONPATH=. python -m tests.jax.hardware_choices > docs/hardware_jax.json"""
    written = json.loads((Path(__file__).parents[2] / "docs/hardware_jax.json").read_text())
    assert written == table()
