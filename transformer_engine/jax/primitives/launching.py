"""Launch records as XLA operations: outputs = run(launch, inputs), on tracers and arrays.

This is the only module that reads jaxlib's private Triton classes. XLA matches a kernel's pointers to the call's
operands and then to its results, in the order of the kernel's arguments, and ignores results after the last pointer.
Kernel outputs are therefore results. An array that a kernel writes in place is an operand, aliased by a result after
the outputs.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...common import env, optional
from ...common.checks import switch as check_switch
from ...common.kernels.launch import MISSING, Launch, unavailable_reason
from ...common.kernels.program import Program
from ..runtime.platform import compute_capability, hardware, has_gpu

if TYPE_CHECKING:
    from ...common.kernels.compiled import Compiled

_TARGET = "triton_kernel_call_ffi"
_CLASSES = ("TritonKernel", "TritonKernelCall", "create_array_parameter", "create_scalar_parameter")


_SWITCHES = "NVTE_JAX_CUSTOM_CALLS"
_switched: dict[str, bool] = {}  # by `switch`, for this process


def switch(primitive: str, on: bool) -> None:
    """Enable or disable kernels by NVIDIA's primitive name, whatever NVTE_JAX_CUSTOM_CALLS contains."""
    check_switch("enabled", on)
    _switched[primitive] = bool(on)


def disabled_reason(primitive: str) -> str | None:
    """Reason why the kernels of a primitive are disabled, or None.

    NVTE_JAX_CUSTOM_CALLS is "false" for all kernels, or a list such as "Name=false,Other=true".

    Raises:
        ValueError: The variable has another form.
    """
    if primitive in _switched:
        return None if _switched[primitive] else f"{primitive}.set_enabled(False) was called"
    value = str(env.get(_SWITCHES) or "true")
    if "=" not in value:
        return f"{_SWITCHES}={value}" if not _truth(value) else None
    for entry in value.split(","):
        name, separator, word = entry.partition("=")
        if not separator:
            raise ValueError(
                f"{_SWITCHES}={value!r}: {entry!r} is not Name=true or Name=false; separate them by ','"
            )
        off = not _truth(word)
        if off and name.strip() == primitive:
            return f"{_SWITCHES} sets {primitive}=false"
    return None


def _truth(word: str) -> bool:
    word = word.strip().lower()
    if word not in ("true", "false", "1", "0"):
        raise ValueError(f"{_SWITCHES}: {word!r} is neither true nor false; say one of them")
    return word in ("true", "1")


def prepare_compiler() -> None:
    """Let a thread import and hash Triton, if it is installed, while the program prepares its data."""
    if MISSING is None:
        from ...common.kernels.compiled import begin_hash

        begin_hash()


def kernels_unsupported_reason() -> str | None:
    """Reason why XLA cannot launch Triton kernels in this process, or None."""
    return unavailable_reason(hardware()) or _bridge_failure()


def platform_failure(platform: str, primitive: str) -> str | None:
    """Reason why a program for a platform cannot contain a Triton kernel, or None.

    Args:
        platform: Platform of the program, "cpu" or "cuda".
        primitive: Name for the kernel's switch; see `switch`.
    """
    if platform != "cuda":
        return f"it needs a CUDA device, the program is for {platform}"
    if not has_gpu() and not env.flag("TE_JAX_KERNELS"):
        return "this process has no GPU; set TE_JAX_KERNELS=1 for programs that are lowered for CUDA elsewhere"
    return disabled_reason(primitive) or kernels_unsupported_reason()


@functools.cache
def _bridge_failure() -> str | None:
    """Reason why jaxlib's Triton classes are unavailable, or None."""
    if (failure := optional.failure("jaxlib.gpu_triton")) is not None:
        return failure
    for name in _CLASSES:
        if not hasattr(_bridge(), name):
            return (
                f"jaxlib {version('jaxlib')} has no {name} in gpu_triton; install the CUDA plugin of the same version "
                "(jax-cuda13-plugin)"
            )
    return None


def _bridge() -> ModuleType:
    from jaxlib import gpu_triton

    return gpu_triton


def run(
    launch: Launch,
    inputs: Sequence[Array | None],
    shapes: Sequence[jax.ShapeDtypeStruct | None] = (),
    reuses: Mapping[int, int] | None = None,
) -> list[Array | None]:
    """Run a launch as an XLA operation, in a program that is lowered for CUDA.

    Args:
        launch: The kernel and its arguments.
        inputs: Launch inputs, None for an absent one.
        shapes: Shapes and dtypes for outputs whose shape the launch does not define.
        reuses: {input index: output index} pairs that share memory. The kernel must read every input element
            before it writes the same element of the output. If the input is read later, XLA copies it first.

    Returns:
        The outputs, None for an absent one, followed by the inputs written in place, in `launch.in_place` order.
    """
    name = launch.kernel.fn.__name__
    if launch.tables:
        raise NotImplementedError(
            f"{name} reads addresses from a table, and arrays of JAX have no addresses; stack them"
        )
    assert len(inputs) == launch.inputs, (
        f"{name} requires {launch.inputs} tensors, {len(inputs)} were passed"
    )
    outputs: list[jax.ShapeDtypeStruct | None] = []
    for index, output in enumerate(launch.outputs):
        if output is None:
            outputs.append(None)
        elif output.shape is None or output.dtype is None:
            output_shape = shapes[index] if index < len(shapes) else None
            assert output_shape is not None, (
                f"{launch.kernel.fn.__name__}: the launch does not define the shape of output {index}"
            )
            outputs.append(output_shape)
        else:
            outputs.append(jax.ShapeDtypeStruct(output.shape, jnp.dtype(output.dtype)))
    # An output with a nonzero initial value is a filled operand, and so are the outputs before it.
    filled = max(
        [i + 1 for i, output in enumerate(launch.outputs) if output is not None and output.begins],
        default=0,
    )
    operands = [*inputs]
    for output, shape in zip(launch.outputs[:filled], outputs, strict=False):
        if output is None or shape is None:
            operands.append(None)
        else:
            operands.append(lax.full(shape.shape, output.begins or 0, shape.dtype))
    written = [*launch.in_place, *range(len(inputs), len(inputs) + filled)]
    written = [index for index in written if operands[index] is not None]
    output_shape = [index for index, operand in enumerate(operands) if operand is not None]
    places = [index for index in range(filled, len(outputs)) if outputs[index] is not None]
    fresh = [shape for shape in outputs[filled:] if shape is not None]
    arrays = [operands[index] for index in output_shape]
    zeroed = [output.begins == 0 for output in launch.outputs[filled:] if output is not None]
    opaque, scratch = _call(launch, [*inputs], outputs, len(arrays), fresh, tuple(zeroed))
    # Some jaxlib versions do not pass scratch memory to a kernel, so it is a result.
    scratch_results = (
        [jax.ShapeDtypeStruct((scratch * prod(launch.grid),), jnp.uint8)] if scratch else []
    )
    present = [operand for index in written if (operand := operands[index]) is not None]
    written_shapes = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in present]
    results = [*fresh, *scratch_results, *written_shapes]
    first = len(fresh) + len(scratch_results)
    aliases = {output_shape.index(index): first + i for i, index in enumerate(written)}
    aliases |= {
        output_shape.index(index): places.index(output) for index, output in (reuses or {}).items()
    }
    call = jax.ffi.ffi_call(
        _TARGET, results, vmap_method="sequential", input_output_aliases=aliases
    )
    call_results = call(*arrays, opaque=opaque)
    by_place = dict(zip(written, call_results[first:], strict=True))
    return _order_arrays(launch, len(inputs), filled, iter(call_results[: len(fresh)]), by_place)


def run_first(launch: Launch, inputs: Sequence[Array | None]) -> Array:
    """Run a launch as an XLA operation and return its first output."""
    output = run(launch, inputs)[0]
    assert output is not None
    return output


def perform(
    program: Program,
    inputs: Sequence[Array | None],
    into: Mapping[str, jax.ShapeDtypeStruct] | None = None,
) -> list[Array | None]:
    """Run a program's launches in order, on its inputs and on the outputs of earlier launches.

    Args:
        program: Launches, with names for the buffers that they read and write.
        inputs: Program inputs, None for an absent one.
        into: Named shapes and dtypes for the buffers that the program does not define.

    Returns:
        The results of the program, None for an absent one, followed by the buffers in `program.into`.
    """
    assert len(inputs) == len(program.inputs), f"{len(inputs)} inputs of {program.inputs}"
    values: dict[str, Array | None] = dict(zip(program.inputs, inputs, strict=True))
    outputs: dict[str, Array | None] = {}
    for launch, reads, writes in program.steps:
        shapes = [None if name is None else (into or {}).get(name) for name in writes]
        arrays = run(launch, [None if name is None else values[name] for name in reads], shapes)
        for name, output, array in zip(writes, launch.outputs, arrays, strict=False):
            if name is not None and output is not None and array is not None:
                outputs[name] = array
                values[name] = array.T if output.transposed else array  # in memory layout
        for position, array in zip(launch.in_place, arrays[len(launch.outputs) :], strict=True):
            name = reads[position]
            if name is not None:
                values[name] = outputs[name] = array
    return [
        None if name is None else outputs.get(name, values.get(name))
        for name in (*program.results, *program.into)
    ]


def _call(
    launch: Launch,
    inputs: Sequence[Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct | None],
    operands: int,
    fresh: Sequence[jax.ShapeDtypeStruct],
    zeroed: tuple[bool, ...],
) -> tuple[bytes, int]:
    """Serialized kernel call, and scratch bytes per program in the grid."""
    from ...common.kernels.compiled import compiled

    names = [None if x is None else jnp.dtype(x.dtype).name for x in (*inputs, *outputs)]
    # uint32 pairs are int64 for a kernel, since JAX disables int64 by default.
    dtypes = ["int64" if name == "uint32" else name for name in names]
    kernel = compiled(launch, dtypes, compute_capability())
    sizes = [prod(shape.shape) * shape.dtype.itemsize for shape in fresh]
    begins = (
        *[0] * operands,
        *[size if zero else 0 for size, zero in zip(sizes, zeroed, strict=True)],
    )
    assert len(begins) == len(kernel.pointers), "one operand or result per pointer"
    return _packed(kernel, tuple(launch.grid), begins), kernel.scratch


@functools.lru_cache(maxsize=1024)  # entries from 2 to 20 KB
def _packed(kernel: Compiled, grid: tuple[int, ...], begins: tuple[int, ...]) -> bytes:
    """Serialize a kernel call as XLA's runtime reads it.

    Args:
        kernel: The compiled kernel and its scalars.
        grid: Programs along the three axes.
        begins: Bytes that are set to zero before the launch, for each pointer.

    Returns:
        The compressed protocol buffer. The fastest compression level takes a quarter of the default's time.
    """
    bridge = _bridge()
    parameters = [bridge.create_array_parameter(size, 16) for size in begins]
    parameters += [
        bridge.create_scalar_parameter(scalar.value, scalar.kind) for scalar in kernel.scalars
    ]
    if kernel.scratch:
        parameters.append(bridge.create_array_parameter(0, 16))
    # name, warps, CTAs per cluster, shared memory, PTX, Triton IR (for dumps), compute capability
    fields = (kernel.name, kernel.warps, 1, kernel.shared_memory, kernel.ptx, "", kernel.capability)
    try:
        compiled = bridge.TritonKernel(*fields)
    except TypeError:  # jaxlib 0.11 adds the size and alignment of scratch memory
        compiled = bridge.TritonKernel(*fields, 0, 1)
    call = bridge.TritonKernelCall(compiled, *grid, parameters)
    return zlib.compress(call.to_proto(kernel.name, b""), level=1)


def _order_arrays(
    launch: Launch, inputs: int, filled: int, fresh: Any, by_place: dict[int, Array]
) -> list[Array | None]:
    """Arrange the outputs and the inputs written in place in `run`'s order."""
    outputs: list[Array | None] = []
    for index, output in enumerate(launch.outputs):
        if output is None:
            outputs.append(None)
            continue
        array = by_place[inputs + index] if index < filled else next(fresh)
        outputs.append(array.T if output.transposed else array)
    return [*outputs, *[by_place.get(index) for index in launch.in_place]]
