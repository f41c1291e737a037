"""Mixtures of experts over devices have the same codes, state and gradients as on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_unboxed_variables, ones
from tests.jax.host_compositions import create_mesh
from tests.jax.host_experts import RECIPES, experts_case, tokens_in_whole_blocks
from tests.jax.test_sharding import PROGRAM, run_on_eight_devices, run_on_host_devices
from transformer_engine.common import recipe
from transformer_engine.jax.primitives import launching

SUMS = 1e-5  # float32 sums in another order; one code that differs is 1e-2 of an element
QUANTIZED = [name for name, settings in RECIPES.items() if settings is not None]


@pytest.fixture(scope="module")
def results() -> dict:
    return run_on_eight_devices(PROGRAM.with_name("host_experts.py"))


def assert_one_device(
    case: dict, gradients: float = SUMS, states_of_gradients: float = 0.0
) -> None:
    assert case["state"] == 0.0
    assert case["state of gradients"] <= states_of_gradients
    assert case["y"] < SUMS and case["dx"] < SUMS and case["gradients"] < gradients, case
    assert case["received"] == case["slots"]


def test_experts_on_eight_devices_equal_experts_on_one_device(results):
    """Kernels are sharded over a third axis, `with mesh:` enters the mesh, and each device has two tokens.

    The slow test for every recipe checks bitwise-equal states and routing by gates. The next test checks
    bitwise-equal codes and states per shard.
    """
    # The experts' gradients have the routing probabilities as factors. These come from a product in float32, whose
    # sums may have another order where a device has fewer rows.
    assert_one_device(results["few tokens: delayed"], states_of_gradients=SUMS)


@pytest.mark.parametrize("case", ["delayed dgrad", "current x", "nvfp4 x"])
def test_sharded_codes_and_states_are_bitwise_equal_to_unsharded_ones(results, case):
    assert results[f"codes: {case}"] == {"unequal": 0}


def test_a_step_on_a_mesh_with_an_additional_axis_uses_gpu_kernels(results):
    if (reason := launching.kernels_unsupported_reason()) is not None:
        pytest.skip(f"no kernel can be lowered for CUDA here: {reason}")
    assert results["lowered"]["ragged_all_to_all"] >= 4, "rows there and back, and their gradients"


@pytest.mark.gpu
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["none", "delayed", "current"])
def test_experts_over_two_gpus_compute_the_same_as_on_one(name):
    """Rows travel in a ragged all-to-all."""
    with jax.default_matmul_precision("highest"):
        assert_one_device(
            experts_case(create_mesh(ep=2), (), RECIPES[name], tokens_in_whole_blocks(), True)
        )


@pytest.mark.slow
def test_every_recipe_on_every_mesh():
    result = run_on_eight_devices(PROGRAM.with_name("host_experts.py"), "--all")
    for name in RECIPES:
        for case in ("dp and ep", "ep 2", "ep 4", "early"):
            assert_one_device(result[f"{case}: {name}"])
    # Two devices round their parts of a kernel's gradient to bfloat16 before the sum.
    assert_one_device(result["halves: current"], gradients=2**-7)
    codes = {name: case["unequal"] for name, case in result.items() if name.startswith("codes")}
    assert len(codes) == 2 * len(QUANTIZED) and not any(codes.values()), codes
    # Both batch halves are equal, and so are their codes; devices round gradients with separate numbers.
    assert result["random"]["y"] == 0.0 and result["random"]["dx"] > 1e-3


@pytest.mark.parametrize("early", [False, True])
def test_rows_between_experts_stay_zero_up_to_the_last_product(early):
    """The parameters make all tokens zero. Rows without tokens, which have only biases, would change the maximum."""
    model = te_flax._MoEBlock(
        num_experts=2,
        num_experts_per_tok=1,
        intermediate_size=16,
        use_ffn_bias=True,
        apply_topk_weights_early=early,
        activation_type="relu",
    )
    x = ones((1, 24, 16))
    with te.autocast(True, recipe.DelayedScaling(amax_history_len=4)):
        variables = draw_unboxed_variables(model, x)
        params = variables["params"]
        first = jnp.concatenate((jnp.full((2, 16, 16), -1.0), params["wi"][..., 16:]), axis=-1)
        params = params | {"wi": first, "wi_bias": jnp.full((2, 32), 4.0)}

        def loss(state):
            return model.apply({"params": params, **state}, x)[0].sum()

        state = jax.jit(jax.grad(loss))({"fp8_metas": variables["fp8_metas"]})
    np.testing.assert_array_equal(state["fp8_metas"]["x_1_amax_history"], 0.0)


CAPACITIES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from tests.jax.compiled import normal, start_on_host_devices
from transformer_engine.jax import ep
from transformer_engine.jax.moe import get_moe_recv_capacity_per_rank, moe

start_on_host_devices()
mesh = Mesh(np.asarray(jax.devices()[:4]), ("ep",))
x, gate = normal(jax.random.key(0), (8, 64, 16)), normal(jax.random.key(1), (16, 8))
wi, wo = normal(jax.random.key(2), (8, 16, 48)), normal(jax.random.key(3), (8, 24, 16))
sizes = {"num_experts": 8, "num_experts_per_tok": 2}
worst = get_moe_recv_capacity_per_rank(**sizes, max_tokens_per_rank=128, ep_size=4)

def run(capacity):
    with jax.set_mesh(mesh):
        call = jax.jit(lambda x: moe(x, gate, wi, wo, **sizes, ep_axis="ep", recv_capacity_per_rank=capacity))
        y, _, received = call(x)
    return np.asarray(y), np.asarray(received)

y, received = run(None)
of_capacity, same = run(worst)
np.testing.assert_array_equal(of_capacity, y)
np.testing.assert_array_equal(same, received)
dropped, same = run(128)
np.testing.assert_array_equal(same, received)
assert received.max() > 128 and np.isfinite(dropped).all()
kept = np.isclose(dropped, y, rtol=1e-4, atol=1e-4).all(axis=-1)
assert 0.2 < kept.mean() < 0.9, kept.mean()
assert np.linalg.norm(dropped) < np.linalg.norm(y)
ep.ep_bootstrap(4, 0, 8, 128, 256, 16)
try:
    run(128)
except ValueError as error:
    print(error)
"""


def test_rows_beyond_the_capacity_of_a_device_are_dropped(tmp_path):
    program = tmp_path / "capacities.py"
    program.write_text(CAPACITIES)
    printed, _ = run_on_host_devices(program)
    assert "recv_capacity_per_rank=128, and ep_bootstrap was called for 256" in printed


def test_a_data_axis_missing_from_the_mesh_is_rejected():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("ep",))
    model = te_flax._MoEBlock(
        num_experts=2,
        num_experts_per_tok=1,
        intermediate_size=16,
        ep_axis="ep",
        data_parallelism_axes=("zz",),
    )
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="data_parallelism_axes='zz' is not an axis of the mesh"),
    ):
        jax.eval_shape(model.init, jax.random.key(0), ones((1, 4, 16)))
