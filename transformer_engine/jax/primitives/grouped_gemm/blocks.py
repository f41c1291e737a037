"""Grouped matrix products of block-scaled operands. One kernel launch computes all groups.

The file has two backends of `grouped_block_gemm` and `grouped_block_contraction`:

dot_scaled: MXFP8 and NVFP4 (`grouped_scaled.py`). The matrix instructions apply the block scales.

triton: FP8 codes with float32 scales per 128 elements (`grouped_gemm.py`), on every GPU with FP8 tensor cores.

If the product sums over rows, each group is padded with zero rows to a whole number of blocks
(`quantize/grouped_blocks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
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

_RESULT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_ELEMENT_NAMES = {
    jnp.dtype(jnp.float8_e4m3fn): "e4m3",
    jnp.dtype(jnp.float8_e5m2): "e5m2",
    jnp.dtype(jnp.float4_e2m1fn): "e2m1",
}

# Matrix products load 16 bytes of packed codes: NVFP4 groups, whose blocks have 16 rows, begin at multiples of 32.
_LEAST_MULTIPLE = 32


def group_alignment(block: int) -> int:
    """Alignment, in rows, of the first row of each group, for blocks of `block` rows."""
    return max(block, _LEAST_MULTIPLE)


def padded_group_sizes(group_sizes: Array, operand_format: TensorFormat) -> Array:
    """Round each group size [G] up to the group alignment of the format."""
    assert operand_format.block is not None
    alignment = group_alignment(operand_format.block[1])
    return -(-group_sizes.astype(jnp.int32) // alignment) * alignment


class BlockTensor(Protocol):
    """A block-scaled tensor: grouped rows [M, K], or a stack of matrices [G, N, K]."""

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
        m: Number of rows in all groups, including padding rows.
        n: Columns of the result.
        k: Columns of a.
        a_format: Format of a.
        b_format: Format of b.
        code_dtypes: Code dtypes of a and b.
        result_dtype: Result dtype.
        contracts_rows: Whether the rows are contracted; see `grouped_block_contraction`.
        has_unreadable_padding: Whether a, contracted over its columns, has padding rows, which no kernel supports.
        transformed: Whether a and b are Hadamard transformed along the contracted axis.
        platform: Platform of the program, "cpu" or "cuda".
    """

    groups: int
    m: int
    n: int
    k: int
    a_format: TensorFormat
    b_format: TensorFormat
    code_dtypes: tuple[jnp.dtype, jnp.dtype]
    result_dtype: jnp.dtype
    contracts_rows: bool
    has_unreadable_padding: bool
    transformed: tuple[bool, bool]
    platform: str


def _unsupported_reason(request: GroupedBlockRequest) -> str | None:
    """Return why no kernel computes the product, or None; the callers check the formats."""
    if (reason := platform_failure(request.platform, "GroupedGemmPrimitive")) is not None:
        return reason
    if request.has_unreadable_padding:
        return (
            "a has padding rows between its groups, because several rows share a scale; "
            "the kernels read groups without padding"
        )
    if request.transformed[0] != request.transformed[1]:
        return "only one operand is Hadamard transformed; the transforms cancel only if both are"
    if any(dtype not in _ELEMENT_NAMES for dtype in request.code_dtypes):
        a_dtype, b_dtype = request.code_dtypes
        return f"codes in {a_dtype} and {b_dtype}; the kernels support E4M3, E5M2 and E2M1"
    if 0 in (request.groups, request.m, request.n, request.k):
        return "a product without elements"
    if request.result_dtype not in _RESULT_DTYPES:
        return (
            f"a result in {request.result_dtype}; the kernels write bfloat16, float16 and float32"
        )
    largest = max(request.n, request.k, request.m)
    if largest >= LARGEST_EXTENT:
        return f"an extent of {largest} reaches {LARGEST_EXTENT}"
    unaligned = [size for size in (request.n, request.k) if size % 16]
    return f"an extent of {unaligned[0]} is not a multiple of 16" if unaligned else None


def float32_unsupported_reason(request: GroupedBlockRequest) -> str | None:
    """Return why the kernels for float32 scales do not support the request, or None."""
    b_format_required = BLOCK_1D if request.contracts_rows else BLOCK_2D
    if request.a_format != BLOCK_1D or request.b_format != b_format_required:
        supported = "1x128 by 1x128" if request.contracts_rows else "1x128 by 128x128"
        return (
            f"{request.a_format.name} by {request.b_format.name}; "
            f"the kernels multiply blocks of {supported} elements"
        )
    return _unsupported_reason(request) or hardware().lacks("fp8 products")


def scaled_unsupported_reason(request: GroupedBlockRequest) -> str | None:
    """Return why the kernels for one-byte scales do not support the request, or None."""
    a, b = request.a_format, request.b_format
    if not (a.swizzled and b.swizzled) or a.block_products != b.block_products or b.row_scaled:
        return f"the kernels take two operands of {SWIZZLED_NAMES}, b without scales per row"
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
        formats: Formats of a and b.
        element_names: Code element names of a and b.
        result_dtype: Result dtype.
    """

    formats: tuple[TensorFormat, TensorFormat]
    element_names: tuple[str, str]
    result_dtype: jnp.dtype

    @property
    def in_parts(self) -> Kernel:
        return replace(self, result_dtype=jnp.dtype(jnp.float32))

    @property
    def packing(self) -> int:
        """Codes per byte."""
        return self.formats[0].packing

    @property
    def block_scales(self) -> Any:
        """Description of the block scales (`BlockScales`) for the kernels in `grouped_scaled.py`."""
        from ....common.kernels.grouped_scaled import BlockScales  # it imports triton

        # A value is code * block scale * amax / unit_amax, so the product of two values has this factor.
        a_format, b_format = self.formats
        if a_format.unit_amax is None or b_format.unit_amax is None:
            factor = None
        else:
            factor = 1.0 / (a_format.unit_amax * b_format.unit_amax)
        return BlockScales(self.element_names, a_format.length, factor, a_format.row_scaled)


@dataclass(frozen=True)
class RowsProduct(_BlockProduct):
    """Multiply grouped rows by the matrix of their group.

    out [M, N] from a [M, K], b [G, N, K], sizes [G], scale_a, scale_b and, for NVFP4 only, amax_a ([G], or [M] with
    scales per row) and amax_b [G]. Rows after the last group are zero.

    Attributes:
        shape: (N, K) for the full matrices; each shard contains full blocks.
    """

    shape: tuple[int, int]

    @property
    def rule(self) -> ShardingRule:
        block_a, block_b = self.formats[0].block, self.formats[1].block
        assert block_a is not None and block_b is not None
        n, k = extent("n", self.shape[0], block_b[0]), extent("k", self.shape[1], block_a[1])
        codes = k.bytes if self.packing == 2 else k.whole
        maxima = ""
        if self.formats[0].levels:
            maxima = ", m, g" if self.formats[0].row_scaled else ", g, g"
        text = f"m {codes}, g {n.whole} {codes}, g, m {k.blocks}, g {n.blocks} {k.blocks}{maxima} -> m {n.whole}"
        return ShardingRule.from_extents(text, n, k, whole=("m", "g"), summed=(0,))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        a, b = operands[:2]
        return (jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), self.result_dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import grouped_gemm, grouped_scaled  # they import triton

        a, b, sizes, scale_a, scale_b, *maxima = arrays
        (out,) = self.results(a, b)
        no_bias = None
        no_bias = None
        shape = (*out.shape, a.shape[1] * self.packing, b.shape[0])
        layout = layout_of_rows(sizes, a.shape[0])
        if self.formats[0].swizzled:
            launch = grouped_scaled.product_of_rows(*shape, self.block_scales, clears=True)
            inputs = [a, b, layout, scale_a, scale_b, *(maxima or (None, None)), no_bias]
        else:
            launch = grouped_gemm.product_of_rows(
                *shape,
                scaling=grouped_gemm.BLOCK_SCALES,
                clears=True,
                row_major=True,
                shared_memory=processors().shared_memory,
                hopper=hardware().has("hopper instructions"),
            )
            no_addresses = None  # of separate matrices: b is one array
            inputs = [a, b, no_addresses, scale_a, scale_b, no_bias, layout]
        (result,) = run(launch, inputs, [out])
        assert result is not None
        return (result,)


@dataclass(frozen=True)
class RowsContraction(_BlockProduct):
    """Contract two operands over the rows of each group.

    out [G, K, N] from a [K, P], b [N, P], sizes [G], scale_a, scale_b and, for NVFP4 only, amax_a [G] and amax_b [G].
    P and sizes count the padding rows.
    """

    @property
    def rule(self) -> ShardingRule:
        # q: blocks along p. A group may cross shards of p, so p is replicated.
        maxima = ", g, g" if self.formats[0].levels else ""
        return ShardingRule(f"k p, n p, g, k q, n q{maxima} -> g k n", ("p", "g", "q"))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        a, b, sizes = operands[:3]
        return (jax.ShapeDtypeStruct((sizes.shape[0], a.shape[0], b.shape[0]), self.result_dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import grouped_gemm, grouped_scaled  # they import triton

        a, b, sizes, scale_a, scale_b, *maxima = arrays
        (out,) = self.results(a, b, sizes)
        no_addresses = None  # of separate results: out is one array
        no_addresses = None  # of separate results: out is one array
        groups, *shape = out.shape
        rows = a.shape[1] * self.packing
        layout = layout_of_rows(sizes, rows)
        if self.formats[0].swizzled:
            launch = grouped_scaled.product_of_columns(rows, *shape, groups, self.block_scales)
            inputs = [a, b, scale_a, scale_b, *(maxima or (None, None)), layout, no_addresses]
        else:
            launch = grouped_gemm.product_of_columns(
                *shape,
                groups,
                scaling=grouped_gemm.BLOCK_SCALES,
                together=rows,
                shared_memory=processors().shared_memory,
                hopper=hardware().has("hopper instructions"),
            )
            inputs = [a, b, scale_a.T, scale_b.T, layout, no_addresses]
        (result,) = run(launch, inputs, [out])
        assert result is not None
        return (result,)


_ProductT = TypeVar("_ProductT", bound=_BlockProduct)


def multiply_rows(
    a: BlockTensor, b: BlockTensor, group_sizes: Array, dtype: jnp.dtype, features_first: bool
) -> Array:
    """Multiply grouped rows by the matrix of their group; see `grouped_block_gemm`.

    `features_first` has no effect: block-scaled operands have the contracted axis last.
    """
    left, right = a.operand(), b.operand()
    shape = right.codes.shape[1], right.codes.shape[2]
    return _run_product(RowsProduct, left, right, group_sizes, dtype, shape=shape)


def contract_rows(a: BlockTensor, b: BlockTensor, group_sizes: Array, dtype: jnp.dtype) -> Array:
    """Contract two operands over the rows of each group; see `grouped_block_contraction`."""
    left, right = a.operand(), b.operand()
    assert left.format is not None
    return _run_product(
        RowsContraction, left, right, padded_group_sizes(group_sizes, left.format), dtype
    )


def _run_product(
    kernel: type[_ProductT], a: Operand, b: Operand, sizes: Array, dtype: jnp.dtype, **options: Any
) -> Array:
    """Convert E2M1 codes to bytes (two per byte) and exponent scales to uint8, then run the kernel.

    The E4M3 scales of NVFP4 keep their dtype.
    """
    assert a.format is not None and b.format is not None
    names = _ELEMENT_NAMES[jnp.dtype(a.codes.dtype)], _ELEMENT_NAMES[jnp.dtype(b.codes.dtype)]
    codes, scales = [], []
    for operand in (a, b):
        assert operand.format is not None and operand.scale is not None
        codes.append(pack_e2m1(operand.codes) if operand.format.packing == 2 else operand.codes)
        exponents = operand.format.has_exponent_scales
        scales.append(
            lax.bitcast_convert_type(operand.scale, jnp.uint8) if exponents else operand.scale
        )
    maxima = [] if a.amax is None or b.amax is None else [a.amax.reshape(-1), b.amax.reshape(-1)]
    product = kernel((a.format, b.format), names, jnp.dtype(dtype), **options)
    return call(product, *codes, sizes, *scales, *maxima)[0]


def _bind(request: GroupedBlockRequest) -> Callable[..., Array]:
    return contract_rows if request.contracts_rows else multiply_rows


DOT_SCALED = Backend[GroupedBlockRequest](
    "dot_scaled", unsupported_reason=scaled_unsupported_reason, bind=_bind
)
TRITON = Backend[GroupedBlockRequest](
    "triton", unsupported_reason=float32_unsupported_reason, bind=_bind
)
