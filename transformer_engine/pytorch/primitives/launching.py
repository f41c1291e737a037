"""outputs = run(launch, inputs): a kernel launch, described in plain numbers and names, on torch tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.kernels.launch import Launch, missing, start
from ..device import get_device_compute_capability, is_current_device

DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_DTYPES = {
    name: getattr(torch, name) for name in (*DTYPE_NAMES.values(), "float8_e4m3fn", "float8_e5m2", "uint8")
}


class Processors(NamedTuple):
    """How many multiprocessors there are, and the bytes of shared memory that one program may have."""

    count: int
    shared_memory: int


def run(launch: Launch, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """The launch's outputs, allocated on the device of the first input; None where the launch has none."""
    first = inputs[0]
    assert first is not None
    device = first.device
    outputs = [
        None if output is None else torch.empty(output.shape, dtype=_DTYPES[output.dtype], device=device)
        for output in launch.outputs
    ]
    if device.type == "cuda" and not is_current_device(device.index):
        with torch.cuda.device(device):
            start(launch, (*inputs, *outputs), device.index)
    else:
        start(launch, (*inputs, *outputs), device.index)
    return outputs  # pyright: ignore[reportReturnType]


def rows_dense(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where neighbours along its last axis lie apart; its rows may lie anywhere."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@functools.cache
def processors(device: int) -> Processors:
    """The multiprocessors of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return Processors(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def refuses_elementwise(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why a Triton kernel that reads and writes 16- and 32-bit floats cannot run here; None if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, the tensors are on {device.type}"
    if (reason := missing()) is not None:
        return reason
    for dtype in dtypes:
        if dtype not in DTYPE_NAMES:
            return f"a tensor is {dtype}; it takes float32, float16 and bfloat16"
    capability = get_device_compute_capability()
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} < 8.0"
    return None


def refuses_casts(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton cannot cast values of a dtype to narrow codes here, to the bit as the reference; None if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, the values are on {device.type}"
    if (reason := missing()) is not None:
        return reason
    if torch.version.hip is not None:
        return "it relies on NVIDIA's FP8 conversion, this torch is built for ROCm"
    if dtype not in DTYPE_NAMES:
        return f"it takes bfloat16, float16 and float32, not {dtype}"
    capability = get_device_compute_capability()
    if capability < (9, 0):
        return (
            f"compute capability {capability[0]}.{capability[1]} < 9.0: "
            "Triton rounds a cast to FP8 twice there, or has none"
        )
    return None


def traceable(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """The implementation, which a tracing compiler sees as the operator transformer_engine::schema.

    Eager code skips the dispatcher: it costs more than starting the kernel. fake computes shapes and dtypes only.
    """
    name = schema[: schema.index("(")]
    qualified = f"transformer_engine::{name}"
    torch.library.define(qualified, schema[len(name) :], tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "cuda", implementation)
    torch.library.register_fake(qualified, fake)
    operator = getattr(torch.ops.transformer_engine, name)

    def call(*arguments: Any) -> Any:
        return operator(*arguments) if torch.compiler.is_compiling() else implementation(*arguments)

    return call
