"""outputs = run(launch, inputs): a kernel call that is data, as an operation of XLA on tracers and arrays.

The only reader of jaxlib's private Triton classes. XLA matches a kernel's pointers to the operands of the call and then
to its results, in the order of the kernel's arguments, and ignores results behind the last pointer. So what a kernel
makes is a result; what it writes in place is an operand that a result behind them aliases.
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
from ...common.kernels.launch import Launch, Output, missing
from ...common.kernels.program import Program
from ..platform import compute_capability, has_gpu
from .custom_calls import switched_off

if TYPE_CHECKING:
    from ...common.kernels.compiled import Compiled

_TARGET = "triton_kernel_call_ffi"
_CLASSES = ("TritonKernel", "TritonKernelCall", "create_array_parameter", "create_scalar_parameter")


def refuses_kernels() -> str | None:
    """Why XLA cannot be handed a Triton kernel here, None if it can."""
    if (reason := missing()) is not None:
        return reason
    return _bridge_failure()


def refuses_on(platform: str, primitive: str) -> str | None:
    """Why a program for a platform gets no Triton kernel, None if it does; primitive: see `custom_calls`."""
    if platform != "cuda":
        return f"it needs a CUDA device, the program is for {platform}"
    if not has_gpu() and not env.flag("TE_JAX_KERNELS"):
        return (
            "this process has no GPU; set TE_JAX_KERNELS=1 for programs that are lowered for CUDA elsewhere"
        )
    return switched_off(primitive) or refuses_kernels()


@functools.cache
def _bridge_failure() -> str | None:
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
    """Run a launch as an operation of XLA, in a program that is lowered for CUDA.

    Args:
        launch: The kernel and its arguments.
        inputs: Its inputs, None where one is absent.
        shapes: Shapes and dtypes of the outputs whose shape the record leaves to its caller.
        reuses: {place of an input: place of an output} that share memory. The kernel must read every element of the
            input before it writes that element of the output. XLA copies the input first if it is read later on.

    Returns:
        The outputs, None where one is absent, followed by the inputs written in place, in the order of
        `launch.in_place`.
    """
    _check(launch, inputs)
    made = _outputs(launch, shapes)
    # An output that begins as something other than zero is a filled operand, and so are those in front of it.
    filled = max(
        [i + 1 for i, output in enumerate(launch.outputs) if output is not None and output.begins], default=0
    )
    operands = [*inputs, *[_filled(o, s) for o, s in zip(launch.outputs[:filled], made, strict=False)]]
    written = [*launch.in_place, *range(len(inputs), len(inputs) + filled)]
    written = [place for place in written if operands[place] is not None]
    given = [place for place, operand in enumerate(operands) if operand is not None]
    places = [place for place in range(filled, len(made)) if made[place] is not None]
    fresh = [shape for shape in made[filled:] if shape is not None]
    arrays = [operands[place] for place in given]
    zeroed = [output.begins == 0 for output in launch.outputs[filled:] if output is not None]
    opaque, scratch = _call(launch, [*inputs], made, len(arrays), fresh, tuple(zeroed))
    # Some versions of jaxlib hand a kernel no scratch memory: it is a result.
    beside = [jax.ShapeDtypeStruct((scratch * prod(launch.grid),), jnp.uint8)] if scratch else []
    written_shapes = [jax.ShapeDtypeStruct(operands[p].shape, operands[p].dtype) for p in written]  # pyright: ignore
    results = [*fresh, *beside, *written_shapes]
    first = len(fresh) + len(beside)
    aliases = {given.index(place): first + i for i, place in enumerate(written)}
    aliases |= {given.index(place): places.index(output) for place, output in (reuses or {}).items()}
    call = jax.ffi.ffi_call(_TARGET, results, vmap_method="sequential", input_output_aliases=aliases)
    answers = call(*arrays, opaque=opaque)
    by_place = dict(zip(written, answers[first:], strict=True))
    return _gathered(launch, len(inputs), filled, iter(answers[: len(fresh)]), by_place)


def perform(
    program: Program,
    inputs: Sequence[Array | None],
    into: Mapping[str, jax.ShapeDtypeStruct] | None = None,
) -> list[Array | None]:
    """The program's results: its launches in order, on the inputs and on what launches before them made.

    into   what the buffers are that the record leaves to its caller, by name; they follow the results
    """
    assert len(inputs) == len(program.inputs), f"{len(inputs)} inputs of {program.inputs}"
    kept: dict[str, Array | None] = dict(zip(program.inputs, inputs, strict=True))
    made: dict[str, Array | None] = {}
    for launch, reads, writes in program.steps:
        shapes = [None if name is None else (into or {}).get(name) for name in writes]
        answers = run(launch, [None if name is None else kept[name] for name in reads], shapes)
        for name, output, answer in zip(writes, launch.outputs, answers, strict=False):
            if name is not None and output is not None and answer is not None:
                made[name] = answer
                kept[name] = answer.T if output.transposed else answer  # as it lies in memory
        for place, answer in zip(launch.in_place, answers[len(launch.outputs) :], strict=True):
            name = reads[place]
            if name is not None:
                kept[name] = made[name] = answer
    return [
        None if name is None else made.get(name, kept.get(name)) for name in (*program.results, *program.into)
    ]


def _check(launch: Launch, inputs: Sequence[Array | None]) -> None:
    name = launch.kernel.fn.__name__
    if launch.tables:
        raise NotImplementedError(
            f"{name} reads addresses from a table, which arrays of JAX do not have; stack them"
        )
    assert len(inputs) == launch.inputs, f"{name} takes {launch.inputs} tensors, it was given {len(inputs)}"


def _outputs(
    launch: Launch, shapes: Sequence[jax.ShapeDtypeStruct | None]
) -> list[jax.ShapeDtypeStruct | None]:
    """What every output is as it lies in memory."""
    made: list[jax.ShapeDtypeStruct | None] = []
    for place, output in enumerate(launch.outputs):
        if output is None:
            made.append(None)
        elif output.shape is None or output.dtype is None:
            given = shapes[place] if place < len(shapes) else None
            assert given is not None, (
                f"{launch.kernel.fn.__name__}: the record leaves output {place} to its caller"
            )
            made.append(given)
        else:
            made.append(jax.ShapeDtypeStruct(output.shape, jnp.dtype(output.dtype)))
    return made


def _filled(output: Output | None, shape: jax.ShapeDtypeStruct | None) -> Array | None:
    if output is None or shape is None:
        return None
    return lax.full(shape.shape, output.begins or 0, shape.dtype)


def _call(
    launch: Launch,
    inputs: Sequence[Array | None],
    made: Sequence[jax.ShapeDtypeStruct | None],
    operands: int,
    fresh: Sequence[jax.ShapeDtypeStruct],
    zeroed: tuple[bool, ...],
) -> tuple[bytes, int]:
    """The kernel and how to start it, as XLA's runtime reads it; the bytes that each program wants beside results."""
    from ...common.kernels.compiled import compiled

    dtypes = [None if x is None else _dtype_of(x) for x in (*inputs, *made)]
    kernel = compiled(launch, dtypes, compute_capability())
    sizes = [prod(shape.shape) * shape.dtype.itemsize for shape in fresh]
    begins = (*[0] * operands, *[size if zero else 0 for size, zero in zip(sizes, zeroed, strict=True)])
    assert len(begins) == len(kernel.pointers), "one operand or result a pointer"
    return _packed(kernel, tuple(launch.grid), begins), kernel.scratch


@functools.lru_cache(maxsize=1024)  # of 2 to 20 KB
def _packed(kernel: Compiled, grid: tuple[int, ...], begins: tuple[int, ...]) -> bytes:
    """Serialize a kernel call as XLA's runtime reads it.

    Args:
        kernel: The compiled kernel and its scalars.
        grid: Programs along the three axes.
        begins: Bytes that are set to zero before the launch, for each pointer.

    Returns:
        The compressed protocol buffer. The fastest level of compression takes a quarter of the default's time.
    """
    bridge = _bridge()
    parameters = [bridge.create_array_parameter(size, 16) for size in begins]
    parameters += [bridge.create_scalar_parameter(scalar.value, scalar.kind) for scalar in kernel.scalars]
    if kernel.scratch:
        parameters.append(bridge.create_array_parameter(0, 16))
    call = bridge.TritonKernelCall(_kernel(kernel), *grid, parameters)
    return zlib.compress(call.to_proto(kernel.name, b""), level=1)


def _dtype_of(x: Any) -> str:
    """What a kernel is told; pairs of uint32 stand for int64, which JAX has only where a whole process is told so."""
    name = jnp.dtype(x.dtype).name
    return "int64" if name == "uint32" else name


def _kernel(kernel: Any) -> Any:
    """jaxlib's record of a compiled kernel: jaxlib 0.11 also wants the size and alignment of scratch memory."""
    # name, warps, CTAs of a cluster, shared memory, PTX, Triton's own code (for dumps), capability
    fields = (kernel.name, kernel.warps, 1, kernel.shared_memory, kernel.ptx, "", kernel.capability)
    try:
        return _bridge().TritonKernel(*fields)
    except TypeError:
        return _bridge().TritonKernel(*fields, 0, 1)


def _gathered(
    launch: Launch, inputs: int, filled: int, fresh: Any, by_place: dict[int, Array]
) -> list[Array | None]:
    outputs: list[Array | None] = []
    for place, output in enumerate(launch.outputs):
        if output is None:
            outputs.append(None)
            continue
        answer = by_place[inputs + place] if place < filled else next(fresh)
        outputs.append(answer.T if output.transposed else answer)
    return [*outputs, *[by_place.get(place) for place in launch.in_place]]
