"""A choice by platform traces one branch; the other one only in programs lowered for its platform."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, PartitionSpec

from transformer_engine.jax.primitives.platforms import call_by_platform, differentiable_by_platform

pytestmark = pytest.mark.usefixtures("cpu_alone")
X = np.linspace(-2.0, 2.0, 12, dtype=np.float32).reshape(3, 4)


@dataclass(frozen=True)
class Counted:
    """A function whose calls append its factor to the list named `traced`."""

    factor: float
    traced: str

    def sine(self, x):
        CALLS[self.traced].append(self.factor)
        return jnp.sin(self.factor * x)


class Branch(Counted):
    """(x, count) -> (sin(factor * x), x + count)."""

    def __call__(self, x, count):
        return self.sine(x), x + count


class Sine(Counted):
    """(x, scale int32) -> sin(factor * scale * x)."""

    def __call__(self, x, scale):
        return self.sine(scale * x)


CALLS: dict[str, list[float]] = {}
COUNT = np.int32(2)


def branches(kind, test: str):
    """Branches (cuda, default) for a test, with empty call lists."""
    CALLS[test + " cuda"], CALLS[test + " cpu"] = [], []
    return kind(3.0, test + " cuda"), kind(2.0, test + " cpu")


def lower_for_cuda(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch):
    """The platform of this machine, the CPU, is the expected one."""
    monkeypatch.delenv("TE_JAX_KERNELS", raising=False)


def test_only_the_expected_branch_is_traced_and_equal_calls_once():
    cuda, default = branches(Branch, "once")

    def run(x):
        first, _ = call_by_platform(x, COUNT, cuda=cuda, default=default)
        second, total = call_by_platform(x + 1, COUNT, cuda=replace(cuda), default=replace(default))
        return first + second, total

    result = jax.jit(run)(X)
    np.testing.assert_allclose(result[0], np.sin(2 * X) + np.sin(2 * (X + 1)), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(result[1], X + 3)
    assert (CALLS["once cuda"], CALLS["once cpu"]) == ([], [2.0])


def test_a_program_for_another_platform_traces_its_branch():
    cuda, default = branches(Branch, "other")
    text = lower_for_cuda(lambda x: call_by_platform(x, COUNT, cuda=cuda, default=default), X)
    assert CALLS["other cuda"] == [3.0]
    assert "3.000000e+00" in text and "2.000000e+00" not in text


def test_requested_kernels_make_cuda_the_expected_platform(monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    cuda, default = branches(Branch, "expected")
    jax.jit(lambda x: call_by_platform(x, COUNT, cuda=cuda, default=default)).trace(X)
    assert (CALLS["expected cuda"], CALLS["expected cpu"]) == ([3.0], [])
    first, _ = jax.jit(lambda x: call_by_platform(x, COUNT, cuda=cuda, default=default))(X)
    np.testing.assert_allclose(first, np.sin(2 * X), rtol=1e-6, atol=1e-6)


def test_a_program_traced_before_kernels_were_requested_keeps_its_branches(monkeypatch):
    cuda, default = branches(Branch, "before")
    traced = jax.jit(lambda x: call_by_platform(x, COUNT, cuda=cuda, default=default)).trace(X)
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    assert "2.000000e+00" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "3.000000e+00" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_an_exported_program_of_two_platforms_holds_both_branches():
    cuda, default = branches(Branch, "export")
    run = jax.jit(lambda x: call_by_platform(x, COUNT, cuda=cuda, default=default)[0])
    program = export.export(run, platforms=("cpu", "cuda"))(X)
    assert all(number in program.mlir_module() for number in ("3.000000e+00", "2.000000e+00"))
    np.testing.assert_allclose(program.call(X), np.sin(2 * X), rtol=1e-6, atol=1e-6)


def test_symbolic_extents_and_shard_map_take_both_branches():
    cuda, default = branches(Branch, "both")
    (rows,) = export.symbolic_shape("r")
    run = jax.jit(lambda x: call_by_platform(x, COUNT, cuda=cuda, default=default)[0])
    program = export.export(run)(jax.ShapeDtypeStruct((rows, 4), jnp.float32))
    np.testing.assert_allclose(program.call(X), np.sin(2 * X), rtol=1e-6, atol=1e-6)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(mapped)(X), np.sin(2 * X), rtol=1e-6, atol=1e-6)
    assert CALLS["both cuda"] and CALLS["both cpu"]


@pytest.mark.parametrize("disabled", [False, True])
def test_a_call_outside_of_jit_takes_the_branch_of_its_arrays(disabled):
    cuda, default = branches(Branch, "eager")
    with jax.disable_jit(disabled):
        first, total = call_by_platform(jnp.asarray(X), COUNT, cuda=cuda, default=default)
    np.testing.assert_allclose(first, np.sin(2 * X), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(total, X + 2)


@pytest.mark.parametrize("choose", [call_by_platform, differentiable_by_platform])
def test_vmap_maps_the_branch_of_every_platform(choose):
    cuda, default = branches(Sine, "vmap")

    def run(x, scale):
        return choose(x, scale, cuda=cuda, default=default)

    scales = np.arange(3, dtype=np.int32)
    result = jax.jit(jax.vmap(run, in_axes=(1, None)))(X, COUNT)
    np.testing.assert_allclose(result, np.sin(4 * X.T), rtol=1e-6, atol=1e-6)
    result = jax.vmap(run)(X, scales)
    np.testing.assert_allclose(result, np.sin(2 * scales[:, None] * X), rtol=1e-6, atol=1e-6)
    assert "3.000000e+00" in lower_for_cuda(jax.vmap(run), X, scales)


def test_forward_and_reverse_mode_differentiate_the_selected_branch():
    cuda, default = branches(Sine, "derivatives")

    def run(x):
        return call_by_platform(x, COUNT, cuda=cuda, default=default).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(run))(X), 4 * np.cos(4 * X), rtol=1e-5, atol=1e-5)
    _, tangent = jax.jvp(run, (jnp.asarray(X),), (jnp.ones_like(X),))
    np.testing.assert_allclose(tangent, (4 * np.cos(4 * X)).sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda run: run])
def test_a_gradient_traces_the_expected_branch_alone(wrap):
    cuda, default = branches(Sine, f"gradient {wrap}")

    def run(x):
        return differentiable_by_platform(x, COUNT, cuda=cuda, default=default).sum()

    np.testing.assert_allclose(jax.grad(wrap(run))(X), 4 * np.cos(4 * X), rtol=1e-5, atol=1e-5)
    assert CALLS[cuda.traced] == []
    assert set(CALLS[default.traced]) == {2.0}


def test_a_gradient_lowered_for_another_platform_recomputes_its_branch(monkeypatch):
    """The expected branch's residuals are zeros there; the platform's own branch computes the gradient."""
    cuda, default = branches(Sine, "recomputed")

    def gradient(x):
        return jax.grad(
            lambda x: differentiable_by_platform(x, COUNT, cuda=cuda, default=default).sum()
        )(x)

    monkeypatch.setenv("TE_JAX_KERNELS", "1")  # CUDA is expected, and the CPU lowered for
    np.testing.assert_allclose(jax.jit(gradient)(X), 4 * np.cos(4 * X), rtol=1e-5, atol=1e-5)
    assert "2.000000e+00" not in lower_for_cuda(gradient, X)


def test_branches_that_return_other_shapes_are_an_error():
    with pytest.raises(AssertionError, match="the other platform's branch"):
        lower_for_cuda(lambda x: call_by_platform(x, cuda=jnp.transpose, default=jnp.abs), X)


@pytest.mark.parametrize(
    ("driver", "plugin", "platforms", "expected"),
    [
        (True, True, "", True),
        (True, True, "cuda,cpu", True),
        (True, True, "cpu", False),
        (True, False, "", False),
        (False, True, "", False),
    ],
)
def test_a_gpu_is_expected_with_a_driver_and_a_plugin(
    monkeypatch, tmp_path, driver, plugin, platforms, expected
):
    from transformer_engine.jax.runtime import platform

    version, package = tmp_path / "version", tmp_path / "jax_plugins"
    if driver:
        version.write_text("NVRM version")
    (package / ("xla_cuda13" if plugin else "xla_tpu")).mkdir(parents=True)
    (package / ("xla_cuda13" if plugin else "xla_tpu") / "__init__.py").touch()
    monkeypatch.setattr(platform, "_DRIVER", version)
    monkeypatch.setattr(platform, "entry_points", lambda group: ())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert platform.expects_gpu() is expected
