"""Codes for a matrix stack, and for grouped rows, with one launch from common/kernels/grouped_cast.py."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ....common.formats import Element
from ....common.kernels.launch import LARGEST_EXTENT
from ...runtime.platform import hardware
from .. import exact
from ..kernels import Kernel, call
from ..launching import platform_failure, run
from ..partitioning import ShardingRule
from ..quantize import jax_dtype
from .reference import RowCodes, RowsRequest, StackCodes, StackRequest


def unsupported_reason(request: StackRequest | RowsRequest) -> str | None:
    if (reason := platform_failure(request.platform, "GroupedQuantizePrimitive")) is not None:
        return reason
    if (reason := hardware().lacks("cast kernels")) is not None:
        return reason
    if 0 in request[:3]:
        return "groups without elements"
    if max(request[1:3]) >= LARGEST_EXTENT:
        return f"matrices of {request[1]} by {request[2]} elements; their extents reach {LARGEST_EXTENT}"
    if request.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"{request.dtype}; it takes float32, bfloat16 and float16"
    if isinstance(request, RowsRequest):
        return (
            f"{request.columns} columns are not a multiple of 16" if request.columns % 16 else None
        )
    odd = [extent for extent in (request.rows, request.columns) if extent % 16]
    return f"an extent of {odd[0]} is not a multiple of 16" if odd else None


@dataclass(frozen=True)
class Stack(Kernel):
    """(x [G, R, C], multiplier [G]) -> [codes [G, R, C]], [codes_t [G, C, R]], scale [G], amax [G]"""

    element: Element
    directions: tuple[bool, bool]

    @property
    def rule(self) -> ShardingRule:
        outputs = [
            axes
            for axes, present in zip(("g r c", "g c r"), self.directions, strict=True)
            if present
        ]
        return ShardingRule(
            f"g r c, g -> {', '.join([*outputs, 'g', 'g'])}", maxed=(len(outputs) + 1,)
        )

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        groups, rows, columns = operands[0].shape
        shapes = zip(
            ((groups, rows, columns), (groups, columns, rows)), self.directions, strict=True
        )
        codes = [
            jax.ShapeDtypeStruct(shape, jax_dtype(self.element))
            for shape, present in shapes
            if present
        ]
        return (*codes, *[jax.ShapeDtypeStruct((groups,), jnp.float32)] * 2)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import grouped_cast  # it imports triton

        x, multiplier = arrays
        groups, rows, columns = x.shape
        launch = grouped_cast.cast(
            (rows, columns),
            groups,
            False,
            self.element,
            1,
            0,
            False,
            0.0,
            *self.directions,
            records=True,
            zero_is_one=True,
        )
        launch = dataclasses.replace(launch, tables=(), handles={})  # the matrices are contiguous
        amax = jnp.zeros(groups, jnp.float32)
        *codes, scale, amax = run(launch, [x, None, None, multiplier, amax])
        assert scale is not None and amax is not None
        return (*(one for one in codes if one is not None), scale[:, 0], amax)


def quantize(
    x: Array, multiplier: Array, element: Element, directions: tuple[bool, bool]
) -> StackCodes:
    """See `quantize_stack`."""
    outputs = iter(call(Stack(element, directions), x, multiplier))
    rows, columns = (next(outputs) if present else None for present in directions)
    return StackCodes(rows, columns, next(outputs), next(outputs))


BACKEND = Backend[StackRequest](
    "triton", unsupported_reason=unsupported_reason, bind=lambda request: quantize
)


@dataclass(frozen=True)
class GroupMaxima(Kernel):
    """(x [M, K], sizes [G]) -> max|x| over each group's rows [G]"""

    @property
    def rule(self) -> ShardingRule:
        return ShardingRule("m k, g -> g", ("m", "g"), maxed=(0,))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(operands[1].shape, jnp.float32),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import grouped_cast  # it imports triton
        from ....common.kernels.grouped_layout import group_layout

        x, sizes = arrays
        (groups,) = sizes.shape
        (layout,) = run(group_layout(x.shape[0], groups), [sizes])
        (amax,) = run(grouped_cast.maximum(x.shape, groups, True), [x, None, layout])
        assert amax is not None
        return (amax,)


@dataclass(frozen=True)
class GroupedRowsCast(Kernel):
    """(x [M, K], sizes [G], [multiplier or amax [G]]) -> codes [M, K], scale [G], [amax [G]]

    Attributes:
        element: Code element type.
        scaling: power_of_two and epsilon for multipliers that are derived from the maxima.
        given: The last operand, "multiplier" or "amax", or None without it. The kernel finds the maxima unless they are
            given.
    """

    element: Element
    scaling: tuple[bool, float]
    given: str | None

    @property
    def rule(self) -> ShardingRule:
        finds = self.given != "amax"
        text = f"m k, g{', g' * (self.given is not None)} -> m k, g{', g' * finds}"
        return ShardingRule(text, ("m", "g", "k")[: 2 + (self.given is None)], maxed=(2,) * finds)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        x, sizes = operands[:2]
        codes = jax.ShapeDtypeStruct(x.shape, jax_dtype(self.element))
        return (
            codes,
            *[jax.ShapeDtypeStruct(sizes.shape, jnp.float32)] * (1 + (self.given != "amax")),
        )

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import grouped_cast  # it imports triton
        from ....common.kernels.grouped_layout import group_layout

        x, sizes, *numbers = arrays
        (groups,) = sizes.shape
        (layout,) = run(group_layout(x.shape[0], groups), [sizes])
        scaled, factor = self.given == "multiplier", None
        if scaled:
            factor, amax = numbers[0], jnp.zeros(groups, jnp.float32)
        elif numbers:
            (amax,) = numbers
        else:
            (amax,) = run(grouped_cast.maximum(x.shape, groups, True), [x, None, layout])
        launch = grouped_cast.cast(
            x.shape,
            groups,
            True,
            self.element,
            int(scaled),
            0,
            *self.scaling,
            True,
            False,
            records=scaled,
            zero_is_one=scaled,
            rest=True,
        )
        codes, _, scale, *recorded = run(launch, [x, None, layout, factor, amax])
        amax = recorded[0] if recorded else amax
        assert codes is not None and scale is not None and amax is not None
        return (codes, scale[:, 0], *(amax,) * (self.given != "amax"))


def quantize_rows(
    x: Array,
    group_sizes: Array,
    multiplier: Array | None,
    element: Element,
    scaling: tuple[bool, float],
    mesh_axes: tuple[str, ...],
) -> RowCodes:
    """See `quantize_rows`."""
    if multiplier is not None:
        return RowCodes(
            *call(GroupedRowsCast(element, scaling, "multiplier"), x, group_sizes, multiplier)
        )
    if not mesh_axes:
        return RowCodes(*call(GroupedRowsCast(element, scaling, None), x, group_sizes))
    amax = exact.maximum_over_axes(call(GroupMaxima(), x, group_sizes)[0], mesh_axes)
    codes, scale = call(GroupedRowsCast(element, scaling, "amax"), x, group_sizes, amax)
    return RowCodes(codes, scale, amax)


ROWS = Backend[RowsRequest](
    "triton", unsupported_reason=unsupported_reason, bind=lambda request: quantize_rows
)
