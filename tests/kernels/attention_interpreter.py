"""A pytest plugin: the attention's tests on the CPU, in Triton's repaired interpreter, with small tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.kernels.interpreter import keep_cover, repair
from transformer_engine.pytorch.primitives.attention.backends import triton, triton_decode
from transformer_engine.pytorch.runtime.launching import Processors


def pytest_configure() -> None:
    repair()
    interpreter.InterpreterBuilder.create_dot = _dot
    np.seterr(divide="ignore", invalid="ignore")  # log2(0) for a row without a key
    torch.set_num_threads(1)
    for backend in (triton, triton_decode):
        backend.processors = lambda device: Processors(2, 1 << 16)
    from transformer_engine.common.kernels import attention, attention_backward, attention_decode

    attention.forward_tile = lambda problem: (32, 16, 4, 1)
    attention_backward.keys_tile = attention_backward.queries_tile = lambda problem: (32, 16, 4, 1)
    attention_decode.decode_tile = lambda problem, rows: (16, 16, 4, 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    keep_cover(config, items)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """a @ b + d in float32: the interpreter multiplies the bits of bfloat16 as if they were integers.

    The product is computed in float64: in float32, NumPy's sums for a row depend on its place in the tile, unlike those
    of tensor cores.
    """
    product = np.matmul(_numbers(a), _numbers(b), dtype=np.float64).astype(np.float32)
    return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _numbers(handle):
    if str(handle.dtype.scalar) != "bf16":
        return handle.data.astype(np.float32)
    return (handle.data.astype(np.uint32) << 16).view(np.float32)
