"""Dense layers, MLPs, attention, routers and permutations on eight host devices: loss, gradients and states of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jax.test_sharding import run_on_eight_devices
from tests.support.tolerances import EQUAL_CODES_OVER_DEVICES

PROGRAM = Path(__file__).with_name("host_meshes.py")
WAYS = ("with mesh", "set_mesh", "shard_map")


@pytest.fixture(scope="module")
def few() -> dict[str, float]:
    return run_on_eight_devices(PROGRAM)


@pytest.mark.parametrize("way", WAYS)
def test_a_sampled_mesh_equals_one_device(few, way):
    results = {name: value for name, value in few.items() if name.endswith(way)}
    assert len(results) >= 2 and all(value < 1e-5 for value in results.values()), results


def test_the_sample_has_routing_and_permutation(few):
    functions = {name.split(",")[0] for name in few}
    assert {"router", "balance", "permutation", "attention", "mlp"} == {
        f for f in functions if " in " not in f
    }


def test_the_sample_has_block_recipes_with_blocks_split_over_devices(few):
    """Operands are inputs, not computed: their codes equal the one-device codes in every layout."""
    results = {name: value for name, value in few.items() if " in " in name}
    assert {name.split(",")[0] for name in results} == {
        f"dense in {one}" for one in ("mxfp8", "nvfp4", "block")
    }
    assert all(value < EQUAL_CODES_OVER_DEVICES for value in results.values()), results


@pytest.mark.slow
def test_every_function_on_every_mesh_equals_one_device():
    """Nine functions, five meshes entered in two ways, and five in shard_map over two."""
    result = run_on_eight_devices(PROGRAM, "--all")
    assert len(result) == 9 * 5 * 2 + 5 * 2
    assert all(value < 1e-5 for value in result.values()), result
