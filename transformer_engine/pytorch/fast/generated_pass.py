"""Generate Python source for pass instructions: results = generated(given) allocates, launches, multiplies.

The source of the function is generated from the instructions. Handles, dtypes and other objects are names; shapes,
strides, numbers and flags are literals. Every buffer is a local variable that is deleted after its last reader.
Small buffers in a pass share one allocation, because an allocation takes as long as half a launch.

Source is generated because a loop over closures takes twice as long: for a Linear forward pass under current scaling
(four kernels, a product) 16 us instead of 8.4, with launches that do nothing (`benchmarks/pretended_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.kernels.launch import ALIGNMENT, Handle, starter
from ..runtime.device import only_device
from ..runtime.zeros import numbers
from .scratch_plan import Lifetime, plan_scratch
from .symbols import (
    Allocate,
    AllocateScalars,
    Apply,
    Instructions,
    Multiply,
    NotRecordable,
    Start,
    Symbol,
    TensorLayout,
)

# An allocation takes 3.3 us on an H200's host, a launch 5 us. Larger passes wait for the GPU, and for memory.
_MAX_SCRATCH = 1 << 20
_NUM_SCALE_POINTERS = 2  # leading product pointers that need less alignment than a matrix

Generated = Callable[[list[Any]], "tuple[Any, ...] | None"]


def generate(instructions: Instructions, results: Sequence[Symbol | None]) -> Generated:
    """Return generated(given) -> results.

    The function returns None, with nothing done, if a given tensor is not aligned or its device is
    not the current one. It empties the list of given tensors, so that it holds the only references
    to tensors that a graph node has released.

    Raises:
        NotRecordable: Triton's calling convention is unknown, or a result is a part of a buffer.
    """
    return _Writer(instructions, results).compile()


class _Writer:
    """The source of a generated function, and the objects that its names refer to."""

    def __init__(self, instructions: Instructions, results: Sequence[Symbol | None]):
        self.instructions = instructions
        # Tensors that the pass returns: a buffer, in its original layout or in another one.
        self.results = [
            None if result is None else (result.buffer, result.layout) for result in results
        ]
        self.names: dict[str, Any] = {"empty": torch.empty_strided, "device": instructions.device}
        self.num_inputs = len(instructions.inputs)
        self.handles = _handles(instructions)
        self.named: dict[int, str] = {}
        self.last = self._last_readers()
        self.layouts = self._allocation_layouts()
        self.scratch, self.scratch_bytes = self._scratch_plan()

    def _last_readers(self) -> dict[int, int]:
        """Index of the last instruction that reads each buffer that is not a result."""
        returned = {result[0] for result in self.results if result is not None}
        last: dict[int, int] = {}
        for number, step in enumerate(self.instructions.steps):
            last.update(
                (buffer, number) for buffer in _buffers_used(step) if buffer not in returned
            )
        return last

    def _allocation_layouts(self) -> dict[int, TensorLayout]:
        """The layout in which each buffer is allocated: the result's, if it is returned in one layout."""
        result_layouts: dict[int, set[TensorLayout]] = {}
        for result in self.results:
            if result is not None:
                result_layouts.setdefault(result[0], set()).add(result[1])
        layouts: dict[int, TensorLayout] = {}
        for step in self.instructions.steps:
            if not isinstance(step, Allocate) or step.make is not None:
                continue
            layouts[step.buffer] = recorded = step.layout
            returned = result_layouts.get(step.buffer, set())
            if len(returned) == 1:
                (layout,) = returned
                if layout.dtype is recorded.dtype and _span(layout) == _span(recorded):
                    layouts[step.buffer] = layout
        return layouts

    def _scratch_plan(self) -> tuple[dict[int, int], int]:
        """Offsets of small buffers that are not results in one shared allocation, and its bytes."""
        passed_as_tensors = {
            argument[0]
            for step in self.instructions.steps
            if isinstance(step, Apply)
            for argument in step.arguments
            if argument is not None
        }
        small: list[Lifetime] = []
        for number, step in enumerate(self.instructions.steps):
            if (
                not isinstance(step, Allocate)
                or step.make is not None
                or step.buffer not in self.last
            ):
                continue
            size = _span(step.layout) * step.layout.dtype.itemsize
            if step.buffer not in passed_as_tensors and size <= _MAX_SCRATCH // 4:
                small.append(Lifetime(step.buffer, number, self.last[step.buffer], size))
        offsets, total = plan_scratch(small)
        return ({}, 0) if len(small) < 2 or total > _MAX_SCRATCH else (offsets, total)

    def compile(self) -> Generated:
        delete_lines: dict[
            int, list[str]
        ] = {}  # lines that delete buffers, by the instruction before them
        for buffer, number in self.last.items():
            if buffer not in self.scratch:
                delete_lines.setdefault(number, []).append(f"del b{buffer}")
        body: list[str] = []
        for number, step in enumerate(self.instructions.steps):
            body += [*self._emit(step), *delete_lines.get(number, ())]
        input_names = [f"b{i}" for i in range(self.num_inputs)]
        return_values = ", ".join([self._return_value(result) for result in self.results])
        present_inputs = [
            i for i in range(self.num_inputs) if self.instructions.layouts[i] is not None
        ]
        source = "\n    ".join(
            [
                "def generated(given):",
                f"{', '.join(input_names)}, = given",
                *[f"p{i} = b{i}.data_ptr()" for i in present_inputs],
                *self._emit_checks(present_inputs),
                "given.clear()",
                *self._emit_context(),
                *body,
                f"return ({return_values},)",
            ]
        )
        exec(
            compile(source, f"<a pass of {len(self.instructions.steps)} instructions>", "exec"),
            self.names,
        )
        generated = self.names.pop("generated")
        generated.source = source
        return generated

    def _emit_checks(self, present_inputs: list[int]) -> list[str]:
        """Return the checks that depend on pointers, which run before anything else."""
        by_alignment: dict[int, list[str]] = {}
        for i in present_inputs:
            if self.instructions.is_aligned(i):
                # Products may rely on a larger alignment than kernels.
                product_alignments = [
                    step.plan.library_call().alignment
                    for step in self.instructions.steps
                    if isinstance(step, Multiply)
                    and i in (step.left, step.right, *step.pointers[_NUM_SCALE_POINTERS:])
                ]
                by_alignment.setdefault(max([ALIGNMENT, *product_alignments]), []).append(f"p{i}")
        checks = []
        for alignment, addresses in by_alignment.items():
            checks += [f"if ({' | '.join(addresses)}) & {alignment - 1}:", "    return None"]
        if self.instructions.device.type == "cuda" and not only_device():
            self.names["current_device"] = torch._C._cuda_getDevice
            checks += [
                f"if current_device() != {self.instructions.device.index}:",
                "    return None",
            ]
        return checks

    def _emit_context(self) -> list[str]:
        """Return the lines that read the current stream and allocate the shared buffers."""
        launches = [step for step in self.instructions.steps if isinstance(step, Start)]
        plans = [step.plan for step in self.instructions.steps if isinstance(step, Multiply)]
        if not launches and not plans:
            return self._emit_scalars()
        calls = [
            step.plan.library_call()
            for step in self.instructions.steps
            if isinstance(step, Multiply)
        ]
        current_stream = (
            calls[0].current_stream if calls else self.handles[id(launches[0])].current_stream
        )
        self.names["current_stream"] = current_stream
        index = plans[0].problem.device if plans else self.instructions.device.index
        lines = [f"stream = current_stream({index})"]
        if plans:
            self.names["workspace_of"] = calls[0].workspace
            lines.append(f"workspace = workspace_of({index}, stream)")
        if self.scratch_bytes:
            self.names["uint8"] = torch.uint8
            lines.append(
                f"scratch = empty(({self.scratch_bytes},), (1,), dtype=uint8, device=device)"
            )
            lines.append("of_scratch = scratch.data_ptr()")
        return lines + self._emit_scalars()

    def _emit_scalars(self) -> list[str]:
        """Return the lines that allocate all numbers at once: they are slots in an existing tensor."""
        lines: list[str] = []
        steps = [step for step in self.instructions.steps if isinstance(step, AllocateScalars)]
        buffers = [buffer for step in steps for buffer in step.buffers]
        if buffers:
            self.names["numbers"] = numbers
            zeroed = tuple([zero for step in steps for zero in step.zeroed])
            lines.append(
                f"{''.join(f'b{buffer}, ' for buffer in buffers)}= numbers(device, {zeroed})"
            )
        return lines + [f"p{buffer} = b{buffer}.data_ptr()" for buffer in buffers]

    def _emit(self, step: Any) -> list[str]:
        """Return the lines for one instruction."""
        if isinstance(step, Allocate) and step.buffer in self.scratch:
            return [f"p{step.buffer} = of_scratch + {self.scratch[step.buffer]}"]
        if isinstance(step, Allocate):
            if step.make is not None:
                value = f"{self._name(step.make)}()"
            else:
                shape, strides, dtype = self.layouts[step.buffer]
                value = f"empty({shape}, {strides}, dtype={self._name(dtype)}, device=device)"
            return [f"b{step.buffer} = {value}", f"p{step.buffer} = b{step.buffer}.data_ptr()"]
        if isinstance(step, AllocateScalars):
            return []
        if isinstance(step, Apply):
            return self._emit_apply(step)
        if isinstance(step, Multiply):
            return self._emit_multiply(step)
        assert isinstance(step, Start)
        handle = self.handles[id(step)]
        before = ", ".join(map(str, handle.grid))
        values = [self._constant(value) for value in handle.middle]
        values += [self._address(slot) for slot in step.buffers]
        values += [self._constant(value) for value in handle.arguments]
        return [f"{self._name(handle.run)}({before}, stream, {', '.join(values)})"]

    def _emit_apply(self, step: Apply) -> list[str]:
        arguments = [self._emit_argument(argument) for argument in step.arguments]
        result_names = "".join([f"b{buffer}, " for buffer in step.results])
        call = f"{self._name(step.function)}({', '.join(arguments)})"
        tensors = [
            buffer
            for buffer, is_tensor in zip(step.results, step.is_tensor, strict=True)
            if is_tensor
        ]
        return [
            f"{result_names}= {call}" if result_names else call,
            *[f"p{b} = b{b}.data_ptr()" for b in tensors],
        ]

    def _emit_argument(self, argument: tuple[int, TensorLayout | None] | None) -> str:
        if argument is None:
            return "None"
        buffer, layout = argument
        # An object from another function has no layout.
        return f"b{buffer}" if layout is None else self._return_value((buffer, layout))

    def _emit_multiply(self, step: Multiply) -> list[str]:
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
        for i, (slot, number) in enumerate(zip(step.pointers, call.attributes, strict=False)):
            if slot is not None:
                lines.append(f"pointers[{i}] = {self._address(slot)}")
                lines.append(f"{attribute}(operation, {number}, at + {8 * i}, 8)")
        left, right, result = (self._address(slot) for slot in (step.left, step.right, step.result))
        handle, alpha, beta = call.scalars
        of_left, of_right, layout, algorithm = call.layouts
        lines.append(
            f"{self._name(call.matmul)}({handle}, operation, {alpha}, {left}, {of_left}, {right}, {of_right}, {beta}, "
            f"{result}, {layout}, {result}, {layout}, {algorithm}, workspace, {call.workspace_bytes}, stream)"
        )
        return [*lines, f"{push}(descriptor)"]

    def _address(self, buffer: int | None) -> str:
        return "None" if buffer is None else f"p{buffer}"

    def _return_value(self, result: tuple[int, TensorLayout] | None) -> str:
        if result is None:
            return "None"
        buffer, layout = result
        recorded_layout = self.instructions.layouts[buffer]
        assert recorded_layout is not None
        allocated_layout = self.layouts.get(buffer, recorded_layout)
        if layout == allocated_layout:
            return f"b{buffer}"
        same_size = allocated_layout.dtype.itemsize == layout.dtype.itemsize
        as_dtype = (
            "" if layout.dtype is allocated_layout.dtype else f".view({self._name(layout.dtype)})"
        )
        if same_size and allocated_layout == layout._replace(dtype=allocated_layout.dtype):
            return f"b{buffer}{as_dtype}"  # codes, as bytes or as FP8
        if same_size and layout == TensorLayout(
            allocated_layout.shape[::-1], allocated_layout.strides[::-1], layout.dtype
        ):
            # Column-wise codes of a cached weight, which are stored by rows.
            return f"b{buffer}.t(){as_dtype}"
        tensor = torch.empty_strided(
            allocated_layout.shape,
            allocated_layout.strides,
            dtype=allocated_layout.dtype,
            device="meta",
        )
        try:
            is_view = TensorLayout.of(tensor.view(layout.shape)) == layout
        except RuntimeError:
            is_view = False
        if not is_view:
            raise NotRecordable("a result is a part of a tensor")
        return f"b{buffer}.view({layout.shape})"

    def _constant(self, value: Any) -> str:
        """Return a literal for a number, a flag or None, and a name for any other object."""
        return repr(value) if value is None or type(value) in (bool, int) else self._name(value)

    def _name(self, value: Any) -> str:
        name = self.named.get(id(value))
        if name is None:
            name = self.named[id(value)] = f"c{len(self.named)}"
            self.names[name] = value
        return name


def _handles(instructions: Instructions) -> dict[int, Handle]:
    """Return the compiled kernel per launch, by instruction identity.

    Triton specializes a kernel on dtypes and alignment, so that small tensors can represent buffers not yet allocated.
    """
    stand_ins: dict[torch.dtype, Tensor] = {}
    handles: dict[int, Handle] = {}
    for step in instructions.steps:
        if not isinstance(step, Start):
            continue
        tensors: list[Tensor | None] = []
        for buffer in step.buffers:
            layout = None if buffer is None else instructions.layouts[buffer]
            if buffer is None or layout is None:
                tensors.append(None)
            elif buffer < len(instructions.inputs):
                tensors.append(instructions.inputs[buffer])
            else:
                if layout.dtype not in stand_ins:
                    stand_ins[layout.dtype] = torch.empty(
                        ALIGNMENT, dtype=layout.dtype, device=instructions.device
                    )
                tensors.append(stand_ins[layout.dtype])
        handle = starter(step.launch, tensors)
        if not isinstance(handle, Handle):
            raise NotRecordable("Triton's calling convention is not known")
        handles[id(step)] = handle
    return handles


def _buffers_used(step: Any) -> list[int]:
    """Return the buffers whose addresses an instruction uses, including its own results."""
    if isinstance(step, Start):
        return [buffer for buffer in step.buffers if buffer is not None]
    if isinstance(step, Multiply):
        return [b for b in (step.left, step.right, step.result, *step.pointers) if b is not None]
    if isinstance(step, Apply):
        return [argument[0] for argument in step.arguments if argument is not None] + list(
            step.results
        )
    return list(step.buffers) if isinstance(step, AllocateScalars) else [step.buffer]


def _span(layout: TensorLayout) -> int:
    """Return the span of a layout in elements, stride gaps included."""
    reach = [(size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True)]
    return sum(reach) + 1
