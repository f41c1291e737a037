"""Kernels are compiled by threads while a program is traced, each of them once."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import pytest

from tests.jax.test_kernel_rows import gradient
from transformer_engine.jax.primitives import kernels, launching

UNSUPPORTED = launching.kernels_unsupported_reason()
pytestmark = pytest.mark.skipif(
    UNSUPPORTED is not None, reason=f"no kernel can be lowered for CUDA here: {UNSUPPORTED}"
)


@pytest.fixture
def ahead(monkeypatch):
    """Every kernel that is compiled ahead, as its future."""
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    monkeypatch.setattr(kernels, "_compiles_ahead", lambda: True)
    begin, futures = kernels._compile_ahead, []
    begin.cache_clear()
    jax.clear_caches()
    monkeypatch.setattr(kernels, "_compile_ahead", lambda *key: futures.append(begin(*key)))
    yield futures
    begin.cache_clear()


def compilation_key(name: str):
    from transformer_engine.common.kernels.compiled import KernelKey

    return KernelKey(name, (), (), (), (), 4, registers=None, fuses=True, capability=90)


def test_tracing_compiles_the_kernels_that_the_lowering_then_finds(ahead, monkeypatch):
    from transformer_engine.common.kernels import compiled as module

    compiling, compile_kernel = [], module._compile

    def record(program):
        compiling.append(threading.current_thread())
        return compile_kernel(program)

    monkeypatch.setattr(module, "_compile", record)
    module._COMPILED.clear()
    step, x = gradient("swiglu")
    traced = step.trace(x)
    results = {future: future.result(timeout=300) for future in ahead}
    assert len(results) == 2 and len(compiling) == 2
    assert threading.current_thread() not in compiling
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("triton_kernel_call_ffi") == 2
    assert len(compiling) == 2


def test_a_failed_compilation_is_raised_by_the_lowering(ahead, monkeypatch):
    def fail(*arguments):
        raise ValueError("ptxas is missing")

    monkeypatch.setattr(launching, "_call", fail)
    step, x = gradient("gelu")
    traced = step.trace(x)
    assert all(isinstance(future.exception(timeout=300), ValueError) for future in ahead) and ahead
    with pytest.raises(ValueError, match="ptxas is missing"):
        traced.lower(lowering_platforms=("cuda",))


def test_a_program_without_a_gpu_compiles_nothing_during_tracing(monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    monkeypatch.setattr(kernels, "has_gpu", lambda: False)
    monkeypatch.setattr(kernels, "_compile_ahead", lambda *key: pytest.fail("a kernel is compiled"))
    jax.clear_caches()
    step, x = gradient("gelu")
    assert step.trace(x).jaxpr.out_avals[0].dtype == jnp.float32


def test_threads_that_need_one_kernel_compile_it_once(monkeypatch):
    from transformer_engine.common.kernels import compiled as module

    begun, finish, calls = threading.Event(), threading.Event(), []

    def compile_slowly(expected):
        calls.append(expected)
        begun.set()
        assert finish.wait(60)
        return object()

    monkeypatch.setattr(module, "_compile", compile_slowly)
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(module._compile_once(compilation_key("one")))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    finish.set()
    for thread in threads:
        thread.join(60)
    assert len(results) == 3
    assert not module._running
    assert len({id(value) for value in results}) == len(calls)


def test_triton_is_hashed_once_before_the_threads_compile(monkeypatch):
    from triton.runtime import cache

    from transformer_engine.common.kernels import compiled as module

    hashing = []
    monkeypatch.setattr(module, "_hash", None)
    monkeypatch.setattr(cache, "triton_key", lambda: hashing.append(threading.current_thread()))
    launching.prepare_compiler()
    futures = {id(module.begin_hash()) for _ in range(3)}
    module.begin_hash().result(60)
    assert len(futures) == len(hashing) == 1 and threading.current_thread() not in hashing
    monkeypatch.setattr(module, "_hash", None)
    monkeypatch.delattr(cache, "triton_key")  # a later version: its compilation computes the hash
    module.begin_hash().result(60)


def test_waiting_threads_receive_the_error_and_a_later_call_compiles_again(monkeypatch):
    from transformer_engine.common.kernels import compiled as module

    attempts = []

    def fail_once(expected):
        attempts.append(expected)
        if len(attempts) == 1:
            raise RuntimeError("no memory")
        return "kernel"

    monkeypatch.setattr(module, "_compile", fail_once)
    with pytest.raises(RuntimeError, match="no memory"):
        module._compile_once(compilation_key("two"))
    assert module._compile_once(compilation_key("two")) == "kernel"
    assert not module._running
