"""Kernels for XLA are compiled to PTX without Triton's assembler; other compilations keep it."""

from __future__ import annotations

import contextlib
import importlib.util
import threading

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def assembled(monkeypatch, tmp_path):
    """A list of the kernels that Triton assembles, in an empty cache."""
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernels = []
    original = CUDABackend.make_cubin

    def make_cubin(self, source, metadata, *arguments):
        kernels.append(metadata["name"])
        return original(self, source, metadata, *arguments)

    monkeypatch.setattr(CUDABackend, "make_cubin", make_cubin)
    return kernels


def key():
    from transformer_engine.common.kernels import compiled
    from transformer_engine.common.kernels.cast import absolute_maximum

    launch = absolute_maximum(1 << 20)
    kinds = tuple(map(type, (*launch.scalars, *launch.constants)))
    return compiled.KernelKey(
        launch.kernel, ("bfloat16", "float32"), launch.scalars, kinds, launch.constants, launch.warps,
        launch.registers, launch.fuses, 90,
    )  # fmt: skip


def test_the_ptx_of_a_kernel_does_not_depend_on_the_assembler(assembled, monkeypatch):
    import triton

    from transformer_engine.common.kernels import compiled

    without = compiled._compile(key())
    assert assembled == [] and triton.knobs.runtime.add_stages_inspection_hook is None
    monkeypatch.setattr(compiled, "_without_assembler", contextlib.nullcontext)
    whole = compiled._compile(key())
    assert assembled == [whole.name], "the entry of the cache has another key"
    assert whole == without
    assert ".entry" in whole.ptx


def test_other_threads_and_hooks_of_callers_keep_the_assembler(assembled, monkeypatch):
    import triton

    from transformer_engine.common.kernels import compiled

    found = []
    with compiled._without_assembler():
        hook = triton.knobs.runtime.add_stages_inspection_hook
        thread = threading.Thread(target=lambda: found.extend([hook(), hook(None, {"cubin": 1})]))
        thread.start()
        thread.join()
        assert hook()[0] == "ptx only"
    assert found == [("", ""), None]
    calls = []

    def own(*arguments):
        calls.append(arguments)
        return "own", "own"

    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", own)
    compiled._compile(key())
    assert len(calls) == 2 and len(assembled) == 1
    assert triton.knobs.runtime.add_stages_inspection_hook is own
