"""Grouped products with the kernels in common/kernels/grouped_gemm.py: all groups in one launch, with any sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ....common.formats import E4M3, E5M2
from ....common.kernels.launch import LARGEST_EXTENT
from ...runtime.platform import hardware, processors
from ..kernels import Kernel, call
from ..launching import platform_failure, run
from ..partitioning import ShardingRule
from .reference import GroupedGemmRequest, Scales

_HALVES = (jnp.bfloat16, jnp.float16)
_ELEMENTS = {jnp.dtype(jnp.float8_e4m3fn): E4M3, jnp.dtype(jnp.float8_e5m2): E5M2}
_RESULTS = (*_HALVES, jnp.float32)


def unsupported_reason(request: GroupedGemmRequest) -> str | None:
    if (reason := platform_failure(request.platform, "GroupedGemmPrimitive")) is not None:
        return reason
    if request.scaled:
        if request.dtype not in _ELEMENTS:
            return f"codes in {request.dtype}; it takes FP8"
        if (reason := hardware().lacks("fp8 products")) is not None:
            return reason
        if not request.contracts_rows and not request.features_first:
            return "codes of kernels [G, K, N]; tensor cores take FP8 with the contracted axis last"
    elif request.dtype not in _HALVES:
        return f"{request.dtype}; it takes bfloat16 and float16"
    if 0 in (request.groups, request.m, request.n, request.k):
        return "a product without elements"
    if request.result not in _RESULTS:
        return f"a result in {request.result}; the kernels write bfloat16, float16 and float32"
    if max(request.n, request.k) >= LARGEST_EXTENT:
        return f"an extent of {max(request.n, request.k)} reaches {LARGEST_EXTENT}"
    odd = [extent for extent in (request.n, request.k) if extent % 16]
    return f"an extent of {odd[0]} is not a multiple of 16" if odd else None


@dataclass(frozen=True)
class GroupedRowsProduct(Kernel):
    """(a [M, K], b [G, K, N] or [G, N, K], sizes [G], [scales [G] of a, of b]) -> out [M, N], 0 after the last group"""

    dtype: jnp.dtype
    features_first: bool
    scaled: bool
    exact: bool

    @property
    def rule(self) -> ShardingRule:
        matrix = "n k" if self.features_first else "k n"
        return ShardingRule(
            f"m k, g {matrix}, g{', g, g' * self.scaled} -> m n", ("m", "g"), summed=(0,)
        )

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        a, b = operands[:2]
        return (
            jax.ShapeDtypeStruct(
                (a.shape[0], b.shape[1 if self.features_first else 2]), self.dtype
            ),
        )

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import grouped_gemm as kernels  # it imports triton

        a, b, sizes, *scales = arrays
        (out,) = self.results(a, b)
        launch = kernels.product_of_rows(
            *out.shape,
            a.shape[1],
            b.shape[0],
            scaling=kernels.TENSOR_SCALES if self.scaled else kernels.UNSCALED,
            exact=self.scaled and self.exact,
            transposed=not self.features_first,
            clears=True,
            shared_memory=processors().shared_memory,
            hopper=hardware().has("hopper instructions"),
        )
        scale_a, scale_b = (
            (
                jnp.pad(scale.reshape(-1, 1), ((0, 0), (0, kernels.SCALE_SLOT - 1)))
                for scale in scales
            )
            if scales
            else (None, None)
        )
        layout = layout_of_rows(sizes, a.shape[0])
        (result,) = run(launch, [a, b, None, scale_a, scale_b, None, layout], [out])
        assert result is not None
        return (result,)


@dataclass(frozen=True)
class GroupedContraction(Kernel):
    """(a [M, K], b [M, N], sizes [G], [scales [G] of a, of b]) -> out [G, K, N]

    Tensor cores need FP8 operands with the contracted axis last: codes are transposed group by group, to [K, rows] and
    [N, rows].
    """

    dtype: jnp.dtype
    scaled: bool

    @property
    def rule(self) -> ShardingRule:
        return ShardingRule(f"m k, m n, g{', g, g' * self.scaled} -> g k n", ("m", "g"))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        a, b, sizes = operands[:3]
        return (jax.ShapeDtypeStruct((sizes.shape[0], a.shape[1], b.shape[1]), self.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import grouped_gemm as kernels  # it imports triton

        a, b, sizes, *scales = arrays
        (result,) = self.results(a, b, sizes)
        launch = kernels.product_of_columns(
            result.shape[1],
            result.shape[2],
            result.shape[0],
            exact=self.scaled,
            scaling=kernels.TENSOR_SCALES if self.scaled else kernels.UNSCALED,
            shared_memory=processors().shared_memory,
            hopper=hardware().has("hopper instructions"),
        )
        layout = layout_of_rows(sizes, a.shape[0])
        scale_a = scale_b = None
        if self.scaled:
            a, b = (_columns(codes, layout, result.shape[0]) for codes in (a, b))
            scale_a, scale_b = (
                jnp.pad(scale.reshape(-1, 1), ((0, 0), (0, kernels.SCALE_SLOT - 1)))
                for scale in scales
            )
        (out,) = run(launch, [a, b, scale_a, scale_b, layout, None], [result])
        assert out is not None
        return (out,)


def _columns(codes: Array, layout: Array, groups: int) -> Array:
    """Transpose FP8 codes [M, K] group by group to [K, rows rounded up to 128], by a cast with the scale 1."""
    from ....common.kernels import grouped_cast, grouped_layout

    element = _ELEMENTS[codes.dtype]
    (rows, depth) = codes.shape
    launch = grouped_cast.cast(
        (rows, depth),
        groups,
        True,
        element,
        0,
        0,
        False,
        0.0,
        rowwise=False,
        columnwise=True,
        records=False,
    )
    like = jax.ShapeDtypeStruct(
        (grouped_layout.tiles_at_most(rows, groups) * grouped_layout.TILE_ROWS * depth,),
        codes.dtype,
    )
    # A group whose maximum is the largest number of the element type has the scale 1.
    amax = jnp.full(groups, element.maximum, jnp.float32)
    _, transposed, _ = run(launch, [codes, None, layout, None, amax], [None, like, None])
    assert transposed is not None
    return transposed


def layout_of_rows(sizes: Array, rows: int) -> Array:
    """Positions of groups with these sizes [G] among the rows, as `common/kernels/grouped_layout.py` stores them."""
    from ....common.kernels.grouped_layout import group_layout  # it imports triton

    (layout,) = run(group_layout(rows, sizes.shape[0]), [sizes])
    assert layout is not None
    return layout


def multiply_rows(
    a: Array,
    b: Array,
    group_sizes: Array,
    scales: Scales,
    dtype: jnp.dtype,
    features_first: bool,
    exact: bool,
) -> Array:
    """Multiply grouped rows by the matrix of their group; see `grouped_gemm`."""
    kernel = GroupedRowsProduct(jnp.dtype(dtype), features_first, scales is not None, exact)
    return call(kernel, a, b, group_sizes, *(scales or ()))[0]


def contract_rows(
    a: Array, b: Array, group_sizes: Array, scales: Scales, dtype: jnp.dtype
) -> Array:
    """Contract two operands over the rows of each group; see `grouped_contraction`."""
    kernel = GroupedContraction(jnp.dtype(dtype), scales is not None)
    return call(kernel, a, b, group_sizes, *(scales or ()))[0]


BACKEND = Backend[GroupedGemmRequest](
    "triton",
    unsupported_reason=unsupported_reason,
    bind=lambda request: contract_rows if request.contracts_rows else multiply_rows,
)
