"""results = generated(given): the instructions of a pass as one function that allocates, launches and multiplies.

The source of the function is generated from the instructions. Handles, dtypes and other objects are names; shapes,
strides, numbers and flags are literals. Every buffer is a local variable that is deleted after its last reader. Small
buffers of a pass share one allocation, because an allocation takes as long as half a launch.

Source is generated because a loop over closures takes twice as long: for the forward pass of a Linear under current
scaling (four kernels, a product) 16 us instead of 8.4, with launches that do nothing (`benchmarks/pretended_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.formats import round_up
from ...common.kernels.launch import ALIGNMENT, Handle, starter
from ..runtime.device import only_device
from ..runtime.zeros import numbers
from .symbols import (
    Allocated,
    Applied,
    Called,
    Form,
    Instructions,
    Multiplied,
    NotListed,
    Numbers,
    Started,
    Symbol,
)

# An allocation takes 3.3 us on an H200's host, a launch 5 us. Larger passes wait for the GPU, and for memory.
_SMALL = 1 << 20
_SCALES = 2  # number of leading pointers of a product that need less alignment than a matrix

Generated = Callable[[list[Any]], "tuple[Any, ...] | None"]


class Result(NamedTuple):
    """A tensor that a pass returns: a buffer, in its original form or in another one."""

    buffer: int
    form: Form


def generate(instructions: Instructions, results: Sequence[Symbol | None]) -> Generated:
    """Return generated(given) -> results.

    The function returns None, with nothing done, if a given tensor is not aligned or its device is not the current
    one. It empties the list of given tensors, so that it holds the only references to tensors that a node of the
    graph has released.

    Raises:
        NotListed: Triton's calling convention is unknown, or a result is a part of a buffer.
    """
    return _Writer(instructions, results).function()


class _Writer:
    """The source of a generated function, and the objects that its names refer to."""

    def __init__(self, instructions: Instructions, results: Sequence[Symbol | None]):
        self.instructions = instructions
        self.results = [None if result is None else Result(result.buffer, result.form) for result in results]
        self.names: dict[str, Any] = {"empty": torch.empty_strided, "device": instructions.device}
        self.given = len(instructions.given)
        self.handles = _handles(instructions)
        self.named: dict[int, str] = {}
        # The index of the last instruction that reads each buffer that is not a result.
        returned = {result.buffer for result in self.results if result is not None}
        self.last: dict[int, int] = {}
        for number, step in enumerate(instructions.steps):
            self.last.update((buffer, number) for buffer in _read(step) if buffer not in returned)
        # Each buffer is allocated in the form of the result, if it is returned in one form.
        made = {step.buffer: step.form for step in instructions.steps if isinstance(step, Allocated)}
        wanted: dict[int, set[Form]] = {}
        for result in self.results:
            if result is not None:
                wanted.setdefault(result.buffer, set()).add(result.form)
        self.forms = dict(made)
        for buffer, of_buffer in wanted.items():
            if buffer in made and len(of_buffer) == 1:
                (form,) = of_buffer
                if form.dtype is made[buffer].dtype and _elements(form) == _elements(made[buffer]):
                    self.forms[buffer] = form
        # The offsets of small buffers that are not results in one shared allocation.
        as_tensors = {
            argument[0]
            for step in self.instructions.steps
            if isinstance(step, Applied)
            for argument in step.arguments
            if argument is not None
        }
        lives = [
            Life(step.buffer, number, self.last[step.buffer], _elements(step.form) * step.form.dtype.itemsize)
            for number, step in enumerate(self.instructions.steps)
            if isinstance(step, Allocated) and step.buffer in self.last and step.buffer not in as_tensors
        ]
        small = [life for life in lives if life.bytes <= _SMALL // 4]
        planned = plan_scratch(small)
        self.scratch = planned if len(small) > 1 and planned.bytes <= _SMALL else ScratchPlan({}, 0)

    def function(self) -> Generated:
        deleted: dict[int, list[str]] = {}  # lines that delete buffers, by the instruction before them
        for buffer, number in self.last.items():
            if buffer not in self.scratch.offsets:
                deleted.setdefault(number, []).append(f"del b{buffer}")
        body: list[str] = []
        for number, step in enumerate(self.instructions.steps):
            body += [*self._written(step), *deleted.get(number, ())]
        given = [f"b{i}" for i in range(self.given)]
        answers = ", ".join([self._return_value(result) for result in self.results])
        here = [i for i in range(self.given) if self.instructions.forms[i] is not None]
        source = "\n    ".join(
            [
                "def generated(given):",
                f"{', '.join(given)}, = given",
                *[f"p{i} = b{i}.data_ptr()" for i in here],
                *self._checks(here),
                "given.clear()",
                *self._context(),
                *body,
                f"return ({answers},)",
            ]
        )
        exec(compile(source, f"<a pass of {len(self.instructions.steps)} instructions>", "exec"), self.names)
        generated = self.names.pop("generated")
        generated.source = source
        return generated

    def _checks(self, given: list[int]) -> list[str]:
        """Return the checks that depend on pointers, which run before anything else."""
        by_alignment: dict[int, list[str]] = {}
        for i in given:
            if self.instructions.is_aligned(i):
                # Products may rely on a larger alignment than kernels.
                relied_on = [
                    step.plan.library_call().alignment
                    for step in self.instructions.steps
                    if isinstance(step, Multiplied) and i in (step.left, step.right, *step.pointers[_SCALES:])
                ]
                by_alignment.setdefault(max([ALIGNMENT, *relied_on]), []).append(f"p{i}")
        checks = []
        for alignment, addresses in by_alignment.items():
            checks += [f"if ({' | '.join(addresses)}) & {alignment - 1}:", "    return None"]
        if self.instructions.device.type == "cuda" and not only_device():
            self.names["current_device"] = torch._C._cuda_getDevice
            checks += [f"if current_device() != {self.instructions.device.index}:", "    return None"]
        return checks

    def _context(self) -> list[str]:
        """Return the lines that read the current stream and allocate the shared buffers."""
        started = [step for step in self.instructions.steps if isinstance(step, Started)]
        multiplied = [step.plan for step in self.instructions.steps if isinstance(step, Multiplied)]
        if not started and not multiplied:
            return self._numbers()
        calls = [step.plan.library_call() for step in self.instructions.steps if isinstance(step, Multiplied)]
        of_stream = calls[0].current_stream if calls else self.handles[id(started[0])].current_stream
        self.names["current_stream"] = of_stream
        index = multiplied[0].problem.device if multiplied else self.instructions.device.index
        lines = [f"stream = current_stream({index})"]
        if multiplied:
            self.names["workspace_of"] = calls[0].workspace
            lines.append(f"workspace = workspace_of({index}, stream)")
        if self.scratch.bytes:
            self.names["uint8"] = torch.uint8
            lines.append(f"scratch = empty(({self.scratch.bytes},), (1,), dtype=uint8, device=device)")
            lines.append("of_scratch = scratch.data_ptr()")
        return lines + self._numbers()

    def _numbers(self) -> list[str]:
        """Return the lines that allocate all numbers at once: they are slots of an existing tensor."""
        lines: list[str] = []
        steps = [step for step in self.instructions.steps if isinstance(step, Numbers)]
        buffers = [buffer for step in steps for buffer in step.buffers]
        if buffers:
            self.names["numbers"] = numbers
            zeroed = tuple([zero for step in steps for zero in step.zeroed])
            lines.append(f"{''.join(f'b{buffer}, ' for buffer in buffers)}= numbers(device, {zeroed})")
        return lines + [f"p{buffer} = b{buffer}.data_ptr()" for buffer in buffers]

    def _written(self, step: Any) -> list[str]:
        if isinstance(step, Allocated) and step.buffer in self.scratch.offsets:
            return [f"p{step.buffer} = of_scratch + {self.scratch.offsets[step.buffer]}"]
        if isinstance(step, Allocated):
            shape, strides, dtype = self.forms[step.buffer]
            value = f"empty({shape}, {strides}, dtype={self._name(dtype)}, device=device)"
            return [f"b{step.buffer} = {value}", f"p{step.buffer} = b{step.buffer}.data_ptr()"]
        if isinstance(step, Called):
            value = f"{self._name(step.make)}()"
            return [f"b{step.buffer} = {value}", f"p{step.buffer} = b{step.buffer}.data_ptr()"]
        if isinstance(step, Numbers):
            return []
        if isinstance(step, Applied):
            return self._applied(step)
        if isinstance(step, Multiplied):
            return self._multiplied(step)
        handle = self.handles[id(step)]
        before = ", ".join(map(str, handle.grid))
        values = [self._constant(value) for value in handle.middle]
        values += [self._address(place) for place in step.buffers]
        values += [self._constant(value) for value in handle.arguments]
        return [f"{self._name(handle.run)}({before}, stream, {', '.join(values)})"]

    def _applied(self, step: Applied) -> list[str]:
        arguments = [
            "None"
            if argument is None
            else f"b{argument[0]}"
            if argument[1] is None
            else self._return_value(Result(argument[0], argument[1]))
            for argument in step.arguments
        ]
        made = "".join([f"b{buffer}, " for buffer in step.results])
        call = f"{self._name(step.function)}({', '.join(arguments)})"
        tensors = [buffer for buffer, makes in zip(step.results, step.makes, strict=True) if makes]
        return [f"{made}= {call}" if made else call, *[f"p{b} = b{b}.data_ptr()" for b in tensors]]

    def _multiplied(self, step: Multiplied) -> list[str]:
        call = step.plan.library_call()
        pop, describe = self._name(call.idle.pop), self._name(call.describe)
        push, attribute = self._name(call.idle.append), self._name(call.set_attribute)
        lines = [
            "try:",
            f"    descriptor = {pop}()",
            "except IndexError:",
            f"    descriptor = {describe}()",
            "operation, pointers, at = descriptor",
        ]
        for i, (place, number) in enumerate(zip(step.pointers, call.attributes, strict=False)):
            if place is not None:
                lines.append(f"pointers[{i}] = {self._address(place)}")
                lines.append(f"{attribute}(operation, {number}, at + {8 * i}, 8)")
        left, right, result = (self._address(place) for place in (step.left, step.right, step.result))
        handle, alpha, beta = call.scalars
        of_left, of_right, layout, algorithm = call.layouts
        lines.append(
            f"{self._name(call.matmul)}({handle}, operation, {alpha}, {left}, {of_left}, {right}, {of_right}, {beta}, "
            f"{result}, {layout}, {result}, {layout}, {algorithm}, workspace, {call.workspace_bytes}, stream)"
        )
        return [*lines, f"{push}(descriptor)"]

    def _address(self, buffer: int | None) -> str:
        return "None" if buffer is None else f"p{buffer}"

    def _return_value(self, result: Result | None) -> str:
        if result is None:
            return "None"
        buffer, form = result
        there = self.instructions.forms[buffer]
        assert there is not None
        lies = self.forms.get(buffer, there)
        if form == lies:
            return f"b{buffer}"
        same_size = lies.dtype.itemsize == form.dtype.itemsize
        as_dtype = "" if form.dtype is lies.dtype else f".view({self._name(form.dtype)})"
        if same_size and lies == form._replace(dtype=lies.dtype):
            return f"b{buffer}{as_dtype}"  # codes, as bytes or as FP8
        if same_size and form == Form(lies.shape[::-1], lies.strides[::-1], form.dtype):
            return (
                f"b{buffer}.t(){as_dtype}"  # column-wise codes of a cached weight, which are stored by rows
            )
        tensor = torch.empty_strided(lies.shape, lies.strides, dtype=lies.dtype, device="meta")
        try:
            is_view = Form.of(tensor.view(form.shape)) == form
        except RuntimeError:
            is_view = False
        if not is_view:
            raise NotListed("a result is a part of a tensor")
        return f"b{buffer}.view({form.shape})"

    def _constant(self, value: Any) -> str:
        """Return a literal of a number, a flag or None, and the name of any other object."""
        return repr(value) if value is None or type(value) in (bool, int) else self._name(value)

    def _name(self, value: Any) -> str:
        name = self.named.get(id(value))
        if name is None:
            name = self.named[id(value)] = f"c{len(self.named)}"
            self.names[name] = value
        return name


def _handles(instructions: Instructions) -> dict[int, Handle]:
    """Return the compiled kernel of each launch, by the identity of its instruction.

    Triton specializes a kernel on dtypes and alignment, so that small tensors can represent buffers not yet allocated.
    """
    standing: dict[torch.dtype, Tensor] = {}
    handles: dict[int, Handle] = {}
    for step in instructions.steps:
        if not isinstance(step, Started):
            continue
        tensors: list[Tensor | None] = []
        for buffer in step.buffers:
            form = None if buffer is None else instructions.forms[buffer]
            if buffer is None or form is None:
                tensors.append(None)
            elif buffer < len(instructions.given):
                tensors.append(instructions.given[buffer])
            else:
                if form.dtype not in standing:
                    standing[form.dtype] = torch.empty(
                        ALIGNMENT, dtype=form.dtype, device=instructions.device
                    )
                tensors.append(standing[form.dtype])
        handle = starter(step.launch, tensors)
        if not isinstance(handle, Handle):
            raise NotListed("Triton's calling convention is not known")
        handles[id(step)] = handle
    return handles


def _read(step: Any) -> list[int]:
    """Return the buffers whose addresses an instruction reads, including its own results."""
    if isinstance(step, Started):
        return [buffer for buffer in step.buffers if buffer is not None]
    if isinstance(step, Multiplied):
        return [b for b in (step.left, step.right, step.result, *step.pointers) if b is not None]
    if isinstance(step, Applied):
        return [argument[0] for argument in step.arguments if argument is not None] + list(step.results)
    return list(step.buffers) if isinstance(step, Numbers) else [step.buffer]


def _elements(form: Form) -> int:
    """Return the number of elements from the first to the last of a form."""
    reach = [(size - 1) * stride for size, stride in zip(form.shape, form.strides, strict=True)]
    return sum(reach) + 1


_APART = 256  # bytes; the largest alignment that a product's algorithm requires


class Life(NamedTuple):
    """A buffer of this many bytes, from the step that allocates it to its last reader."""

    buffer: int
    first: int
    last: int
    bytes: int


class ScratchPlan(NamedTuple):
    """The offset of each buffer in one allocation of this many bytes."""

    offsets: dict[int, int]
    bytes: int


def plan_scratch(lives: Sequence[Life]) -> ScratchPlan:
    """Place buffers of a few steps in one allocation, at distinct offsets if their lifetimes overlap.

    Each buffer gets the lowest offset that is free during its whole lifetime, in the order of the first steps.
    """
    offsets: dict[int, int] = {}
    placed: list[Life] = []
    for life in sorted(lives, key=lambda life: life.first):
        taken = sorted(
            (offsets[other.buffer], offsets[other.buffer] + other.bytes)
            for other in placed
            if life.first <= other.last
        )
        offset = 0
        for begin, end in taken:
            if offset + life.bytes <= begin:
                break
            offset = max(offset, round_up(end, _APART))
        offsets[life.buffer] = offset
        placed.append(life)
    return ScratchPlan(offsets, max((offsets[life.buffer] + life.bytes for life in placed), default=0))
