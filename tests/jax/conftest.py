"""Fixtures of the JAX tests, which are collected where jax is installed (Python 3.11 and newer)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

# The parent of this folder is on the path. Without jax, `jax` is therefore found as this folder, without an origin.
if getattr(find_spec("jax"), "origin", None) is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import jax

    from tests.jax.compiled import compile_quickly

    compile_quickly(True)
    # Removing JAX's frames from a traceback takes 10 ms per raised error.
    jax.config.update("jax_traceback_filtering", "off")


@pytest.fixture(scope="module")
def as_users_compile():
    """Compile with XLA's optimizations, for modules that compare bits, which fusions can change."""
    compile_quickly(jax.config.jax_disable_jit)  # a program with one operation has nothing to fuse
    yield
    compile_quickly(True)


@pytest.fixture(autouse=True)
def _whole_products(request):
    """XLA rounds float32 operands of products to TF32 on a GPU; tests written for every machine compare float32."""
    if "gpu" in request.keywords or jax.default_backend() == "cpu":
        yield
        return
    with jax.default_matmul_precision("float32"):
        yield


@pytest.fixture
def cpu_alone():
    """Skip the test on a machine with a GPU, where other attention is selected and other devices are named."""
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU, and with it another choice")


@pytest.fixture(autouse=True)
def _no_array_outlives_a_test():
    """Delete every live array, as users' test suites do, so that no module or cache can keep an array."""
    yield
    for array in jax.live_arrays():
        array.delete()
