"""results = kernel(*arrays): a Triton kernel as a primitive of JAX, made when a program is lowered for CUDA.

Tracing asks for shapes alone, so that a program traced on a CPU compiles no kernel and still has its kernels where it
is lowered for CUDA. There the partitioner learns by a Shardy rule which axes it may cut; under vmap a kernel runs
once for each element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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

from ..manual_axes import manual_axes, varying_alike
from ..sharding import mesh_of_devices
from . import exact
from .partitioning import Extent, in_order, mesh_of, named, placement, unknown_sizes, warn_of_no_mesh

Shape = jax.ShapeDtypeStruct


class Kernel:
    """What computes; hashable.

    whole    factors that are not cut
    led_by_results   is it results that say where an axis of the mesh cuts, if operands are cut differently by it?
    summed   results that devices make parts of, which are added up
    maxed    results that devices make parts of, of which the greatest counts
    """

    whole: tuple[str, ...] = ()
    led_by_results: bool = False
    summed: tuple[int, ...] = ()
    maxed: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What an error calls it."""
        return type(self).__name__

    @property
    def rule(self) -> str:
        """Factors of the axes of operands and results, as Shardy writes them: "r w, w -> r w"."""
        raise NotImplementedError

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The axes that blocks lie along."""
        return ()

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the factors that share an axis with another."""
        return {name: size for one in self.extents for name, size in one.sizes.items()}

    @property
    def replicated(self) -> tuple[str, ...]:
        """Factors of the rule that are not cut, those of extents with a block that is not full among them."""
        words = self.rule.replace(",", " ").split()
        blocks = (name for one in self.extents for name in one.replicated)
        return (*self.whole, *(name for name in blocks if name in words))

    def under_vmap(self, mapped: Sequence[bool]) -> tuple[Kernel, tuple[bool, ...]] | None:
        """The kernel of arrays of which some have one axis more in front, and which results do; None: there is none."""
        return None

    @property
    def in_parts(self) -> Kernel:
        """The kernel of a device's part, whose summed results are wide: they are added up, and rounded then."""
        return self

    def results(self, *operands: Any) -> tuple[Shape, ...]:
        """Shapes and dtypes of what run answers."""
        raise NotImplementedError

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        """arrays of any extents -> the kernel's results, as calls of the bridge."""
        raise NotImplementedError


def sums_dtype(*dtypes: Any) -> str:
    """The dtype in which a kernel writes the sums that become arrays of dtypes: theirs, if they have one that kernels
    write, else float32. Rounded behind the kernel, each would take one of XLA's.
    """
    names = {jnp.dtype(dtype).name for dtype in dtypes}
    return names.pop() if len(names) == 1 and names <= {"float32", "bfloat16", "float16"} else "float32"


_kernel = Primitive("transformer_engine_kernel")
_kernel.multiple_results = True


def call(kernel: Kernel, *arrays: Array) -> tuple[Array, ...]:
    """The kernel's results; only to be run, or lowered, on CUDA."""
    return tuple(_kernel.bind(*varying_alike(*arrays), kernel=kernel))


@functools.lru_cache(maxsize=256)
def _compiled(kernel: Kernel) -> Callable[..., list[Any]]:
    return jax.jit(functools.partial(_kernel.bind, kernel=kernel))


def run_compiled(program: Callable[..., Any], *arrays: Array) -> Any:
    """What a jitted primitive makes, also where jit is switched off: it would come back to its own rule for ever."""
    with jax.disable_jit(False):
        return program(*arrays)


@_kernel.def_impl
def _outside_of_jit(*arrays: Array, kernel: Kernel) -> list[Any]:
    """A program of the one kernel, as any primitive of JAX runs where nothing is jitted."""
    return run_compiled(_compiled(kernel), *arrays)


@_kernel.def_abstract_eval
def _shapes(*operands: Any, kernel: Kernel) -> list[Any]:
    results = kernel.results(*operands)
    if not operands:
        return [ShapedArray(one.shape, one.dtype) for one in results]
    return [result_like(operands[0], one) for one in results]  # `call` lets all vary alike


def result_like(operand: Any, result: Shape) -> ShapedArray:
    """What a primitive says of its result: inside shard_map it varies over the axes that the operands do; else what
    devices hold parts of passed for shared.
    """
    if not manual_axes(operand):
        return ShapedArray(result.shape, result.dtype)
    return operand.update(
        shape=result.shape, dtype=result.dtype, weak_type=False,
        sharding=operand.sharding.update(spec=PartitionSpec(*(None,) * len(result.shape))),
    )  # fmt: skip


def _batched(arrays: Any, axes: Any, *, kernel: Kernel) -> tuple[Any, tuple[int | None, ...]]:
    mapped, moved = _mapped_in_front(arrays, axes)
    if (of_all := kernel.under_vmap(mapped)) is not None:
        return call(of_all[0], *moved), tuple(0 if is_mapped else None for is_mapped in of_all[1])
    out, _ = batched_in_turn(functools.partial(call, kernel), arrays, axes)
    return out, (0,) * len(out)


def _mapped_in_front(arrays: Any, axes: Any) -> tuple[list[bool], list[Array]]:
    mapped = [axis is not None for axis in axes]
    return mapped, [
        jnp.moveaxis(x, axis, 0) if is_mapped else x
        for x, axis, is_mapped in zip(arrays, axes, mapped, strict=True)
    ]


def batched_in_turn(run: Callable[..., Any], arrays: Any, axes: Any) -> tuple[Any, int]:
    """(results of run, stacked in front, 0): run once for each element of the axes that vmap maps, None elsewhere."""
    mapped, moved = _mapped_in_front(arrays, axes)

    def one(parts: Any) -> Any:
        remaining = iter(parts)
        return run(*(next(remaining) if m else x for x, m in zip(moved, mapped, strict=True)))

    return lax.map(one, tuple(x for x, m in zip(moved, mapped, strict=True) if m)), 0


batching.primitive_batchers[_kernel] = _batched


def _differentiated(primals: Any, tangents: Any, *, kernel: Kernel) -> NoReturn:
    raise NotImplementedError(
        f"a derivative of the kernel {kernel.name}: operations on kernels have first derivatives alone, by "
        "reverse mode (jax.grad, jax.vjp); for others trace under NVTE_JAX_CUSTOM_CALLS=false, which has none"
    )


ad.primitive_jvps[_kernel] = _differentiated


def _on_one_device(*arrays: Array, kernel: Kernel) -> list[Array]:
    return list(kernel.run(*arrays))


def _on_many(*arrays: Array, kernel: Kernel, within_shard_map: bool = False) -> list[Array]:
    """The kernel on every device's part of its arrays."""

    def run(*arrays: Array) -> tuple[Array, ...]:
        return kernel.run(*arrays)

    def partition(mesh: Any, operands: Any, results: Any) -> tuple[Any, ...]:
        operands, results = named(mesh, operands), named(mesh, results)
        mesh = mesh_of(operands, within_shard_map)
        placed = placement(
            kernel.rule,
            kernel.sizes,
            kernel.replicated,
            mesh,
            operands,
            results if kernel.led_by_results else (),
        )

        def local(*arrays: Array) -> tuple[Array, ...]:
            made = map(reduced, range(len(results)), kernel.in_parts.run(*arrays), placed.reduced)
            return tuple(part.astype(result.dtype) for part, result in zip(made, results, strict=True))

        return mesh, local, placed.results, placed.operands

    def reduced(place: int, part: Array, axes: tuple[str, ...]) -> Array:
        if axes and place in kernel.summed:
            return lax.psum(part, axes)
        return exact.largest_over(part, axes) if place in kernel.maxed else part

    cut: Any = custom_partitioning(run)
    cut.def_partition(
        partition=partition,
        decode_shardings=False,  # see `named`
        sharding_rule=kernel.rule,
        need_replication_factors=in_order(kernel.rule, kernel.replicated),
        **unknown_sizes(kernel.rule, kernel.sizes),
    )
    return list(cut(*arrays))


def _lowered(context: Any, *values: Any, kernel: Kernel) -> Any:
    """On several devices cut by the partitioner, which has to know them; it does not where a program is exported."""
    context = _with_devices(context)
    placed = context.module_context.axis_context
    devices = getattr(placed, "device_assignment", None)
    function = _on_one_device
    if getattr(placed, "manual_axes", None):
        function = functools.partial(_on_many, within_shard_map=True)
    elif devices is not None and len(devices) > 1:
        function = _on_many
    return mlir.lower_fun(function, multiple_results=True)(context, *values, kernel=kernel)


def _with_devices(context: Any) -> Any:
    """The context with the devices of the mesh in use, where jax names none.

    It names them in programs with certain primitives alone, cuDNN's among them; without, a kernel is one whole to the
    partitioner, which gathers all that it reads.
    """
    module = context.module_context
    placed = module.axis_context
    count = getattr(placed, "num_devices", 1)
    if count == 1 or placed.device_assignment is not None or module.lowering_parameters.for_export:
        return context
    if (mesh := mesh_of_devices()) is None or mesh.size != count:
        warn_of_no_mesh()
        return context
    placed = replace(placed, device_assignment=tuple(mesh.devices.flat), abstract_mesh=mesh.abstract_mesh)
    return context.replace(module_context=module.replace(axis_context=placed))


mlir.register_lowering(_kernel, _lowered, platform="cuda")
