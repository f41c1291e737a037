"""A kernel call as data, and its fastest launch: outputs = kernel[grid](inputs, outputs, scalars).

`kernel[grid](...)` costs 8-16 us of host time per call, because Triton binds and specializes every argument again. A
`Launch` fixes the kernel, the grid, the scalars and the constants. Only the tensors' dtypes and the alignment of their
pointers to 16 bytes vary between calls, so that one dict access finds the compiled kernel.

This is the only module that uses Triton's private calling convention, which versions 3.6 to 3.9 share. With another
version, or under TRITON_INTERPRET=1, `start` uses the public `kernel[grid]`. Only the public form calls launch hooks
(`triton.knobs.runtime.launch_enter_hook`), which profilers set.

Triton itself caches compiled kernels on disk, keyed by source, options and versions, in the user's TRITON_CACHE_DIR
(~/.triton/cache by default).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import optional
from ..formats import E2M1, E4M3, E5M2, Element
from ..hardware import NO_GPU, Hardware, hardware_named, nvidia
from ..numbers import with_article
from ..tracing import constant_while_tracing
from . import conversion

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = Sequence[Tensor | None]
    Pointers = list[int | None]

_DTYPES = {E4M3.name: "float8_e4m3fn", E5M2.name: "float8_e5m2", E2M1.name: "uint8"}

_FAST_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
_DIRECT_VERSIONS = ("3.6",)
# Programs per dimension (CUDA C++ Programming Guide, compute capabilities).
LARGEST_GRID = (2**31 - 1, 65535, 65535)
# Limit for rows, columns and strides of a matrix whose kernels compute offsets inside a tile in 32 bits: below it, the
# offsets of 256 rows are below 2^31.
LARGEST_EXTENT = 1 << 23
MEASURED_MEMORY = 227 << 10  # shared memory on an H200, on which plans were measured
MEASURED_THREADS = 2048  # threads per H200 multiprocessor
_EXCHANGE_BYTES = 20 << 10  # 16 KiB of codes, and buffers for reductions
_GLUON = "triton.experimental.gluon.language.nvidia.hopper"
ALIGNMENT = 16  # bytes; Triton compiles a kernel again for pointers that are not multiples of this


def _missing() -> str | None:
    if not optional.installed("triton"):
        return "triton is not installed (pip install triton, on Linux)"
    return None


# A constant, because a compiler that traces `unsupported_reason` treats it as one.
MISSING: str | None = _missing()


def unavailable_reason(hardware: Hardware) -> str | None:
    """Reason why Triton is unavailable on a GPU, or None.

    Triton is imported only after a GPU has been found.
    """
    reason = optional.failure("triton", "jit") if MISSING is None else MISSING
    if reason is not None:
        return reason
    return optional.triton_problem(hardware, optional.release("triton"))


def gluon_missing(hardware: Hardware) -> str | None:
    """Reason why kernels in Gluon, which are for Hopper, do not run on a GPU, or None."""
    if (reason := _gluon_reason(hardware, MISSING, optional.release("triton"))) is not None:
        return reason
    return "TRITON_INTERPRET=1: Gluon has no interpreter" if _is_interpreted() else None


@functools.cache  # called for each cast of grouped rows
def _gluon_reason(
    hardware: Hardware, triton_missing: str | None, release: tuple[int, int]
) -> str | None:
    if (
        reason := unavailable_reason(hardware) or hardware.lacks("hopper instructions")
    ) is not None:
        return reason
    if (reason := optional.gluon_problem(release)) is not None:
        return reason
    return optional.failure(_GLUON, "warpgroup_mma", "tma", "mbarrier")


@constant_while_tracing
def _is_interpreted() -> bool:
    """Whether Triton interprets kernels instead of compiling them."""
    from triton import knobs

    return knobs.runtime.interpret


class Machine(NamedTuple):
    """Multiprocessors, shared memory per program in bytes, bytes read per tile element, threads per processor."""

    processors: int
    shared_memory: int
    bytes_read: int
    threads: int = 2048

    @property
    def fits_measured_plans(self) -> bool:
        """Whether the programs that were measured on an H200 fit."""
        return self.shared_memory >= MEASURED_MEMORY and self.threads >= MEASURED_THREADS

    def stages(self, tile: int, stages: int) -> int:
        """Most pipeline stages, at most `stages`, for tiles with this many elements.

        All stages but the current one are in the shared memory, which also exchanges results between threads.
        """
        room = (self.shared_memory - _EXCHANGE_BYTES) // (tile * self.bytes_read)
        return max(1, min(stages, room + 1))


@dataclass(frozen=True)
class Output:
    """A tensor that a launch allocates and the kernel writes; its pointer follows the input pointers.

    Attributes:
        shape: None: unknown to the record; the caller allocates the tensor.
        dtype: torch's dtype name; None: the caller's tensor dtype.
        transposed: Callers get its .t().
        begins: Initial element value when the kernel starts; None: any.
    """

    shape: tuple[int, ...] | None
    dtype: str | None
    transposed: bool = False
    begins: float | None = None


class AddressTable(NamedTuple):
    """An address input, int64 [entries] or [entries, columns]; the caller keeps their tensors alive.

    Attributes:
        place: Input index.
        columns: READ or WRITTEN, the kernel's access to the tensor at an address; NUMBER: not an address.
    """

    place: int
    columns: tuple[str, ...]


READ, WRITTEN, NUMBER = "read", "written", "number"


@dataclass(frozen=True, eq=False)
class Launch:
    """kernel[grid](*inputs, *outputs, *scalars, *constants), for inputs with any dtype.

    The record names every tensor that the kernel writes, so that any framework can start it: a tensor that torch writes
    in place is, in JAX, an operand that is aliased to a result.

    Attributes:
        outputs: Tensors that each call allocates, in the order of the kernel's arguments; None: not requested.
        scalars: Run-time arguments; part of the record, because Triton specializes on their values.
        constants: Compile-time arguments. In a kernel that converts FP8 codes, the last one is `conversion.NATIVE`,
            which the GPU's conversion replaces; any other conversion is used on every GPU.
        registers: Registers per thread at launch, which specialized warps then redistribute; None: the compiler's
            choice.
        dependent: May start before the previous launch has ended (programmatic dependent launch); the kernel waits
            before it reads the results of that launch.
        fuses: A product and a following sum may become one fused multiply-add, which rounds once.
        in_place: Indices of inputs that are also written, if present; they are passed once.
        cooperative: All programs run at the same time; the grid must fit the GPU.
        tables: Inputs with the addresses of further tensors.
        handles: Starters for the compiled kernel, by the properties that the record does not fix.
        makers: Output allocators, by device; filled by a framework.

    Raises:
        ValueError: CUDA cannot start the grid; see LARGEST_GRID.
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
    cooperative: bool = False
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
        """Number of kernel inputs."""
        rest = len(self.outputs) + len(self.scalars) + len(self.constants)
        return len(self.kernel.arg_names) - rest


def codes_dtype(element: Element) -> str:
    """torch's name for the dtype that stores an element's codes."""
    return _DTYPES[element.name]


def start(launch: Launch, tensors: Tensors, device: int, outputs: Tensors = ()) -> Any:
    """Launch the kernel on the device's current stream, and return its starter; tensors are inputs, then outputs.

    The device must be the current one. A tensor that the kernel does not need is None. Outputs that were allocated as
    the record declares can be passed as `outputs` instead, because their dtypes and alignment are known.
    """
    pointers: Pointers = []
    key: list[Any] = [
        device
    ]  # all properties on which Triton specializes and which the record does not fix
    address_bits = 0
    for tensor in tensors:
        if tensor is None:
            pointers.append(None)
            key.append(None)
        else:
            pointer = tensor.data_ptr()
            if not pointer:
                check_memory(tensor)
            address_bits |= pointer
            pointers.append(pointer)
            key.append(tensor.dtype)
    if address_bits % ALIGNMENT:
        key.extend([pointer is None or pointer % ALIGNMENT == 0 for pointer in pointers])
    for tensor in outputs:
        pointers.append(None if tensor is None else tensor.data_ptr())
    handle = launch.handles.get(tuple(key))
    if handle is None:
        handle = launch.handles[tuple(key)] = _compile(launch, (*tensors, *outputs))
    handle(device, pointers, tensors, outputs)
    return handle


def check_memory(tensor: Any) -> None:
    """Raise TypeError for a tensor without an address that has elements; a kernel would fault the device."""
    if tensor.numel():
        raise TypeError(
            f"a kernel reads {with_article(type(tensor))} of {tensor.numel()} elements, which has no memory of its "
            "own; call its dequantize() first"
        )


def starter(launch: Launch, tensors: Tensors) -> Any:
    """Get the starter f(device, pointers, tensors, made) that `start` uses for these dtypes and this alignment."""
    return _compile(launch, tensors)


def _compile(launch: Launch, tensors: Tensors) -> Any:
    """Build a callable (device, pointers, tensors, made) that starts the kernel compiled for this alignment."""
    _check(launch, tensors)
    dtypes = [
        None if tensor is None else str(tensor.dtype).removeprefix("torch.") for tensor in tensors
    ]
    names = launch.kernel.arg_names
    constants, as_bytes = conversion.resolve(
        names, launch.constants, _tensor_hardware(tensors), dtypes
    )
    arguments = (*launch.scalars, *constants)
    options = compile_options(launch.warps, launch.registers, launch.fuses)
    if launch.dependent:
        options["launch_pdl"] = True
    if launch.cooperative:
        options["launch_cooperative_grid"] = True
    import triton

    # Under TRITON_INTERPRET=1, kernels have another class.
    if not (_calling_convention_is_known() and isinstance(launch.kernel, triton.JITFunction)):

        def start_publicly(
            device: int, pointers: Pointers, tensors: Tensors, outputs: Tensors
        ) -> None:
            every = (*tensors, *outputs)
            launch.kernel[launch.grid](
                *(_bytes(every) if as_bytes else every), *arguments, **options
            )

        return start_publicly

    tensors = _bytes(tensors) if as_bytes else tensors
    compiled = launch.kernel.warmup(*tensors, *arguments, grid=launch.grid, **options)
    run = compiled.run  # reading it loads the module; `function` is unset before
    before = (compiled.function,)
    after = (compiled.packed_metadata, None, None, None)
    if direct := _unwrap_launcher(run):
        run, *flags = direct
        before = (*before, *flags)
    handle = Handle(run, launch.grid, _find_stream(), (*before, *after), arguments)
    return _with_scratch(handle) if compiled.metadata.global_scratch_size else handle


def _with_scratch(start: Callable[..., None]) -> Callable[..., None]:
    """Wrap a starter for a kernel with scratch memory, such as for copy-engine descriptors.

    Triton allocates it by a function that belongs to a context: backward-pass threads have another context, and the
    caller's own kernels keep the caller's function.
    """
    from triton import set_allocator

    def start_in_context(*arguments: Any) -> None:
        set_allocator(_scratch)
        start(*arguments)

    return lambda *arguments: copy_context().run(start_in_context, *arguments)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate bytes on the current device, in multiples of 512, which no kernel exceeds."""
    import torch

    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _tensor_hardware(tensors: Tensors) -> Hardware:
    """Hardware row for the tensors' GPU, which is the current one; a row without a GPU in the interpreter."""
    first = next((tensor for tensor in tensors if tensor is not None), None)
    if first is None or first.device.type != "cuda":
        return NO_GPU
    from triton.runtime import driver

    target = driver.active.get_current_target()
    if target.backend != "cuda":
        return hardware_named("amd", str(target.arch).split(":")[0])
    return nvidia(*divmod(target.arch, 10))


def _bytes(tensors: Tensors) -> list[Tensor | None]:
    """View one-byte tensors, such as FP8 codes, as uint8 for GPUs whose Triton has no FP8 types."""
    import torch

    return [
        tensor.view(torch.uint8) if tensor is not None and tensor.dtype.itemsize == 1 else tensor
        for tensor in tensors
    ]


def compile_options(warps: int, registers: int | None, fuses: bool = True) -> dict[str, Any]:
    """Triton's compile options for a launch; see `Launch`."""
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

    def __call__(self, device: int, pointers: Pointers, tensors: Tensors, outputs: Tensors) -> None:
        columns, rows, planes = self.grid
        stream = self.current_stream(device)
        self.run(columns, rows, planes, stream, *self.middle, *pointers, *self.arguments)


def _check(launch: Launch, tensors: Tensors) -> None:
    """Raise an error unless the tensors are on one device, and their number and the outputs' dtypes match the record.

    Raises:
        AssertionError: The tensor count or an output's dtype differs.
        ValueError: The tensors are on several devices.
    """
    name = launch.kernel.fn.__name__
    inputs = launch.inputs
    expected = inputs + len(launch.outputs)
    assert len(tensors) == expected, f"{name} takes {expected} tensors, it was given {len(tensors)}"
    devices = {str(tensor.device) for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(
            f"{name} was given tensors on {' and '.join(sorted(devices))}; move all of them to one device"
        )
    for index, output in enumerate(launch.outputs, inputs):
        tensor = tensors[index]
        if output is None or tensor is None:
            assert output is tensor, (
                f"{name}: argument {index} is {output} in the record, {tensor} in the call"
            )
        elif output.dtype is not None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            assert dtype == output.dtype, (
                f"{name} writes {output.dtype} to argument {index}, which is {dtype}"
            )


def _unwrap_launcher(launcher: Any) -> tuple[Any, ...] | None:
    """Triton 3.6's compiled launcher and the arguments of its Python wrapper; None for other versions.

    The wrapper allocates scratch memory, which few kernels use.
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
    """Handle of the device's current CUDA stream."""
    return _find_stream()(device)


@functools.cache
def _find_stream() -> Any:
    from triton.runtime import driver

    return driver.active.get_current_stream
