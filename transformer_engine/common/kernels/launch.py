"""A kernel call as data, and the shortest way to start it: outputs = kernel[grid](inputs, outputs, scalars).

`kernel[grid](...)` costs 8-16 us of host time a call, because Triton binds and specialises every argument anew. A
`Launch` fixes the kernel, the grid, the scalars and the constants; what is left to vary is the tensors' dtypes
and which pointers are multiples of 16, so one dictionary look-up finds the compiled handle.

This module is the only one that touches Triton's private calling convention, which versions 3.6 to 3.9 share; with
another version, or under TRITON_INTERPRET=1, `start` takes the public `kernel[grid]`. Launch hooks
(`triton.knobs.runtime.launch_enter_hook`, as profilers set them) are called by the public form alone.

Compiled kernels are kept on disk by Triton itself, keyed by source, options and versions, in the user's own
TRITON_CACHE_DIR (~/.triton/cache by default).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import optional
from ..formats import E2M1, E4M3, E5M2, Element

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = Sequence[Tensor | None]
    Pointers = list[int | None]

_DTYPES = {E4M3.name: "float8_e4m3fn", E5M2.name: "float8_e5m2", E2M1.name: "uint8"}

_FAST_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
_DIRECT_VERSIONS = ("3.6",)
# Programs a dimension (CUDA C++ Programming Guide, compute capabilities).
LARGEST_GRID = (2**31 - 1, 65535, 65535)
ALIGNMENT = 16  # bytes; Triton compiles a kernel anew for pointers that are not multiples of it


def _missing() -> str | None:
    if not optional.installed("triton"):
        return "triton is not installed (pip install triton, on Linux)"
    return None


# A constant, so that a compiler tracing through `unsupported_reason` reads it as one.
MISSING: str | None = _missing()


def missing() -> str | None:
    """Why Triton cannot be used, None if it can; imports it, so that whoever asks has seen a GPU."""
    return optional.failure("triton", "jit") if MISSING is None else MISSING


@dataclass(frozen=True)
class Output:
    """A tensor that a launch makes: a pointer behind those of the inputs, which the kernel writes.

    shape        None: the record does not know it, and the caller makes the tensor
    dtype        torch's name of it; None: what the caller makes it
    transposed   callers see its .t()
    begins       what its elements must be when the kernel starts; None: anything
    """

    shape: tuple[int, ...] | None
    dtype: str | None
    transposed: bool = False
    begins: float | None = None


class AddressTable(NamedTuple):
    """An input of addresses, int64 [entries] or [entries, columns], whose tensors the caller keeps alive.

    place     which of the inputs it is
    columns   READ or WRITTEN, what the kernel does with the tensor at an address; NUMBER: no address
    """

    place: int
    columns: tuple[str, ...]


READ, WRITTEN, NUMBER = "read", "written", "number"


@dataclass(frozen=True, eq=False)
class Launch:
    """kernel[grid](*inputs, *outputs, *scalars, *constants), whatever the dtypes of the inputs.

    It names every tensor that the kernel writes, so that any framework can start it: what torch writes in place is to
    JAX an operand that a result aliases.

    outputs     what is made for the call, in the order of the kernel's arguments; None: not asked for
    scalars     run-time arguments; Triton specialises on their values, which is why they belong to the record
    constants   compile-time arguments
    registers   a thread starts with, which warps with parts of their own then share out; None: what the compiler takes
    dependent   may start before the launch in front of it has ended (programmatic dependent launch); the kernel
                waits before it reads what that one wrote
    fuses       a product and a sum behind it may become one fused multiply-add, which rounds once
    in_place    which of the inputs are written too, where they are given; a kernel gets them once
    tables      the inputs through which it reaches further tensors
    handles     the compiled kernel's starters, by what the record leaves open
    makers      what a framework keeps to make the outputs, by device

    ValueError for a grid that CUDA does not start: see LARGEST_GRID.
    """

    kernel: Any
    grid: tuple[int, int, int]
    outputs: tuple[Output | None, ...]
    scalars: tuple[int | float, ...]
    constants: tuple[Any, ...]
    warps: int
    registers: int | None = None
    dependent: bool = False
    fuses: bool = True
    in_place: tuple[int, ...] = ()
    tables: tuple[AddressTable, ...] = ()
    handles: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)
    makers: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for extent, limit in zip(self.grid, LARGEST_GRID, strict=True):
            if extent > limit:
                raise ValueError(
                    f"{self.kernel.fn.__name__} needs a grid of {self.grid} programs, CUDA starts at most "
                    f"{LARGEST_GRID}; split the batch"
                )

    @property
    def inputs(self) -> int:
        """How many inputs the kernel takes."""
        rest = len(self.outputs) + len(self.scalars) + len(self.constants)
        return len(self.kernel.arg_names) - rest


def codes_dtype(element: Element) -> str:
    """torch's name of the dtype that holds an element's codes."""
    return _DTYPES[element.name]


def start(launch: Launch, tensors: Tensors, device: int, made: Tensors = ()) -> Any:
    """Queue the kernel on the device's current stream, and answer what starts it; tensors are inputs, then outputs.

    The device must be the current one. A tensor that the kernel's constants make unnecessary is None. Outputs that
    were allocated as the record says may come as `made` instead: their dtypes and alignment are known.
    """
    pointers: Pointers = []
    key: list[Any] = [device]  # with everything that Triton specialises on and the record leaves open
    together = 0
    for tensor in tensors:
        if tensor is None:
            pointers.append(None)
            key.append(None)
        else:
            pointer = tensor.data_ptr()
            together |= pointer
            pointers.append(pointer)
            key.append(tensor.dtype)
    if together % ALIGNMENT:
        key.extend([pointer is None or pointer % ALIGNMENT == 0 for pointer in pointers])
    for tensor in made:
        pointers.append(None if tensor is None else tensor.data_ptr())
    handle = launch.handles.get(tuple(key))
    if handle is None:
        handle = launch.handles[tuple(key)] = _compile(launch, (*tensors, *made))
    handle(device, pointers, tensors, made)
    return handle


def starter(launch: Launch, tensors: Tensors) -> Any:
    """What `start` finds or compiles for tensors of these dtypes and alignment: f(device, pointers, tensors, made)."""
    return _compile(launch, tensors)


def _compile(launch: Launch, tensors: Tensors) -> Any:
    """A callable (device, pointers, tensors, made) that starts the kernel compiled for tensors of this alignment."""
    _check(launch, tensors)
    arguments = (*launch.scalars, *launch.constants)
    options = compile_options(launch.warps, launch.registers, launch.fuses)
    if launch.dependent:
        options["launch_pdl"] = True
    import triton

    # Under TRITON_INTERPRET=1 kernels are of another class.
    if not (_calling_convention_is_known() and isinstance(launch.kernel, triton.JITFunction)):

        def start_publicly(device: int, pointers: Pointers, tensors: Tensors, made: Tensors) -> None:
            launch.kernel[launch.grid](*tensors, *made, *arguments, **options)

        return start_publicly

    compiled = launch.kernel.warmup(*tensors, *arguments, grid=launch.grid, **options)
    run = compiled.run  # reading it loads the module; `function` is unset before
    before = (compiled.function,)
    after = (compiled.packed_metadata, None, None, None)
    if direct := _without_wrapper(run):
        run, *flags = direct
        before = (*before, *flags)
    return Handle(run, launch.grid, _stream_of(), (*before, *after), arguments)


def compile_options(warps: int, registers: int | None, fuses: bool = True) -> dict[str, Any]:
    """Triton's compile options of a launch; see `Launch`."""
    options: dict[str, Any] = {"num_warps": warps, "num_stages": 1}
    if not fuses:
        options["enable_fp_fusion"] = False
    return options if registers is None else options | {"maxnreg": registers}


class Handle:
    """A compiled kernel: run(*grid, stream, *middle, *pointers, *arguments)."""

    __slots__ = ("arguments", "current_stream", "grid", "middle", "run")

    def __init__(
        self,
        run: Any,
        grid: tuple[int, int, int],
        current_stream: Any,
        middle: tuple[Any, ...],
        arguments: tuple[Any, ...],
    ):
        self.run = run
        self.grid = grid
        self.current_stream = current_stream
        self.middle = middle
        self.arguments = arguments

    def __call__(self, device: int, pointers: Pointers, tensors: Tensors, made: Tensors) -> None:
        columns, rows, planes = self.grid
        stream = self.current_stream(device)
        self.run(columns, rows, planes, stream, *self.middle, *pointers, *self.arguments)


def _check(launch: Launch, tensors: Tensors) -> None:
    """Raise AssertionError unless tensors are what the record declares: as many, and outputs of its dtypes."""
    name = launch.kernel.fn.__name__
    inputs = launch.inputs
    expected = inputs + len(launch.outputs)
    assert len(tensors) == expected, f"{name} takes {expected} tensors, it was given {len(tensors)}"
    for place, output in enumerate(launch.outputs, inputs):
        tensor = tensors[place]
        if output is None or tensor is None:
            assert output is tensor, (
                f"{name}: argument {place} is {output} in the record, {tensor} in the call"
            )
        elif output.dtype is not None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            assert dtype == output.dtype, (
                f"{name} writes {output.dtype} to argument {place}, which is {dtype}"
            )


def _without_wrapper(launcher: Any) -> tuple[Any, ...] | None:
    """Triton 3.6's compiled launcher and what its Python wrapper would pass to it; None where that is not known.

    The wrapper allocates scratch memory, which our kernels do not use.
    """
    if not version("triton").startswith(_DIRECT_VERSIONS) or not hasattr(launcher, "launch"):
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    return (launcher.launch, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)


@functools.cache
def _calling_convention_is_known() -> bool:
    try:
        return version("triton").startswith(_FAST_VERSIONS)
    except PackageNotFoundError:
        return False  # a triton on the path without metadata: a development build


def current_stream(device: int) -> int:
    """The handle of the device's current CUDA stream."""
    return _stream_of()(device)


@functools.cache
def _stream_of() -> Any:
    from triton.runtime import driver

    return driver.active.get_current_stream
