"""A training step over two processes of jax.distributed against one device, printed as JSON.

host_processes.py ADDRESS RANK
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import transformer_engine.jax as te
from tests.jax.compiled import compile_quickly, draw_variables
from tests.jax.host_devices import RECIPE, Block, difference, step


def main(address: str, rank: int) -> None:
    """Print the largest relative differences in gradients and in the delayed-scaling state."""
    compile_quickly(True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    model = Block()
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    x[7] *= 5.0  # the largest element is on the second process
    with te.autocast(enabled=True, recipe=RECIPE):
        state = jax.tree.map(np.asarray, draw_variables(model, x))
        params = state.pop("params")
        expected = jax.jit(lambda *arrays: step(model, *arrays))(x, params, state)
    mesh = Mesh(np.array(jax.devices()), ("dp",), axis_types=(AxisType.Auto,))
    resource = te.MeshResource(dp_resource="dp")
    with jax.set_mesh(mesh), te.autocast(enabled=True, recipe=RECIPE, mesh_resource=resource):
        full = NamedSharding(mesh, PartitionSpec())
        sharded = NamedSharding(mesh, PartitionSpec("dp"))
        rows = jax.make_array_from_process_local_data(sharded, x[4 * rank : 4 * rank + 4])
        placed = [
            jax.tree.map(lambda leaf: jax.device_put(leaf, full), tree) for tree in (params, state)
        ]
        actual = jax.jit(lambda *arrays: step(model, *arrays), out_shardings=full)(rows, *placed)
    print(
        json.dumps(
            {
                "processes": jax.process_count(),
                "devices": te.sharding.num_of_devices(),
                "rows here": sum(shard.data.shape[0] for shard in rows.addressable_shards),
                "loss": difference(actual[0], expected[0]),
                "gradients": difference(actual[1][0], expected[1][0]),
                "state": difference(actual[1][1], expected[1][1]),
                "states": len(jax.tree.leaves(expected[1][1])),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
