"""Dense layers, MLPs, attention, routers and permutations on eight host devices: loss, gradients and states of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_sharding import printed_by

PROGRAM = Path(__file__).with_name("host_meshes.py")
WAYS = ("with mesh", "set_mesh", "shard_map")


@pytest.fixture(scope="module")
def few() -> dict[str, float]:
    return printed_by(PROGRAM)


@pytest.mark.parametrize("way", WAYS)
def test_a_mesh_computes_what_one_device_does(few, way):
    found = {name: value for name, value in few.items() if name.endswith(way)}
    assert len(found) >= 2 and all(value < 1e-5 for value in found.values()), found


def test_routing_and_permutation_are_among_them(few):
    assert {"router", "balance", "permutation", "attention", "mlp"} == {name.split(",")[0] for name in few}


@pytest.mark.slow
def test_every_function_in_every_mesh_computes_what_one_device_does():
    """Six functions, four meshes entered in two ways, and five in shard_map over two."""
    found = printed_by(PROGRAM, "--all")
    assert len(found) == 6 * 4 * 2 + 5 * 2
    assert all(value < 1e-5 for value in found.values()), found
