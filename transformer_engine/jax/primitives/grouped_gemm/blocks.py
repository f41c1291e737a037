"""Grouped products of block-scaled codes by the kernels in common/kernels, all groups in one launch.

dot_scaled: MXFP8 and NVFP4 codes (`grouped_scaled.py`), whose block scales matrix instructions read.

triton: FP8 codes with float32 scales per 128 elements (`grouped_gemm.py`), on every GPU with FP8 tensor cores.

Operands that are contracted over the rows are padded: every group begins at a multiple of the block, and zeros fill the
remaining rows (`quantize/grouped_blocks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common import optional
from ....common.dispatch import Backend
from ....common.formats import BLOCK_1D, BLOCK_2D, SWIZZLED_NAMES, TensorFormat
from ....common.kernels.launch import LARGEST_EXTENT
from ...runtime.platform import hardware, processors
from ..kernels import Kernel, call
from ..launching import platform_failure, run
from ..operand import Operand
from ..partitioning import ShardingRule, extent
from ..quantize import pack_e2m1
from .triton import layout_of_rows

_RESULTS = (jnp.bfloat16, jnp.float16, jnp.float32)
_ELEMENTS = {
    jnp.dtype(jnp.float8_e4m3fn): "e4m3",
    jnp.dtype(jnp.float8_e5m2): "e5m2",
    jnp.dtype(jnp.float4_e2m1fn): "e2m1",
}

# Matrix products load 16 bytes of packed codes: NVFP4 groups, whose blocks have 16 rows, begin at multiples of 32.
_LEAST_MULTIPLE = 32


def row_multiple(block: int) -> int:
    """Divisor of the first padded row in a group whose blocks have this many rows."""
    return max(block, _LEAST_MULTIPLE)


def padded_sizes(group_sizes: Array, form: TensorFormat) -> Array:
    """Rows per group [G], including the padding to blocks along the rows."""
    assert form.block is not None
    multiple = row_multiple(form.block[1])
    return -(-group_sizes.astype(jnp.int32) // multiple) * multiple


class BlockTensor(Protocol):
    """Block-scaled codes for grouped rows, or for a matrix stack."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Value shape, without padding and in the original axis order."""
        ...

    def operand(self) -> Operand:
        """Codes with the contracted axis last: [rows, K], or [G, rows, K] for a stack."""
        ...

    def dequantize(self) -> Array:
        """Values, without padding and in the original axis order."""
        ...


class GroupedBlockRequest(NamedTuple):
    """Grouped-product properties that determine the backend for block-scaled codes.

    Attributes:
        groups: Number of groups G.
        m: Rows of a: [m, k], or [k, m] if the rows are contracted, with the padding between groups.
        n: Result columns.
        k: Row columns.
        a_format: Format of a.
        b_format: Format of b.
        elements: Code dtypes of a and b.
        result: Result dtype.
        contracts_rows: Whether the rows are contracted; see `grouped_block_contraction`.
        padded: Whether the rows of a have the padding between groups, which products over their columns do not read.
        transformed: Whether a and b are Hadamard transformed along the contracted axis.
        platform: Platform of the program, "cpu" or "cuda".
    """

    groups: int
    m: int
    n: int
    k: int
    a_format: TensorFormat
    b_format: TensorFormat
    elements: tuple[jnp.dtype, jnp.dtype]
    result: jnp.dtype
    contracts_rows: bool
    padded: bool
    transformed: tuple[bool, bool]
    platform: str


def _unsupported_reason(request: GroupedBlockRequest) -> str | None:
    """Reason why no kernel computes a product; the callers check the formats."""
    if (reason := platform_failure(request.platform, "GroupedGemmPrimitive")) is not None:
        return reason
    if request.padded:
        return "rows share scales, so that a has padding between its groups"
    if request.transformed[0] is not request.transformed[1]:
        return "one operand is Hadamard transformed; the product of its values needs the inverse transform"
    if any(element not in _ELEMENTS for element in request.elements):
        return f"codes in {request.elements[0]} and {request.elements[1]}; it takes E4M3, E5M2 and E2M1"
    if 0 in (request.groups, request.m, request.n, request.k):
        return "a product without elements"
    if request.result not in _RESULTS:
        return f"a result in {request.result}; it writes bfloat16, float16 and float32"
    largest = max(request.n, request.k, request.m)
    if largest >= LARGEST_EXTENT:
        return f"an extent of {largest} reaches {LARGEST_EXTENT}"
    odd = [extent for extent in (request.n, request.k) if extent % 16]
    return f"an extent of {odd[0]} is not a multiple of 16" if odd else None


def float32_unsupported_reason(request: GroupedBlockRequest) -> str | None:
    """Reason why `grouped_gemm.py` does not multiply two operands with float32 scales, or None."""
    right = BLOCK_1D if request.contracts_rows else BLOCK_2D
    if request.a_format != BLOCK_1D or request.b_format != right:
        sizes = "1x128 by 1x128" if request.contracts_rows else "1x128 by 128x128"
        return f"{request.a_format.name} by {request.b_format.name}; it multiplies blocks of {sizes} elements"
    return _unsupported_reason(request) or hardware().lacks("fp8 products")


def scaled_unsupported_reason(request: GroupedBlockRequest) -> str | None:
    """Reason why `grouped_scaled.py` does not multiply two operands with one-byte scales, or None."""
    a, b = request.a_format, request.b_format
    if not (a.swizzled and b.swizzled) or a.block_products != b.block_products or b.row_scaled:
        return f"it takes two operands of {SWIZZLED_NAMES}, the right one without scales per row"
    if (reason := _unsupported_reason(request)) is not None:
        return reason
    assert a.block_products is not None
    gpu = hardware()
    if (reason := gpu.lacks(a.block_products)) is not None:
        return reason
    if (reason := optional.scaled_dot_problem(gpu, optional.release("triton"))) is not None:
        return reason
    from ....common.kernels.grouped_scaled import ROW_MULTIPLE  # it imports triton

    if request.contracts_rows and request.m % ROW_MULTIPLE:
        return f"{request.m} contracted rows are not a multiple of {ROW_MULTIPLE}"
    if not request.contracts_rows and request.k % a.length:
        return f"K={request.k} is not a multiple of {a.length}, the elements of a block"
    return None


@dataclass(frozen=True)
class _BlockProduct(Kernel):
    """Base class for grouped products of block-scaled codes.

    Attributes:
        forms: Formats of a and b.
        elements: Element names of a and b.
        dtype: Result dtype.
    """

    forms: tuple[TensorFormat, TensorFormat]
    elements: tuple[str, str]
    dtype: jnp.dtype

    @property
    def in_parts(self) -> Kernel:
        return replace(self, dtype=jnp.dtype(jnp.float32))

    @property
    def packing(self) -> int:
        """Codes per byte."""
        return self.forms[0].packing

    @property
    def scales(self) -> Any:
        """Block scales in the form that `grouped_scaled.py` kernels read."""
        from ....common.kernels.grouped_scaled import BlockScales  # it imports triton

        units = [form.unit_amax for form in self.forms]
        factor = None if units[0] is None or units[1] is None else 1.0 / (units[0] * units[1])
        return BlockScales(self.elements, self.forms[0].length, factor, self.forms[0].row_scaled)


@dataclass(frozen=True)
class BlockRows(_BlockProduct):
    """(a [M, K], b [G, N, K], sizes [G], scales of a, of b, [maxima of a, of b]) -> out [M, N], 0 after the last group

    Attributes:
        shape: (N, K) for the full matrices; each shard contains full blocks.
    """

    shape: tuple[int, int]

    @property
    def rule(self) -> ShardingRule:
        block_a, block_b = self.forms[0].block, self.forms[1].block
        assert block_a is not None and block_b is not None
        n, k = extent("n", self.shape[0], block_b[0]), extent("k", self.shape[1], block_a[1])
        codes = k.bytes if self.packing == 2 else k.whole
        maxima = (
            (", m" if self.forms[0].row_scaled else ", g") + ", g" if self.forms[0].levels else ""
        )
        text = f"m {codes}, g {n.whole} {codes}, g, m {k.blocks}, g {n.blocks} {k.blocks}{maxima} -> m {n.whole}"
        return ShardingRule.from_extents(text, n, k, whole=("m", "g"), summed=(0,))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        a, b = operands[:2]
        return (jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), self.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import grouped_gemm, grouped_scaled  # they import triton

        a, b, sizes, scale_a, scale_b, *levels = arrays
        (out,) = self.results(a, b)
        shape = (*out.shape, a.shape[1] * self.packing, b.shape[0])
        layout = layout_of_rows(sizes, a.shape[0])
        if self.forms[0].swizzled:
            launch = grouped_scaled.product_of_rows(*shape, self.scales, clears=True)
            inputs = [a, b, layout, scale_a, scale_b, *(levels or (None, None)), None]
        else:
            launch = grouped_gemm.product_of_rows(
                *shape,
                scaling=grouped_gemm.BLOCK_SCALES,
                clears=True,
                row_major=True,
                shared_memory=processors().shared_memory,
                hopper=hardware().has("hopper instructions"),
            )
            inputs = [a, b, None, scale_a, scale_b, None, layout]
        (result,) = run(launch, inputs, [out])
        assert result is not None
        return (result,)


@dataclass(frozen=True)
class BlockContraction(_BlockProduct):
    """(a [K, P], b [N, P], sizes [G], scales of a, of b, [maxima [G] of a, of b]) -> out [G, K, N]

    P rows contain the padding between groups, and sizes count it.
    """

    @property
    def rule(self) -> ShardingRule:
        maxima = ", g, g" if self.forms[0].levels else ""
        return ShardingRule(f"k p, n p, g, k q, n q{maxima} -> g k n", ("p", "g", "q"))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        a, b, sizes = operands[:3]
        return (jax.ShapeDtypeStruct((sizes.shape[0], a.shape[0], b.shape[0]), self.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import grouped_gemm, grouped_scaled  # they import triton

        a, b, sizes, scale_a, scale_b, *levels = arrays
        (out,) = self.results(a, b, sizes)
        groups, *shape = out.shape
        rows = a.shape[1] * self.packing
        layout = layout_of_rows(sizes, rows)
        if self.forms[0].swizzled:
            launch = grouped_scaled.product_of_columns(rows, *shape, groups, self.scales)
            inputs = [a, b, scale_a, scale_b, *(levels or (None, None)), layout, None]
        else:
            launch = grouped_gemm.product_of_columns(
                *shape,
                groups,
                scaling=grouped_gemm.BLOCK_SCALES,
                together=rows,
                shared_memory=processors().shared_memory,
                hopper=hardware().has("hopper instructions"),
            )
            inputs = [a, b, scale_a.T, scale_b.T, layout, None]
        (result,) = run(launch, inputs, [out])
        assert result is not None
        return (result,)


Product = TypeVar("Product", bound=_BlockProduct)


def of_rows(
    a: BlockTensor, b: BlockTensor, group_sizes: Array, dtype: jnp.dtype, features_first: bool
) -> Array:
    """See `grouped_block_gemm`."""
    left, right = a.operand(), b.operand()
    shape = right.codes.shape[1], right.codes.shape[2]
    return _multiply_bytes(BlockRows, left, right, group_sizes, dtype, shape=shape)


def over_rows(a: BlockTensor, b: BlockTensor, group_sizes: Array, dtype: jnp.dtype) -> Array:
    """See `grouped_block_contraction`."""
    left, right = a.operand(), b.operand()
    assert left.format is not None
    return _multiply_bytes(
        BlockContraction, left, right, padded_sizes(group_sizes, left.format), dtype
    )


def _multiply_bytes(
    kernel: type[Product], a: Operand, b: Operand, sizes: Array, dtype: jnp.dtype, **options: Any
) -> Array:
    """Run a kernel on byte codes, and on scales in the dtype that it reads."""
    assert (
        a.format is not None
        and b.format is not None
        and a.scale is not None
        and b.scale is not None
    )
    elements = _ELEMENTS[jnp.dtype(a.codes.dtype)], _ELEMENTS[jnp.dtype(b.codes.dtype)]
    codes, scales = [], []
    for matrix, scale, form in ((a.codes, a.scale, a.format), (b.codes, b.scale, b.format)):
        codes.append(pack_e2m1(matrix) if form.packing == 2 else matrix)
        scales.append(
            lax.bitcast_convert_type(scale, jnp.uint8) if form.has_exponent_scales else scale
        )
    maxima = [] if a.amax is None or b.amax is None else [a.amax.reshape(-1), b.amax.reshape(-1)]
    product = kernel((a.format, b.format), elements, jnp.dtype(dtype), **options)
    return call(product, *codes, sizes, *scales, *maxima)[0]


def _bind(request: GroupedBlockRequest) -> Any:
    return over_rows if request.contracts_rows else of_rows


DOT_SCALED = Backend[GroupedBlockRequest](
    "dot_scaled", unsupported_reason=scaled_unsupported_reason, bind=_bind
)
TRITON = Backend[GroupedBlockRequest](
    "triton", unsupported_reason=float32_unsupported_reason, bind=_bind
)
