"""Layers sharded over a mesh compute the result of one device, and keep its state; errors without MeshResource."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, Mesh, PartitionSpec

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import ones
from tests.support import forked
from tests.support.programs import ROOT, search_path
from transformer_engine.jax import sharding

PROGRAM = Path(__file__).with_name("host_devices.py")


@pytest.fixture(scope="module")
def facts() -> dict:
    return run_on_eight_devices(PROGRAM)


def run_on_eight_devices(program: Path, *options: str) -> dict:
    """Run a program on eight host devices and parse the JSON in its last output line."""
    return json.loads(run_on_host_devices(program, *options)[0].splitlines()[-1])


def run_on_host_devices(program: Path, *options: str) -> tuple[str, str]:
    """Run a program on eight host devices; return its output and standard error."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment = os.environ | flags | {"PYTHONPATH": search_path()}
    run = forked.Program([str(program), *options], ROOT, environment, framework="jax")
    assert run.finish() == 0, run.errors
    return run.printed, run.errors


def test_two_processes_of_jax_distributed_compute_the_step_of_one_device():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": search_path()}
    environment.pop("XLA_FLAGS", None)
    program = PROGRAM.with_name("host_processes.py")
    started = [
        forked.Program([str(program), address, str(rank)], ROOT, environment, framework="jax")
        for rank in range(2)
    ]
    statuses = [process.finish(patience=240) for process in started]
    assert statuses == [0, 0], "\n".join(process.errors for process in started)
    for process in started:
        result = json.loads(process.printed.splitlines()[-1])
        assert (result["processes"], result["devices"], result["rows here"], result["states"]) == (
            2,
            2,
            4,
            12,
        )
        assert result["state"] == 0.0 and max(result["loss"], result["gradients"]) < 1e-6


@pytest.mark.parametrize("entered", ["with mesh", "set_mesh"])
def test_eight_devices_compute_the_results_of_one(facts, entered):
    assert facts[entered] < 1e-6
    assert facts[f"{entered} gradients"] < 1e-6
    assert facts[f"{entered} shards"] == 2


@pytest.mark.parametrize("entered", ["with mesh", "set_mesh"])
def test_the_state_of_delayed_scaling_sees_the_whole_mesh(facts, entered):
    assert facts[f"{entered} state"] == 0.0


def test_sharded_arguments_without_a_mesh_give_the_results_of_one_device(facts):
    assert facts["no mesh"] < 1e-6 and facts["no mesh gradients"] < 1e-6
    assert facts["no mesh state"] == 0.0
    assert facts["no mesh shards"] == 2


@pytest.mark.parametrize("entered", ["with mesh", "set_mesh"])
def test_sharded_layers_gather_no_kernel(facts, entered):
    assert facts[f"{entered} all-gathers"] == 0


def test_a_checkpoint_of_one_device_restores_on_eight(facts):
    assert facts["restored"] == 0.0
    assert facts["restored shards"] == 2


@pytest.mark.parametrize("layer", ["dense", "norm", "norm and dense"])
def test_gradients_and_states_in_shard_map_equal_one_device(facts, layer):
    """test_shard_map_adds_gradients_and_merges_states_by_default has an MLP over one axis."""
    assert facts["shard_map"][layer] < 1e-5


def test_collectives_reduce_over_the_axes_of_the_resource(facts):
    """The numbers 0 to 7 on 4 x 2 devices: maximum over all axes but the pipeline's, sums over batches and tokens."""
    assert facts["reduced"] == {"dp and tpsp": [7, 0 + 2 + 4 + 6, 28], "pp and fsdp": [1, 1, 1]}


@pytest.fixture(scope="module")
def compositions() -> dict:
    return run_on_eight_devices(PROGRAM.with_name("host_compositions.py"))


@pytest.mark.parametrize("name", ["fsdp", "dp and tp with sequences"])
def test_a_sharded_layer_keeps_loss_gradients_and_state(compositions, name):
    assert compositions[name] < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        "RING causal balanced",
        "RING padded with sinks and a window",
        "RING bottom right",
        "ALL_GATHER packed in stripes",
        "ALL_GATHER causal unbalanced with a window",
        "RING with a window",
        "ALL_GATHER unbalanced with a window",
        "two devices with a window",
    ],
)
def test_attention_of_a_sequence_over_devices(compositions, name):
    assert compositions[name] < 5e-5


@pytest.mark.slow
def test_every_composition_on_eight_devices():
    """Parts of these claims always run.

    test_meshes.py has block recipes, and test_partitioned_kernels.py both layer halves over "fsdp". This file
    has an MLP over "fsdp" and a whole layer over "dp and tp with sequences".
    """
    result = run_on_eight_devices(PROGRAM.with_name("host_compositions.py"), "--all")
    numbers = [value for value in result.values() if isinstance(value, float)]
    assert len(numbers) == 7 + 22 + 2 and all(number < 5e-5 for number in numbers)


def test_the_partitioner_shards_a_kernel_along_its_rows(compositions):
    assert compositions["kernels"] == {
        "difference": pytest.approx(0, abs=1e-6),
        "all-gathers": 0,
        "rows a device": 2,
    }


@pytest.fixture
def mesh():
    return Mesh(
        np.asarray(jax.devices()[:1]).reshape(1, 1), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2
    )


def test_a_mesh_without_a_resource_is_rejected_with_the_remedy(mesh):
    remedy = r"MeshResource assigns its axes; enter autocast\(mesh_resource=MeshResource"
    with pytest.raises(ValueError, match=f"^no mesh is in use, and no {remedy}"):
        sharding.global_mesh_resource()
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"^a mesh is in use and no {remedy}"):
        sharding.global_mesh_resource()


@pytest.mark.parametrize("quantized", [None, False, True])
@pytest.mark.parametrize("entered", ["with mesh", "set_mesh"])
def test_names_of_axes_under_a_mesh_without_a_resource_are_rejected_with_the_remedy(
    mesh, entered, quantized
):
    """Also under an autocast without a mesh_resource: that differs from a resource without axes."""
    axes = {
        "kernel_axes": (sharding.W_FSDP_AXES, sharding.W_TP_AXES),
        "input_axes": (sharding.BATCH_AXES, None),
    }
    scope = contextlib.nullcontext() if quantized is None else te.autocast(quantized)
    with (
        mesh if entered == "with mesh" else jax.set_mesh(mesh),
        scope,
        pytest.raises(ValueError, match=r"autocast\(mesh_resource=MeshResource"),
    ):
        te_flax.DenseGeneral(4, **axes).init(jax.random.key(0), ones((4, 8)))


def test_tensor_and_sequence_axes_exclude_each_other(monkeypatch):
    resource = te.MeshResource(tp_resource="tp", tpsp_resource="tpsp")
    with sharding.global_shard_guard(resource):  # no mesh is in use yet
        monkeypatch.setattr(sharding, "get_mesh_axis_size", lambda axis: 2)
        with pytest.raises(ValueError, match="set one of them to None"):
            sharding.global_mesh_resource()
    with (
        pytest.raises(ValueError, match="tp_resource='tp' and tpsp_resource='tpsp' both have"),
        te.autocast(enabled=True, mesh_resource=resource),
    ):
        pytest.fail("the block was entered")
    assert sharding._resource.get() is None and te.quantize.get_global_quantize_recipe() is None


@pytest.mark.parametrize(
    "field", [name for name in vars(te.MeshResource()) if name != "cp_resource"]
)
def test_a_resource_axis_missing_from_the_mesh_is_rejected(mesh, field):
    """Entering a resource inside a mesh raises, and so does looking up a mesh axis inside a resource."""
    resource = te.MeshResource(**{field: "zz"}, cp_resource="dp")
    sentence = rf"{field}='zz' is not an axis of the mesh in use, which has \('dp', 'tp'\); give one of them, or None"
    for block in (te.autocast(True, mesh_resource=resource), sharding.global_shard_guard(resource)):
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=sentence), block:
            pytest.fail("the block was entered")
        assert sharding._resource.get() is None and te.quantize.get_global_quantize_recipe() is None
    with sharding.global_shard_guard(resource):
        assert sharding.global_mesh_resource() is resource
        with jax.set_mesh(mesh):
            for ask in (sharding.global_mesh_resource, sharding.mesh_resource_or_default):
                with pytest.raises(ValueError, match=sentence):
                    ask()
            with pytest.raises(ValueError, match=sentence):
                te_flax.extend_logical_axis_rules(())
        with mesh, pytest.raises(ValueError, match=sentence):
            sharding.get_active_resource_axis(field)


def test_every_function_of_axes_rejects_an_axis_missing_from_the_mesh(mesh):
    x, sentence = (
        ones((2, 3)),
        r"='zz' is not an axis of the mesh( in use)?, which has \('dp', 'tp'\)",
    )
    with pytest.raises(ValueError, match=sentence):
        sharding.get_mesh_axis_size("zz", mesh)
    assert sharding.get_mesh_axis_size("zz") == 1, "no mesh is in use"
    calls = (
        lambda: sharding.get_mesh_axis_size("zz"),
        lambda: sharding.with_sharding_constraint(x, PartitionSpec("zz")),
        lambda: jax.jit(sharding.with_sharding_constraint, static_argnums=1)(
            x, PartitionSpec(None, ("dp", "zz"))
        ),
        lambda: te_flax._MoEBlock(
            num_experts=2, num_experts_per_tok=1, intermediate_size=4, ep_axis="zz"
        ).init(jax.random.key(0), ones((1, 2, 4))),
    )
    for way in ("with mesh", "set_mesh"):
        with mesh if way == "with mesh" else jax.set_mesh(mesh):
            for call in calls:
                with pytest.raises(ValueError, match=sentence):
                    call()


def test_an_unknown_field_of_a_resource_is_rejected():
    with (
        sharding.global_shard_guard(te.MeshResource(dp_resource="dp")),
        pytest.raises(ValueError, match=r"resource_name='dp' is not a field of .* dp_resource, "),
    ):
        sharding.get_active_resource_axis("dp")


def test_a_name_without_a_flax_rule_is_unsharded_with_one_warning(mesh):
    x = ones((2, 3))
    rules = (("rows of this test", "dp"), ("columns of this test", None))
    with (
        jax.set_mesh(mesh),
        nn.logical_axis_rules(rules),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for names in (
            ("rows of this test", "columns of this test"),
            ("rows of this test", "of no rule"),
        ):
            for laid in (
                sharding.with_sharding_constraint_by_logical_axes,
                jax.jit(constrain_by_names, static_argnums=1),
            ):
                np.testing.assert_array_equal(laid(x, names), x)
    (warning,) = said
    assert "axis name 'of no rule'" in str(warning.message)
    assert "extend_logical_axis_rules" in str(warning.message)


def constrain_by_names(x, names):
    return sharding.with_sharding_constraint_by_logical_axes(x, names)


def test_axis_names_map_to_the_axes_of_the_resource():
    with sharding.global_shard_guard(
        te.MeshResource(dp_resource="dp", tp_resource="tp", cp_resource="cp")
    ):
        rules = sharding.get_sharding_map_logic_axis_to_mesh_axis()
    used = {name: axis for name, axis in rules.items() if axis is not None}
    assert used == {
        "nvte_batch": "dp",
        "nvte_seqlen_cp": "cp",
        "nvte_head": "tp",
        "nvte_hidden_tp": "tp",
        "nvte_w_tp": "tp",
    }
    assert len(rules) == 12


def test_the_guard_is_restored_and_takes_a_resource_alone():
    outer, inner = te.MeshResource(dp_resource="a"), te.MeshResource(dp_resource="b")
    with sharding.global_shard_guard(outer):
        with sharding.global_shard_guard(inner):
            assert sharding.global_mesh_resource() is inner
        assert sharding.global_mesh_resource() is outer
        with te.autocast(True):
            assert sharding.global_mesh_resource() is outer
    with pytest.raises(TypeError, match="pass a MeshResource"), sharding.global_shard_guard("dp"):
        pytest.fail("the block was entered")


def test_constraints_do_nothing_without_a_mesh_or_names():
    x = ones((2, 3))
    assert sharding.with_sharding_constraint(x, PartitionSpec("dp")) is x
    assert sharding.with_sharding_constraint_by_logical_axes(x, None) is x
    assert sharding.with_sharding_constraint_by_logical_axes(x, ("nvte_batch", None)) is x
    with pytest.raises(ValueError, match="names 1 axes of 2; give one name"):
        sharding.with_sharding_constraint_by_logical_axes(x, ("nvte_batch",))


def test_names_of_ours_without_flax_rules_are_deprecated(mesh):
    x = ones((2, 3))
    with jax.set_mesh(mesh), sharding.global_shard_guard(te.MeshResource(dp_resource="dp")):
        with pytest.warns(DeprecationWarning, match="extend_logical_axis_rules"):
            y = sharding.with_sharding_constraint_by_logical_axes(x, ("nvte_batch", None))
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "names", [("nvte_bacth", None), ("nvte_batch", "nvte_heads"), ("embed", "nvte_tp")]
)
def test_misspelled_names_of_ours_raise_without_flax_rules(mesh, names):
    resource = te.MeshResource(dp_resource="dp")
    sentence = f"has {next(name for name in names if name not in (None, 'nvte_batch', 'embed'))}, which no rule"
    with (
        jax.set_mesh(mesh),
        sharding.global_shard_guard(resource),
        pytest.raises(ValueError, match=sentence),
    ):
        sharding.with_sharding_constraint_by_logical_axes(ones((2, 3)), names)


def test_default_axis_names_need_neither_rules_nor_a_resource(mesh):
    x = ones((2, 3))
    with jax.set_mesh(mesh):
        assert sharding.with_sharding_constraint_by_logical_axes(x, ("embed", None)) is x
        variables = te_flax.LayerNormMLP(intermediate_dim=4).init(
            jax.random.key(0), x, deterministic=True
        )
    assert variables["params"]["wi_kernel"].names == ("embed", "act", "mlp")


def test_manual_axes_are_dropped_from_a_constraint(mesh):
    def body(x):
        return sharding.with_sharding_constraint(x, PartitionSpec("dp", None)) * 2

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(body, in_specs=PartitionSpec("dp"), out_specs=PartitionSpec("dp"))
        np.testing.assert_array_equal(jax.jit(mapped)(ones((2, 3))), 2 * np.ones((2, 3)))


def test_resource_sizes_equal_the_sizes_of_their_mesh_axes():
    mesh: Any = jax.sharding.AbstractMesh((2, 4, 3), ("data", "tensors", "experts"))
    resource = te.MeshResource(dp_resource="data", tpsp_resource="tensors", ep_resource="experts")
    with jax.sharding.use_abstract_mesh(mesh), sharding.global_shard_guard(resource):
        sizes = sharding.dp_or_fsdp_axis_size(), sharding.tpsp_axis_size(), sharding.ep_axis_size()
        assert sizes == (2, 4, 3) and sharding.get_num_devices_in_mesh() == 24
        assert sharding.get_active_resource_axis("tpsp_resource") == "tensors"
        with sharding.global_shard_guard(te.MeshResource(fsdp_resource="tensors")):
            assert (sharding.dp_or_fsdp_axis_size(), sharding.ep_axis_size()) == (4, 1)
    assert (
        sharding.get_num_devices_in_mesh() == 1 and sharding.num_of_devices() == jax.device_count()
    )
