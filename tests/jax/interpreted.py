"""Pytest plugin: with TRITON_INTERPRET=1, GPU kernel tests run on the CPU in Triton's interpreter, repaired.

Programs run operation by operation and select CUDA as their platform. The plugin calls each kernel as XLA
would: operands, then results, in the kernel's pointer order; then the operands written in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from triton.runtime import interpreter as triton_interpreter

from tests.kernels import dot_scaled, interpreter
from transformer_engine.jax.primitives import kernels, launching, platforms

_NAMES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int32": torch.int32,
    "bool": torch.bool,
    "uint32": torch.int64,
}
_POISON = 0xA5
_calls = {}


def _to_torch(x) -> torch.Tensor:
    array = np.ascontiguousarray(np.asarray(x))
    flat = torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).view(_NAMES[str(x.dtype)])
    return flat if str(x.dtype) == "uint32" else flat.reshape(x.shape)


def _to_jax(tensor: torch.Tensor, shape) -> jax.Array:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return jnp.asarray(data.view(jnp.dtype(shape.dtype)).reshape(shape.shape))


def _record(launch, inputs, result, operands, fresh, zeroed):
    key = str(len(_calls)).encode()
    _calls[key] = (launch, [x is not None for x in (*inputs, *result)], fresh, zeroed)
    return key, 0


def _ffi_call(target, results, vmap_method, input_output_aliases):
    assert target == "triton_kernel_call_ffi"

    def call(*arrays, opaque):
        launch, remote, fresh, zeroed = _calls.pop(opaque)
        tensors = [_to_torch(x) for x in arrays]
        outputs = []
        for shape, zero in zip(fresh, zeroed, strict=True):
            size = int(np.prod(shape.shape)) * jnp.dtype(shape.dtype).itemsize
            memory = torch.full((size,), 0 if zero else _POISON, dtype=torch.uint8)
            outputs.append(memory.view(_NAMES[str(jnp.dtype(shape.dtype))]).reshape(shape.shape))
        saved = [tensor.clone() for tensor in tensors]
        for index, result in input_output_aliases.items():
            if result < len(outputs):  # an output that aliases an input
                outputs[result] = tensors[index].reshape(outputs[result].shape)
        remaining = iter([*tensors, *outputs])
        pointers = [next(remaining) if is_there else None for is_there in remote]
        launch.kernel[launch.grid](
            *pointers, *launch.scalars, *launch.constants, num_warps=launch.warps, num_stages=1
        )
        for index, (before, after) in enumerate(zip(saved, tensors, strict=True)):
            if index not in input_output_aliases:
                assert interpreter._same_memory(after, before), (
                    f"operand {index} is written and no result aliases it"
                )
        distance = [pair for pair in input_output_aliases.items() if pair[1] >= len(outputs)]
        written = sorted(distance, key=lambda pair: pair[1])
        answers = [*outputs, *(tensors[position] for position, _ in written)]
        return [_to_jax(tensor, shape) for tensor, shape in zip(answers, results, strict=True)]

    return call


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """a @ b + d in float32: the interpreter multiplies the bits of bfloat16 as if they were integers."""
    product = np.matmul(_numbers(a), _numbers(b), dtype=np.float32)
    return triton_interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _numbers(handle):
    narrow = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    dtype = narrow.get(str(handle.dtype.scalar))
    if dtype is None:
        return handle.data.astype(np.float32)
    bits = torch.from_numpy(np.ascontiguousarray(handle.data).view(f"i{dtype.itemsize}"))
    return bits.view(dtype).float().numpy()


def pytest_configure() -> None:
    jax.config.update("jax_disable_jit", True)
    interpreter.repair()
    dot_scaled.install()
    triton_interpreter.InterpreterBuilder.create_dot = _dot
    np.seterr(all="ignore")  # kernels divide by the maximum over an empty group
    launching._call = _record
    launching.kernels_unsupported_reason = lambda: None
    jax.ffi.ffi_call = _ffi_call
    lax.platform_dependent = lambda *arrays, default, cuda=None, **elsewhere: (cuda or default)(
        *arrays
    )
    platforms.has_gpu = lambda: True
    kernels._kernel.def_impl(lambda *arrays, kernel: list(kernel.run(*arrays)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items) -> None:
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
