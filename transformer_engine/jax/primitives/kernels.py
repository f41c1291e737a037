"""results = kernel(*arrays): a Triton kernel as a JAX primitive, compiled when a program is lowered for CUDA.

Tracing needs shapes only. A program that is traced on a CPU therefore compiles no kernel, and still contains its
kernels where it is lowered for CUDA. On one GPU, threads compile the kernels while the program is traced, and the
lowering waits for them. The lowering registers a Shardy rule, which tells the partitioner the axes that it
may shard. Under `vmap` a kernel runs once for each element, unless it defines `vmap_kernel`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from ..runtime.manual_axes import align_manual_axes, manual_axes
from ..runtime.platform import has_gpu
from ..sharding import mesh_of_devices
from . import exact
from .partitioning import (
    ShardingRule,
    find_mesh,
    named,
    order_factors,
    placement,
    unknown_sizes,
    warn_of_no_mesh,
)

Shape = jax.ShapeDtypeStruct


class Kernel:
    """A computation on arrays; subclasses are hashable."""

    @property
    def name(self) -> str:
        """Name in error messages."""
        return type(self).__name__

    @property
    def rule(self) -> ShardingRule:
        """How devices share the operands and the results."""
        raise NotImplementedError

    def vmap_kernel(self, mapped: Sequence[bool]) -> tuple[Kernel, tuple[bool, ...]] | None:
        """Build the kernel for arrays some of which have a batch axis in front, and say which results have one.

        The default, None, runs the kernel once per batch element.
        """
        return None

    @property
    def in_parts(self) -> Kernel:
        """The kernel for one device's part, whose summed results are float32: they are added, then rounded."""
        return self

    def results(self, *operands: Any) -> tuple[Shape, ...]:
        """Result shapes and dtypes."""
        raise NotImplementedError

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        """Compute the results for arrays with any extents, as calls to `launching`."""
        raise NotImplementedError


def sums_dtype(*dtypes: Any) -> str:
    """Dtype in which a kernel writes sums that become arrays with these dtypes.

    The common dtype if kernels write it, otherwise float32. A conversion after the kernel would be an XLA operation for
    each array.
    """
    names = {jnp.dtype(dtype).name for dtype in dtypes}
    return (
        names.pop()
        if len(names) == 1 and names <= {"float32", "bfloat16", "float16"}
        else "float32"
    )


_kernel = Primitive("transformer_engine_kernel")
_kernel.multiple_results = True


def call(kernel: Kernel, *arrays: Array) -> tuple[Array, ...]:
    """Call a kernel; the program must run on CUDA, or be lowered for CUDA."""
    return tuple(_kernel.bind(*align_manual_axes(*arrays), kernel=kernel))


@functools.lru_cache(maxsize=256)
def _compiled(kernel: Kernel) -> Callable[..., list[Any]]:
    return jax.jit(functools.partial(_kernel.bind, kernel=kernel))


def run_compiled(program: Callable[..., Any], *arrays: Array) -> Any:
    """Run a jitted primitive, also if jit is disabled: its rule for eager calls would call itself without end."""
    with jax.disable_jit(False):
        return program(*arrays)


@_kernel.def_impl
def _outside_of_jit(*arrays: Array, kernel: Kernel) -> list[Any]:
    """Compile and run a one-kernel program, as JAX does for any primitive outside jit."""
    return run_compiled(_compiled(kernel), *arrays)


@_kernel.def_abstract_eval
def _shapes(*operands: Any, kernel: Kernel) -> list[Any]:
    results = kernel.results(*operands)
    if _compiles_ahead():
        _compile_ahead(
            kernel, tuple((tuple(operand.shape), jnp.dtype(operand.dtype)) for operand in operands)
        )
    if not operands:
        return [ShapedArray(operand.shape, operand.dtype) for operand in results]
    return [
        result_like(operands[0], operand) for operand in results
    ]  # `call` makes all operands vary alike


def _compiles_ahead() -> bool:
    """Whether kernels are compiled during tracing: several devices would compile kernels for their parts instead."""
    return has_gpu() and jax.device_count() == 1 and (os.cpu_count() or 1) > 1


@functools.lru_cache(maxsize=4096)
def _compile_ahead(
    kernel: Kernel, operands: tuple[tuple[tuple[int, ...], Any], ...]
) -> Future[Any]:
    """Begin to compile a kernel. Errors are not raised here, because the lowering repeats the call and raises them."""
    shapes = [Shape(*operand) for operand in operands]
    return _compilers().submit(jax.eval_shape, kernel.run, *shapes)


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    # Triton releases the interpreter's lock in its passes, in LLVM and while the assembler runs.
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1), "transformer_engine_compiler")


def result_like(operand: Any, result: Shape) -> ShapedArray:
    """Abstract value for a result; inside shard_map it varies over the same mesh axes as the operand."""
    if not manual_axes(operand):
        return ShapedArray(result.shape, result.dtype)
    return operand.update(
        shape=result.shape,
        dtype=result.dtype,
        weak_type=False,
        sharding=operand.sharding.update(spec=PartitionSpec(*(None,) * len(result.shape))),
    )


def _batch_arrays(arrays: Any, axes: Any, *, kernel: Kernel) -> tuple[Any, tuple[int | None, ...]]:
    mapped, batched = _move_batch_axes(arrays, axes)
    if (of_all := kernel.vmap_kernel(mapped)) is not None:
        return call(of_all[0], *batched), tuple(0 if is_mapped else None for is_mapped in of_all[1])
    out, _ = batch_in_turn(functools.partial(call, kernel), arrays, axes)
    return out, (0,) * len(out)


def _move_batch_axes(arrays: Any, axes: Any) -> tuple[list[bool], list[Array]]:
    """Move batch axes to the front; return which arrays have one, and the arrays."""
    mapped = [axis is not None for axis in axes]
    return mapped, [
        jnp.moveaxis(x, axis, 0) if is_mapped else x
        for x, axis, is_mapped in zip(arrays, axes, mapped, strict=True)
    ]


def batch_in_turn(run: Callable[..., Any], arrays: Any, axes: Any) -> tuple[Any, int]:
    """Batching rule that runs once per element.

    Args:
        run: Function for arrays without batch axes.
        arrays: Arrays.
        axes: Batch axis of each array, None for an array without one.

    Returns:
        The results stacked along a first axis, and 0, their batch axis.
    """
    mapped, batched = _move_batch_axes(arrays, axes)

    def one(parts: Any) -> Any:
        remaining = iter(parts)
        return run(*(next(remaining) if m else x for x, m in zip(batched, mapped, strict=True)))

    return lax.map(one, tuple(x for x, m in zip(batched, mapped, strict=True) if m)), 0


batching.primitive_batchers[_kernel] = _batch_arrays


def _differentiate_kernel(primals: Any, tangents: Any, *, kernel: Kernel) -> NoReturn:
    raise NotImplementedError(
        f"a derivative of the kernel {kernel.name}: operations on kernels have first derivatives alone, by "
        "reverse mode (jax.grad, jax.vjp); for others trace under NVTE_JAX_CUSTOM_CALLS=false, which has none"
    )


ad.primitive_jvps[_kernel] = _differentiate_kernel


def _run_on_one_device(*arrays: Array, kernel: Kernel) -> list[Array]:
    return list(kernel.run(*arrays))


def _run_on_several_devices(
    *arrays: Array, kernel: Kernel, within_shard_map: bool = False
) -> list[Array]:
    """Run the kernel on each device's local shards."""
    rule = kernel.rule

    def run(*arrays: Array) -> tuple[Array, ...]:
        return kernel.run(*arrays)

    def partition(mesh: Any, operands: Any, results: Any) -> tuple[Any, ...]:
        operands, results = named(mesh, operands), named(mesh, results)
        mesh = find_mesh(operands, within_shard_map)
        placed = placement(rule, mesh, operands, results)

        def local(*arrays: Array) -> tuple[Array, ...]:
            outputs = []
            for index, (part, axes) in enumerate(
                zip(kernel.in_parts.run(*arrays), placed.reduced, strict=True)
            ):
                if axes and index in rule.summed:
                    part = lax.psum(part, axes)
                elif index in rule.maxed:
                    part = exact.maximum_over_axes(part, axes)
                outputs.append(part.astype(results[index].dtype))
            return tuple(outputs)

        return mesh, local, placed.results, placed.operands

    sharded: Any = custom_partitioning(run)
    sharded.def_partition(
        partition=partition,
        decode_shardings=False,  # see `named`
        sharding_rule=rule.text,
        need_replication_factors=order_factors(rule.text, rule.replicated),
        **unknown_sizes(rule.text, rule.sizes),
    )
    return list(sharded(*arrays))


def _lower_kernel(context: Any, *values: Any, kernel: Kernel) -> Any:
    """Lower a kernel; on several known devices the partitioner shards it, but not in a program that is exported."""
    context = _with_devices(context)
    placed = context.module_context.axis_context
    devices = getattr(placed, "device_assignment", None)
    function = _run_on_one_device
    if getattr(placed, "manual_axes", None):
        function = functools.partial(_run_on_several_devices, within_shard_map=True)
    elif devices is not None and len(devices) > 1:
        function = _run_on_several_devices
    return mlir.lower_fun(function, multiple_results=True)(context, *values, kernel=kernel)


def _with_devices(context: Any) -> Any:
    """Add the current mesh's devices to the context if JAX names none.

    JAX names them only in programs with certain primitives, such as cuDNN's. Without them the partitioner would gather
    all operands of a kernel on every device.
    """
    module = context.module_context
    placed = module.axis_context
    count = getattr(placed, "num_devices", 1)
    if count == 1 or placed.device_assignment is not None or module.lowering_parameters.for_export:
        return context
    if (mesh := mesh_of_devices()) is None or mesh.size != count:
        warn_of_no_mesh()
        return context
    placed = replace(
        placed, device_assignment=tuple(mesh.devices.flat), abstract_mesh=mesh.abstract_mesh
    )
    return context.replace(module_context=module.replace(axis_context=placed))


mlir.register_lowering(_kernel, _lower_kernel, platform="cuda")
