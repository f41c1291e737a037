"""Kernel calls as data, executed on torch tensors: run(launch, inputs) and perform(program, inputs)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.dispatch import Operator
from ...common.kernels.launch import (
    ALIGNMENT,
    Launch,
    Output,
    check_memory,
    start,
    starter,
    unavailable_reason,
)
from ...common.kernels.program import Program
from ..fast.symbols import Symbol, TensorLayout
from .device import current_hardware, is_current_device
from .operator_definition import define_operator
from .zeros import numbers, zero

DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_DTYPES = {
    name: getattr(torch, name)
    for name in (*DTYPE_NAMES.values(), "float8_e4m3fn", "float8_e5m2", "uint8", "int32")
}


class Processors(NamedTuple):
    """Multiprocessor count, and the shared memory in bytes that is available to one program."""

    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    shared_memory: int


def run(launch: Launch, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the launch's outputs, allocated on the device of the first input; None for absent outputs."""
    first = inputs[0]
    assert first is not None
    device = first.device
    if type(first) is Symbol:
        return _listed(launch, first, inputs)
    makers = launch.makers.get(device)
    if makers is None:
        makers = launch.makers[device] = output_makers(launch, device)
    outputs = [None if make is None else make() for make in makers]
    run_into(launch, inputs, outputs)
    return outputs  # pyright: ignore[reportReturnType]


def run_into(
    launch: Launch, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]
) -> None:
    """Run a launch on the device of the first input, whose outputs are the caller's tensors."""
    first = inputs[0]
    assert first is not None
    device = first.device
    if device.type == "cuda" and not is_current_device(device.index):
        with torch.cuda.device(device):
            start(launch, inputs, device.index, outputs)
    else:
        start(launch, inputs, device.index, outputs)


def _listed(launch: Launch, first: Symbol, inputs: Sequence[Any]) -> list[Any]:
    """Append a launch to the instructions of a pass; return its output symbols."""
    instructions = first.instructions
    makers = output_makers(launch, instructions.device)
    outputs = [None if maker is None else instructions.append_allocation(maker) for maker in makers]
    instructions.start(launch, (*inputs, *outputs))
    return outputs


def perform(program: Program, inputs: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the program's results, allocated on the device of the first input; None for absent results."""
    first = inputs[0]
    assert first is not None
    performed = program.kept.get(first.device)
    if performed is None:
        performed = program.kept[first.device] = Performed(program, first.device)
    return performed(*inputs)


class Performed:
    """A program on one device, prepared so that a call only allocates and launches.

    A call takes the inputs, followed by the caller's buffers, and returns the results. Buffers that
    the program allocates have known dtypes and are aligned to 16 bytes, so that the arguments
    determine the compiled kernels of all steps.
    """

    def __init__(self, program: Program, device: torch.device):
        self.device = device
        self.index = device.index
        self.may_be_elsewhere = device.type == "cuda"
        self.launches, self.makers, self.zeroed, places, results = _plan_program(program, device)
        self.picks = tuple(_index_getter(of_step) for of_step in places)
        self.results = _index_getter(results)
        self.starters: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        if type(tensors[0]) is Symbol:
            return self._listed(tensors[0], tensors)
        if self.may_be_elsewhere and not is_current_device(self.index):
            with torch.cuda.device(self.device):
                return self(*tensors)
        addresses: list[int | None] = [None]
        key: list[
            Any
        ] = []  # all properties on which Triton specializes and which the records do not fix
        address_bits = 0
        for tensor in tensors:
            if tensor is None:
                addresses.append(None)
                key.append(None)
            else:
                address = tensor.data_ptr()
                if not address:
                    check_memory(tensor)
                address_bits |= address
                addresses.append(address)
                key.append(tensor.dtype)
        if address_bits % ALIGNMENT:
            key.extend([address is None or address % ALIGNMENT == 0 for address in addresses])
        outputs = [make() for make in self.makers]
        if self.zeroed:
            outputs += numbers(self.device, self.zeroed)
        addresses += [tensor.data_ptr() for tensor in outputs]
        buffers = (None, *tensors, *outputs)
        starters = self.starters.get(tuple(key))
        if starters is None:
            # The starter of every step, and the function that selects its arguments.
            pairs = zip(self.launches, self.picks, strict=True)
            starters = tuple((starter(launch, pick(buffers)), pick) for launch, pick in pairs)
            self.starters[tuple(key)] = starters
        for begin, pick in starters:
            begin(self.index, pick(addresses), pick(buffers), ())
        return self.results(buffers)

    def _listed(self, first: Symbol, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Append the program to the instructions of a pass; return its result symbols."""
        instructions = first.instructions
        outputs = [instructions.append_allocation(maker) for maker in self.makers]
        buffers = (None, *inputs, *outputs, *instructions.numbers(self.zeroed))
        for launch, pick in zip(self.launches, self.picks, strict=True):
            instructions.start(launch, pick(buffers))
        return tuple([instructions.symbol(result) for result in self.results(buffers)])


class _Planned(NamedTuple):
    """The execution of a program on a device. Index 0 is None, then the arguments, allocated buffers, and numbers.

    Attributes:
        launches: The launches of the steps.
        makers: Functions that allocate the buffers.
        zeroed: For every number, float32 [1], whether it must be 0; all numbers are allocated together.
        places: For every step, its kernel's argument indices.
        results: Result indices.
    """

    launches: tuple[Launch, ...]
    makers: tuple[Callable[[], Tensor], ...]
    zeroed: tuple[bool, ...]
    places: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]


def _plan_program(program: Program, device: torch.device) -> _Planned:
    steps, results = program.places
    input_count = len(program.inputs) + len(program.into)
    makers: list[Callable[[], Tensor]] = []
    zeroed: list[bool] = []
    # By a program's output index: a buffer index or, from -1 down, a number index.
    outputs: list[int] = []
    for (launch, _), caller_allocated in zip(steps, program.caller_allocated, strict=True):
        for index, output in enumerate(launch.outputs):
            if output is None or (caller_allocated and caller_allocated[index]):
                outputs.append(caller_allocated[index] if caller_allocated else 0)
            elif (
                output.shape == (1,) and output.dtype == "float32" and output.begins in (None, 0.0)
            ):
                zeroed.append(output.begins is not None)
                outputs.append(-len(zeroed))
            else:
                makers.append(_maker(output, device))
                outputs.append(input_count + len(makers))
    next_index = input_count + len(makers)
    where = [
        *range(input_count + 1),
        *[index if index >= 0 else next_index - index for index in outputs],
    ]
    places: list[tuple[int, ...]] = []
    first = input_count + 1
    for launch, inputs in steps:
        last = first + len(launch.outputs)
        places.append((*[where[index] for index in inputs], *where[first:last]))
        first = last
    return _Planned(
        tuple(launch for launch, _ in steps),
        tuple(makers),
        tuple(zeroed),
        tuple(places),
        tuple(where[index] for index in results),
    )


def _index_getter(places: tuple[int, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return the function that returns the elements of a sequence at these indices."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda sequence: tuple([sequence[position] for position in places])


def run_program_into(
    launch: Launch, tensors: Sequence[Tensor | None], device: torch.device
) -> None:
    """Start the launch on its inputs, followed by the outputs, which the caller has allocated on the device."""
    if device.type == "cuda" and not is_current_device(device.index):
        with torch.cuda.device(device):
            start(launch, tensors, device.index)
    else:
        start(launch, tensors, device.index)


def output_makers(launch: Launch, device: torch.device) -> list[Any]:
    """Return functions without arguments that allocate the launch's outputs on a device; None for absent outputs."""
    return [None if output is None else _maker(output, device) for output in launch.outputs]


def _maker(output: Output, device: torch.device) -> Callable[[], Tensor]:
    shape, dtype, begins = output.shape, output.dtype, output.begins
    assert shape is not None and dtype is not None, (
        "a caller that knows the shape allocates the output: use run_program_into"
    )
    if begins is not None:
        assert not output.transposed
        if begins == 0 and shape == (1,) and dtype == "float32":
            return functools.partial(zero, device)
        return functools.partial(torch.full, shape, begins, dtype=_DTYPES[dtype], device=device)
    if output.transposed:
        rows, columns = shape
        view_shape, strides = (columns, rows), (1, columns)
    else:
        view_shape, strides = (
            shape,
            tuple(
                prod(max(extent, 1) for extent in shape[axis + 1 :]) for axis in range(len(shape))
            ),
        )
    # On the host: 0.8 us, torch.empty takes 1.2 us.
    return functools.partial(
        torch.empty_strided, view_shape, strides, dtype=_DTYPES[dtype], device=device
    )


def uniform(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Random float32 numbers in [0, 1) on the device of a tensor, from torch's generator."""
    draw = functools.partial(torch.rand, shape, dtype=torch.float32, device=like.device)
    if type(like) is Symbol:  # a pass that is being listed draws in every call
        layout = TensorLayout.contiguous(shape, torch.float32)
        return like.instructions.apply(lambda: (draw(),), (), (layout,))[0]
    return draw()


def rows_dense(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy unless its last axis is contiguous; its rows may have any stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@functools.cache
def processors(device: int) -> Processors:
    """Return the multiprocessors of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return Processors(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def unsupported_elementwise(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Return the reason why a Triton kernel on 16- and 32-bit floats is unsupported on this device, or None."""
    if device.type != "cuda":
        return f"it needs a CUDA device, the tensors are on {device.type}"
    if (reason := unavailable_reason(current_hardware())) is not None:
        return reason
    for dtype in dtypes:
        if dtype not in DTYPE_NAMES:
            return f"a tensor is {dtype}; supported: float32, float16 and bfloat16"
    return current_hardware().lacks("triton kernels")


def unsupported_casts(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why Triton casts to a dtype do not match the reference's bits on this device, or None."""
    if device.type != "cuda":
        return f"it needs a CUDA device, the values are on {device.type}"
    if (reason := unavailable_reason(current_hardware())) is not None:
        return reason
    if dtype not in DTYPE_NAMES:
        return f"{dtype}; supported: bfloat16, float16 and float32"
    return current_hardware().lacks("cast kernels")


class TorchOperator(NamedTuple):
    """A torch operator, and its result allocation; both take the schema's arguments."""

    call: Callable[..., Any]
    results: Callable[..., Any]

    def given(self, **constants: Any) -> Operator:
        """Return the operator for one request, whose properties are these arguments."""
        return Operator(
            functools.partial(self.call, **constants), functools.partial(self.results, **constants)
        )


def operator(schema: str, eager: Callable[..., Any], results: Callable[..., Any]) -> TorchOperator:
    """Register transformer_engine::schema, which a tracing compiler does not trace: it runs `eager`, on a GPU.

    Args:
        schema: Operator schema.
        eager: The implementation.
        results: Allocates tensors with the shapes and dtypes that `eager` returns, without computing them.
    """
    return TorchOperator(
        define_operator("transformer_engine", schema, "cuda", eager, results), results
    )
