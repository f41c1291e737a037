"""The JAX self-test finds wrong backends, selects GPU rows, and runs a sample on a CPU."""

from __future__ import annotations

import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from tests.support import forked
from tests.support.doubling import doubling_table
from tests.support.programs import ROOT, search_path
from transformer_engine.common.dispatch import tables, use_backend
from transformer_engine.common.hardware import nvidia
from transformer_engine.common.self_test import EMULATING, SelfTestSizes
from transformer_engine.jax import self_test as testing
from transformer_engine.jax.primitives import launching, platforms
from transformer_engine.jax.primitives.platforms import bind_by_platform
from transformer_engine.jax.runtime import platform

SIZES = SelfTestSizes(192, 16, 32)
UNSUPPORTED = launching.kernels_unsupported_reason()
needs_bridge = pytest.mark.skipif(
    UNSUPPORTED is not None, reason=f"no kernel can be lowered for CUDA here: {UNSUPPORTED}"
)


@pytest.fixture
def doubling():
    """A table whose backends double an array: one correctly, one with a wrong last bit, one not at all."""
    with doubling_table(
        "jax_doubling", lambda y: jnp.nextafter(y, 1e9), "ptxas has failed"
    ) as table:
        yield table


def double_by_platform(x):
    return bind_by_platform(tables["jax_doubling"], lambda platform: (platform, x.size))["cpu"](x)


def run_self_test(bound=None, expected=None):
    case = testing.JaxCase(
        "jax doubling",
        "8",
        "jax_doubling",
        double_by_platform,
        (jnp.arange(1.0, 9.0),),
        bound,
        expected,
        lambda x: x + x,
    )
    with ThreadPoolExecutor(2) as threads:
        return {
            result.backend: result
            for result in testing.run_case(testing.compile_case(case, threads))
        }


def test_backends_with_wrong_bits_or_errors_fail(doubling):
    actual = run_self_test()
    assert {name: result.status for name, result in actual.items()} == {
        "native": "passed",
        "wrong": "failed",
        "raising": "failed",
        "other": "unsupported",
    }
    assert actual["native"].equal == 1.0 and actual["native"].ratio is not None
    assert actual["wrong"].equal is not None and 0.7 < actual["wrong"].equal < 1.0
    assert (
        "ptxas has failed" in actual["raising"].reason
        and actual["other"].reason == "it needs a GPU"
    )


def test_values_may_differ_up_to_the_bound_and_the_reference_is_compared_with_an_independent_result(
    doubling,
):
    actual = run_self_test(1e-6, lambda x: 2.0 * x)
    assert {name for name, result in actual.items() if result.status == "passed"} == {
        "native",
        "wrong",
        "reference",
    }
    actual = run_self_test(1e-6, lambda x: 2.001 * x)
    assert {result.status for result in actual.values()} == {"failed", "unsupported"}


def test_a_case_beyond_the_time_limit_is_not_run(monkeypatch, doubling):
    case = testing.JaxCase("jax doubling", "8", "jax_doubling", double_by_platform, (jnp.ones(8),))
    monkeypatch.setattr(testing, "cases", lambda *arguments: iter([case]))
    assert [result.status for result in testing.self_test(SIZES, -1.0, lambda line: None)] == [
        "not run"
    ]


def forge(monkeypatch, capability):
    """Programs are for a GPU with a capability, as chosen on a machine that has one."""
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    monkeypatch.setattr(platform, "WITHOUT_GPU", nvidia(*capability))
    monkeypatch.setattr(platforms, "has_gpu", lambda: True)


@needs_bridge
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_every_path_that_a_gpu_has_runs_a_native_backend_there(monkeypatch, capability):
    forge(monkeypatch, capability)
    row, native = nvidia(*capability), {}
    for case in testing.cases(SIZES):
        request = testing.first_request(case)
        assert request is not None, case
        backends = tables[case.operation].candidates(request)
        results = [
            backend.name for backend in backends if backend.rejection_reason(request) is None
        ]
        assert results, case
        native.setdefault(case.path, set()).update(set(results) - set(EMULATING))
    emulated = {path for path, backends in native.items() if not backends}
    assert emulated == (
        set() if row.has("mxfp8 products") else {"jax mxfp8 products", "jax nvfp4 products"}
    )
    assert "scaled_matmul" in native["jax mxfp8 products"] or not row.has("mxfp8 products")


@needs_bridge
def test_cases_are_lowered_for_a_gpu_with_their_kernels(monkeypatch):
    forge(monkeypatch, (9, 0))
    chosen = {
        "jax mxfp8 casts": "triton",
        "jax fp8 block products": "triton",
        "jax fp8 block 1x128 codes of fused producers": "triton",
        "jax grouped fp8 products": "triton",
    }
    for case in testing.cases(SIZES):
        if (backend := chosen.pop(case.path, None)) is not None:
            with use_backend(**{case.operation: backend}):
                lowered = jax.jit(lambda *arguments, case=case: case.compute(*arguments)).trace(
                    *case.arguments
                )
            text = lowered.lower(lowering_platforms=("cuda",)).as_text()
            assert launching._TARGET in text, case.path
    assert chosen == {}


def test_every_path_belongs_to_one_part():
    every = [(case.path, case.name) for case in testing.cases(SIZES)]
    parts = [
        [(case.path, case.name) for case in testing.cases(SIZES, part, 3)] for part in range(3)
    ]
    assert sorted(itertools.chain(*parts)) == sorted(every)
    paths = [{path for path, _ in part} for part in parts]
    assert sum(map(len, paths)) == len({path for path, _ in every})
    assert max(map(len, paths)) - min(map(len, paths)) <= 1


def test_a_machine_without_a_gpu_runs_a_sample_of_every_path():
    command = ["-W", "ignore", "-m", "transformer_engine.jax.self_test", "600", "128", "16", "32"]
    environment = os.environ | {"PYTHONPATH": search_path(), "JAX_PLATFORMS": "cpu"}
    printed = json.loads(
        forked.output(command, ROOT, environment, framework="jax").splitlines()[-1]
    )
    assert "on cpu" in printed["machine"]["JAX"]
    statuses: dict[str, set[str]] = {}
    for result in printed["results"]:
        statuses.setdefault(result["path"], set()).add(result["status"])
    assert {
        path for path, actual in statuses.items() if "failed" in actual or "not run" in actual
    } == set()
    passed = {path for path, actual in statuses.items() if "passed" in actual}
    assert {f"jax {name}" for name in testing.PRODUCTS} | {
        "jax fp8 casts",
        "jax mxfp8 casts",
    } <= passed
    assert {
        "jax attention",
        "jax nvfp4 stochastic casts of uneven sizes",
    } <= statuses.keys()  # kernels of a GPU
