"""Kernel calls become XLA operations, lowered for CUDA on a machine without a GPU."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from tests.jax.compiled import array, zeros
from tests.support import forked
from tests.support.programs import search_path
from transformer_engine.common import optional
from transformer_engine.common.formats import E4M3
from transformer_engine.common.hardware import ROWS
from transformer_engine.jax.primitives import launching

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from tests.jax import lowering_cases; lowering_cases.main()"
UNSUPPORTED = launching.kernels_unsupported_reason()
needs_bridge = pytest.mark.skipif(
    UNSUPPORTED is not None, reason=f"no kernel can be lowered for CUDA here: {UNSUPPORTED}"
)


def lower(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def report(*options: str) -> dict:
    environment = os.environ | {"PYTHONPATH": search_path()}
    printed = forked.output(["-c", WITHOUT_TORCH, *options], ROOT, environment, framework="jax")
    return json.loads(printed.splitlines()[-1])


def check(facts: dict) -> None:
    assert all(case["calls"] == 1 for case in facts["lowered"].values()), facts["lowered"]
    assert set(facts["unsupported"].values()) <= {"table", "dependent", "dtype"}


@needs_bridge
def test_a_launch_of_every_kernel_lowers_without_torch():
    facts = report()
    check(facts)
    assert len({case["kernel"] for case in facts["lowered"].values()}) >= 25


@needs_bridge
@pytest.mark.slow
def test_every_launch_lowers_without_torch():
    facts = report("--all")
    check(facts)
    assert len(facts["lowered"]) >= 100


def cast_launch(records: bool):
    from transformer_engine.common.kernels import cast

    return cast.cast((64, 128), E4M3, True, True, records=records)


@needs_bridge
def test_outputs_are_results_and_arrays_written_in_place_are_aliased():
    def call(x, scale, record):
        return launching.run(cast_launch(True), [x, scale, record])

    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    codes, codes_t, inverse, record = jax.eval_shape(call, x, one, one)
    assert (codes.shape, codes.dtype) == ((64, 128), jnp.float8_e4m3fn)
    assert codes_t.shape == (128, 64)
    assert inverse.shape == record.shape == (1,)
    text = lower(call, x, one, one)
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", text)
    assert aliases == [
        ("3", "2")
    ]  # the record is the third operand, and the last among four results


@needs_bridge
def test_maximum_outputs_start_at_zero_without_an_extra_operation():
    from transformer_engine.common.kernels import cast

    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    text = lower(lambda x: launching.run(cast.absolute_maximum(512), [x])[0], x)
    assert "stablehlo.constant" not in text
    assert text.count("custom_call") == 1


@needs_bridge
def test_a_program_traced_on_a_cpu_runs_there_and_lowers_for_cuda():
    from transformer_engine.common.kernels import cast

    def maximum(x):
        return lax.platform_dependent(
            x,
            cuda=lambda x: launching.run(cast.absolute_maximum(x.size), [x])[0],
            default=lambda x: jnp.abs(x).max().reshape(1),
        )

    x = array(np.random.default_rng(0).standard_normal((8, 64)), jnp.float32)
    assert "triton_kernel_call_ffi" in lower(maximum, x)
    if jax.default_backend() == "cpu":
        assert jax.jit(maximum)(x)[0] == jnp.abs(x).max()


@needs_bridge
def test_a_call_lowers_under_vmap_and_inside_shard_map():
    from transformer_engine.common.kernels import cast

    def maximum(x):
        return launching.run(cast.absolute_maximum(512), [x])[0]

    batch = jax.ShapeDtypeStruct((3, 8, 64), jnp.float32)
    assert "triton_kernel_call_ffi" in lower(jax.vmap(maximum), batch)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")
    mapped = jax.shard_map(maximum, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert "triton_kernel_call_ffi" in lower(mapped, jax.ShapeDtypeStruct((8, 64), jnp.float32))


@needs_bridge
def test_tables_of_addresses_are_rejected():
    from transformer_engine.common.kernels import delayed_scaling

    launch = delayed_scaling.advance(
        4, 16, 3, takes_maximum=True, keeps_idle=True, fp8_max=448.0, margin=0
    )
    with pytest.raises(NotImplementedError, match="stack them"):
        launching.run(launch, [zeros(12, jnp.int32)])


@needs_bridge
def test_integers_equal_to_one_become_constants():
    from transformer_engine.common.kernels.compiled import compiled

    launch = cast_launch(True)
    dtypes = ["bfloat16", "float32", "float32", "float8_e4m3fn", "float8_e4m3fn", "float32"]
    kernel = compiled(launch, dtypes, 90)
    assert kernel.pointers == tuple(range(6))
    assert [s.value for s in kernel.scalars] == [v for v in launch.scalars if v != 1]
    assert ".target sm_90" in kernel.ptx
    assert compiled(launch, dtypes, 90) is kernel


@needs_bridge
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.vendor == "nvidia"], ids=lambda row: row.architecture
)
def test_ptx_version_suits_the_oldest_supported_jax_assembler(row):
    from transformer_engine.common.kernels.compiled import compiled
    from transformer_engine.common.kernels.transpose import transpose

    if optional.triton_problem(row, optional.release("triton")) is not None:
        pytest.skip(f"Triton has no assembler for {row.title}")
    assert isinstance(row.target, int)
    kernel = compiled(transpose((64, 64)), ("uint8", "uint8"), row.target)
    match = re.search(r"^\.version (\d+)\.(\d+)$", kernel.ptx, re.MULTILINE)
    assert match is not None
    assert (8, 6) <= (int(match[1]), int(match[2])) <= row.portable_ptx


def test_a_jaxlib_without_its_triton_classes_is_a_reason(monkeypatch):
    launching._bridge_failure.cache_clear()
    monkeypatch.setattr(launching, "_CLASSES", ("TritonKernel", "NoSuchClass"))
    reason = launching._bridge_failure()
    launching._bridge_failure.cache_clear()
    assert reason is not None
    assert "jaxlib" in reason
