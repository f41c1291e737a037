"""outputs = run(launch, inputs), or perform(program, inputs): kernel calls that are data, on torch tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.kernels.launch import Launch, Output, missing, start
from ...common.kernels.program import Program
from ..device import get_device_compute_capability, is_current_device
from .zeros import zero

DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_DTYPES = {
    name: getattr(torch, name)
    for name in (*DTYPE_NAMES.values(), "float8_e4m3fn", "float8_e5m2", "uint8", "int32")
}


class Processors(NamedTuple):
    """How many multiprocessors there are, and the bytes of shared memory that one program may have."""

    count: int
    shared_memory: int


def run(launch: Launch, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """The launch's outputs, made on the device of the first input; None where the launch has none."""
    first = inputs[0]
    assert first is not None
    device = first.device
    makers = launch.makers.get(device)
    if makers is None:
        makers = launch.makers[device] = makers_of(launch, device)
    outputs = [None if make is None else make() for make in makers]
    if device.type == "cuda" and not is_current_device(device.index):
        with torch.cuda.device(device):
            start(launch, inputs, device.index, outputs)
    else:
        start(launch, inputs, device.index, outputs)
    return outputs  # pyright: ignore[reportReturnType]


def perform(program: Program, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """The program's results, made on the device of the first input; None where it has none."""
    first = inputs[0]
    assert first is not None
    device = first.device
    if device.type == "cuda" and not is_current_device(device.index):
        with torch.cuda.device(device):
            return _perform(program, inputs, device)
    return _perform(program, inputs, device)


def _perform(program: Program, inputs: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
    steps, results = program.places
    buffers: list[Any] = [None, *inputs]
    for launch, places in steps:
        makers = launch.makers.get(device)
        if makers is None:
            makers = launch.makers[device] = makers_of(launch, device)
        outputs = [None if make is None else make() for make in makers]
        start(launch, [buffers[place] for place in places], device.index, outputs)
        buffers += outputs
    return [buffers[place] for place in results]


def run_into(launch: Launch, tensors: Sequence[Tensor | None], device: torch.device) -> None:
    """Start the launch on its inputs and, behind them, the outputs, which the caller has made on the device."""
    if device.type == "cuda" and not is_current_device(device.index):
        with torch.cuda.device(device):
            start(launch, tensors, device.index)
    else:
        start(launch, tensors, device.index)


def makers_of(launch: Launch, device: torch.device) -> list[Any]:
    """Functions of nothing that make the launch's outputs on a device; None where there is none."""
    return [None if output is None else _maker(output, device) for output in launch.outputs]


def _maker(output: Output, device: torch.device) -> Callable[[], Tensor]:
    shape, dtype, begins = output.shape, output.dtype, output.begins
    assert shape is not None and dtype is not None, "whoever knows the extents makes the tensor: use run_into"
    if begins is not None:
        assert not output.transposed
        if begins == 0 and shape == (1,) and dtype == "float32":
            return functools.partial(zero, device)
        return functools.partial(torch.full, shape, begins, dtype=_DTYPES[dtype], device=device)
    if output.transposed:
        rows, columns = shape
        seen, strides = (columns, rows), (1, columns)
    else:
        seen, strides = (
            shape,
            tuple(prod(max(extent, 1) for extent in shape[axis + 1 :]) for axis in range(len(shape))),
        )
    # On a CPU's clock: 0.8 us where torch.empty takes 1.2.
    return functools.partial(torch.empty_strided, seen, strides, dtype=_DTYPES[dtype], device=device)


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
