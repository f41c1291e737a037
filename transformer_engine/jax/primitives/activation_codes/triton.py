"""Activations from x [rows, n, width] and their codes in one kernel (common/kernels/activation_codes.py).

With a given scale or scales per block, the kernel writes the codes. With current scaling it writes the values and their
maximum, and a second kernel quantizes the values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ....common.formats import BLOCK_1D, BLOCK_2D, ceil_div
from ....common.kernels.launch import LARGEST_EXTENT, Machine
from ....common.kernels.program import Program
from ...runtime.platform import hardware, processors
from ..activation import triton as activation
from ..activation.triton import ActivationKernel
from ..launching import perform, run
from ..partitioning import Extent, ShardingRule, extent
from ..quantize import FORMATS, Quantized, QuantizeRequest, QuantizeSpec, jax_dtype
from ..quantize import triton as quantization
from ..quantize.spec import QuantizeInputs
from ..several_axes import call_on_axes, with_rows
from .separate import ActivationCodesRequest, CodedActivation

_BLOCK = 128
_ONE = jax.ShapeDtypeStruct((1,), jnp.float32)


def unsupported_reason(request: ActivationCodesRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    reason = activation.unsupported_reason(request.activation)
    reason = reason or quantization.unsupported_in_producer(request.cast)
    if reason is not None:
        return reason
    spec, backward = request.cast.spec, request.activation.operation == "backward"
    columns = request.width * len(request.activation.names)
    if columns >= LARGEST_EXTENT:
        return f"{columns} columns reach {LARGEST_EXTENT}"
    if not backward or not spec.format.block:
        return None
    if len(request.activation.names) == 2 and request.width % _BLOCK:
        return f"width={request.width}, no multiple of {_BLOCK}: a block would contain elements of both gate and unit"
    if request.sums and spec.format == BLOCK_1D and not spec.columnwise:
        # H200, 8192 x 14336, SwiGLU: 0.772 ms in one step, 0.573 ms in two.
        return "row-wise blocks without column-wise ones, with column sums, which two steps compute faster"
    return None


@dataclass(frozen=True)
class _ActivationCodes(ActivationKernel):
    """Base class for kernels that write codes for y [rows, width], or for dx [rows, n, width].

    Attributes:
        spec: Code format.
        shape: Shape of the full code matrix; each shard contains full blocks.
        width: Width of x.
    """

    spec: QuantizeSpec
    shape: tuple[int, int]
    width: int

    @property
    def extents(self) -> tuple[Extent, Extent]:
        """Row and column axes, in blocks that are not sharded."""
        if not self.spec.format.block:
            return extent("r", self.shape[0], 1), extent("w", self.width, 1)
        down = _BLOCK if self.spec.format == BLOCK_2D or self.spec.columnwise else 1
        return extent("r", self.shape[0], down), extent("w", self.width, _BLOCK)

    def sharing(self, inputs: str, unit: str, *sums: str) -> ShardingRule:
        """Build the sharding rule of a kernel.

        Args:
            inputs: Axes of an operand before x, followed by ", "; or "".
            unit: "n " for an axis before the code columns, or "".
            *sums: Column-sum axes, if any.
        """
        (r, w), spec = self.extents, self.spec
        codes, codes_t = (
            f"{r.whole} {unit}{w.whole}",
            [f"{unit}{w.whole} {r.whole}"] * spec.columnwise,
        )
        x = f"{inputs}{r.whole} n {w.whole}"
        if not spec.format.block:
            outputs, maxed = [codes, *codes_t, "i", "o"], (2 + spec.columnwise,)
            x += ", s"
        else:
            rows, columns = (r.blocks, w.blocks) if spec.format == BLOCK_2D else (r.whole, w.whole)
            scale_t = [f"{unit}{columns} {r.blocks}"] * spec.columnwise
            outputs, maxed = [codes, f"{rows} {unit}{w.blocks}", *codes_t, *scale_t], ()
        text = f"{x} -> {', '.join([*outputs, *sums])}"
        summed = tuple(range(len(outputs), len(outputs) + len(sums)))
        return ShardingRule.from_extents(text, r, w, whole=("n",), summed=summed, maxed=maxed)

    def machine(self, bytes_read: int) -> Machine:
        """GPU properties that determine tile sizes."""
        gpu = processors()
        return Machine(gpu.count, gpu.shared_memory, bytes_read, hardware().threads)


@dataclass(frozen=True)
class ActivationCodes(_ActivationCodes):
    """Compute an activation and quantize its result.

    Operands: x and, for FLOAT8, a multiplier [1]. Results: `code_shapes` for y [rows, width].
    """

    @property
    def rule(self) -> ShardingRule:
        return self.sharing("", "")

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        x = operands[0]
        return code_shapes(self.spec, x.shape[0], x.shape[2])

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import activation_codes

        x, *multiplier = arrays
        rows, parts, width = x.shape
        plain = (*self.curve, (rows, width), parts * width)
        if self.spec.format.block:
            blocks = quantization.blocks(self.spec, x.dtype)
            machine = self.machine(parts * x.dtype.itemsize)
            program = activation_codes.forward_blocks(*plain, self.constants, blocks, machine)
        else:
            cast = quantization.one_scale(self.spec)
            program = activation_codes.forward(*plain, x.dtype.name, self.constants, cast)
        return _run_coded(program, self.spec, [x.reshape(rows, parts * width), *multiplier])


@dataclass(frozen=True)
class GradientCodes(_ActivationCodes):
    """Compute the gradient of an activation and quantize it.

    Operands: dy [rows, width], x and, for FLOAT8, a multiplier [1]. Results: `code_shapes` for dx [rows, n, width], and
    column sums of dx if requested.

    Attributes:
        sums: dtype for the column sums, or None to omit them.
    """

    sums: str | None

    @property
    def in_parts(self) -> GradientCodes:
        return dataclasses.replace(self, sums=None if self.sums is None else "float32")

    @property
    def rule(self) -> ShardingRule:
        r, w = self.extents
        sums = [] if self.sums is None else [f"n {w.whole}"]
        return self.sharing(f"{r.whole} {w.whole}, ", "n ", *sums)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows, parts, width = operands[1].shape
        per_direction = 2 if self.spec.format.block else 1
        descriptions = []
        for index, code in enumerate(code_shapes(self.spec, rows, parts * width)):
            shape = code.shape
            # The axis n * width becomes two: row-wise [.., n, ..], column-wise [n, .., ..].
            if index < per_direction:
                shape = (shape[0], parts, shape[1] // parts)
            elif index < 2 * per_direction and self.spec.columnwise:
                shape = (parts, shape[0] // parts, shape[1])
            descriptions.append(jax.ShapeDtypeStruct(shape, code.dtype))
        return (*descriptions, *_sums(parts, width, self.sums))

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import activation_codes

        dy, x, *multiplier = arrays
        rows, parts, width = x.shape
        plain = (*self.curve, (rows, width), (width, parts * width))
        if self.spec.format.block:
            blocks = quantization.blocks(self.spec, x.dtype)
            machine = self.machine(dy.dtype.itemsize + parts * x.dtype.itemsize)
            program = activation_codes.backward_blocks(
                *plain, self.constants, blocks, self.sums, machine
            )
        else:
            cast = quantization.one_scale(self.spec)
            program = activation_codes.backward(
                *plain, x.dtype.name, self.constants, cast, self.sums
            )
        arrays = _run_coded(program, self.spec, [dy, x.reshape(rows, parts * width), *multiplier])
        return tuple(
            array.reshape(shape.shape)
            for array, shape in zip(arrays, self.results(dy, x), strict=True)
        )


@dataclass(frozen=True)
class MeasuredActivation(ActivationKernel):
    """Compute an activation, or its gradient, and the absolute maximum of the result.

    Forward: max|y| [1] and y [rows, width] from x [rows, n, width]. Backward: max|dx| [1], dx and, if requested, column
    sums [n, width] from dy and x.

    Attributes:
        backward: Whether the kernel computes dx instead of y.
        sums: dtype of the column sums of dx, or None to omit them.
    """

    backward: bool
    sums: str | None = None

    @property
    def in_parts(self) -> MeasuredActivation:
        return dataclasses.replace(self, sums=None if self.sums is None else "float32")

    @property
    def rule(self) -> ShardingRule:
        sums = ["n w"] * (self.sums is not None)
        text = (
            f"r w, r n w -> {', '.join(['o', 'r n w', *sums])}"
            if self.backward
            else "r n w -> o, r w"
        )
        return ShardingRule(text, ("n",), maxed=(0,), summed=(2,) if sums else ())

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows, parts, width = operands[-1].shape
        shape = (rows, parts, width) if self.backward else (rows, width)
        values = jax.ShapeDtypeStruct(shape, operands[-1].dtype)
        return (_ONE, values, *_sums(parts, width, self.sums))

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import activation_cast, column_sums

        x = arrays[-1]
        rows, parts, width = x.shape
        flat = x.reshape(rows, parts * width)
        plain = (*self.curve, (rows, width))
        if not self.backward:
            launch = activation_cast.forward(
                *plain, parts * width, x.dtype.name, self.constants, None, False, measures=True
            )
            outputs = run(launch, [flat, None])
            return tuple(array for array in outputs if array is not None)
        launch = activation_cast.backward(
            *plain,
            (width, parts * width),
            x.dtype.name,
            self.constants,
            None,
            False,
            self.sums is not None,
            measures=True,
        )
        # dx, the fifth output, reuses the memory of x, as in `activation`.
        amax, *_, dx, partials = run(launch, [arrays[0], flat, None], reuses={1: 4})
        assert amax is not None and dx is not None
        if partials is None or self.sums is None:
            return amax, dx.reshape(x.shape)
        total = run(column_sums.sum_strips(launch.outputs[-1], self.sums).launch, [partials])[0]
        assert total is not None
        return amax, dx.reshape(x.shape), total.reshape(parts, width)


def _sums(parts: int, width: int, dtype: str | None) -> list[jax.ShapeDtypeStruct]:
    return [] if dtype is None else [jax.ShapeDtypeStruct((parts, width), jnp.dtype(dtype))]


def code_shapes(spec: QuantizeSpec, rows: int, width: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the arrays that represent a quantized matrix [rows, width].

    Returns:
        With blocks: codes, scale, [codes_t, scale_t]. Otherwise: codes, [codes_t], scale [1], absolute maximum [1].
        The arrays in brackets exist if spec.columnwise.
    """
    dtype = jax_dtype(spec.element)
    shapes = [jax.ShapeDtypeStruct((rows, width), dtype)]
    if not spec.format.block:
        shapes += [jax.ShapeDtypeStruct((width, rows), dtype)] * spec.columnwise
        return (*shapes, _ONE, _ONE)
    down = _BLOCK if spec.format == BLOCK_2D else 1
    shapes += [jax.ShapeDtypeStruct((ceil_div(rows, down), ceil_div(width, _BLOCK)), jnp.float32)]
    if spec.columnwise:
        scale_t = (ceil_div(width, down), ceil_div(rows, _BLOCK))
        shapes += [
            jax.ShapeDtypeStruct((width, rows), dtype),
            jax.ShapeDtypeStruct(scale_t, jnp.float32),
        ]
    return tuple(shapes)


def _run_coded(program: Program, spec: QuantizeSpec, inputs: list[Array]) -> tuple[Array, ...]:
    """Run a program and return its results in `code_shapes` order, followed by the sums."""
    operands: list[Array | None] = [*inputs, *[None] * (len(program.inputs) - len(inputs))]
    codes, scale, codes_t, scale_t, *rest = perform(program, operands)
    arrays = (codes, scale, codes_t, scale_t) if spec.format.block else (codes, codes_t, scale)
    return tuple(array for array in (*arrays, *rest) if array is not None)


def forward(
    x: Array, scale: Array | None, coded: CodedActivation, cast: QuantizeRequest
) -> Quantized:
    """See `activation_codes`."""
    x, count = with_rows(x, 2)
    counts = {"r": count}
    if scale is None and not coded.spec.format.block:
        amax, y = call_on_axes(MeasuredActivation(coded.names, coded.params, False), counts, x)
        return FORMATS[coded.spec.format.name].quantize_by_kernels(
            y, QuantizeInputs(amax=amax), cast
        )
    kernel = ActivationCodes(coded.names, coded.params, coded.spec, cast.shape, x.shape[-1])
    multiplier = [] if scale is None else [scale.astype(jnp.float32).reshape(1)]
    results = call_on_axes(kernel, counts, x, *multiplier)
    return _quantized(results, coded.spec, cast, (*x.shape[:-2], x.shape[-1]))


def backward(
    dy: Array, x: Array, scale: Array | None, coded: CodedActivation, cast: QuantizeRequest
) -> tuple[Quantized, Array | None]:
    """See `activation_backward_codes`."""
    (x, count), (dy, _) = with_rows(x, 2), with_rows(dy, 1)
    counts = {"r": count}
    if scale is None and not coded.spec.format.block:
        kernel = MeasuredActivation(coded.names, coded.params, True, coded.sums)
        amax, dx, *total = call_on_axes(kernel, counts, dy, x)
        row = FORMATS[coded.spec.format.name]
        quantized = row.quantize_by_kernels(dx, QuantizeInputs(amax=amax), cast)
        return quantized, total[0] if total else None
    kernel = GradientCodes(
        coded.names, coded.params, coded.spec, cast.shape, x.shape[-1], coded.sums
    )
    multiplier = [] if scale is None else [scale.astype(jnp.float32).reshape(1)]
    results = list(call_on_axes(kernel, counts, dy, x, *multiplier))
    total = None if coded.sums is None else results.pop()
    return _quantized(results, coded.spec, cast, x.shape), total


def _quantized(
    arrays: Sequence[Array], spec: QuantizeSpec, cast: QuantizeRequest, shape: tuple[int, ...]
) -> Quantized:
    """Pack arrays in `code_shapes` order into a record; codes have the given shape, scales the matrix shape."""
    if spec.format.block:
        flat = code_shapes(spec, *cast.shape)
        codes = Quantized(
            *(array.reshape(flat[i].shape) if i % 2 else array for i, array in enumerate(arrays))
        )
        return codes.reshaped(shape, cast.axis)
    codes, *codes_t, scale, amax = arrays
    if not codes_t:
        return Quantized(codes, scale, amax=amax)
    return Quantized(codes, scale, codes_t[0], scale, amax)


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}
BACKEND = Backend[ActivationCodesRequest](
    "triton",
    unsupported_reason=unsupported_reason,
    bind=lambda request: functools.partial(
        OPERATIONS[request.activation.operation], cast=request.cast
    ),
)
