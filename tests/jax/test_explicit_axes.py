"""Gradients over Explicit mesh axes, and eager ones over a mesh, equal one device (eight host devices)."""

from __future__ import annotations

from pathlib import Path

import pytest
from jax.sharding import PartitionSpec

from tests.jax.test_sharding import run_on_eight_devices
from transformer_engine.jax.runtime.explicit_axes import (
    explicit_axes,
    unique_axes,
    with_automatic_axes,
)

PROGRAM = Path(__file__).with_name("host_explicit.py")


@pytest.mark.parametrize("options", [(), pytest.param(("--rest",), marks=pytest.mark.slow)])
def test_meshes_of_every_kind_compute_the_gradients_of_one_device(options):
    result = run_on_eight_devices(PROGRAM, *options)
    assert len(result) == (21 if options else 5)
    assert {name: value for name, value in result.items() if not value < 1e-5} == {}


def test_a_mesh_axis_shards_the_first_axis_that_names_it():
    spec = unique_axes(("dp", ("dp", "tp"), None, ("tp", "ep", "pp"), "dp"))
    assert spec == PartitionSpec("dp", "tp", None, ("ep", "pp"), None)


def test_without_explicit_axes_a_function_is_called_directly():
    assert explicit_axes() == ()
    assert with_automatic_axes(lambda *args: args, 1, 2, out=pytest.fail) == (1, 2)
