"""Gradients over Explicit mesh axes, and eager ones over a mesh, equal those of one device; on eight host devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from jax.sharding import PartitionSpec

from tests.jax.test_sharding import printed_by
from transformer_engine.jax.explicit_axes import distinct, explicit_axes, with_automatic_axes

PROGRAM = Path(__file__).with_name("host_explicit.py")


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    return printed_by(PROGRAM)


@pytest.mark.parametrize("group", ["Explicit", "eager", "Auto", "AxisType", "mixed", "keys"])
def test_meshes_of_every_kind_compute_the_gradients_of_one_device(differences, group):
    found = {name: value for name, value in differences.items() if name.startswith(group)}
    assert found and all(value < 1e-5 for value in found.values()), found


def test_a_mesh_axis_shards_the_first_axis_that_names_it():
    spec = distinct(("dp", ("dp", "tp"), None, ("tp", "ep", "pp"), "dp"))
    assert spec == PartitionSpec("dp", "tp", None, ("ep", "pp"), None)


def test_without_explicit_axes_a_function_is_called_as_it_is():
    assert explicit_axes() == ()
    assert with_automatic_axes(lambda *args: args, 1, 2, out=pytest.fail) == (1, 2)
