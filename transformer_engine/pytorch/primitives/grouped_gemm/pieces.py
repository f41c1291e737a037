"""One group's operands, as parts of all groups' operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ....common.formats import FLOAT8, ceil_div
from ..operand import Operand
from .groups import TILE_ROWS, Groups
from .request import GroupedColumns, GroupedMatrices, GroupedProduct, GroupedRows, is_tiled


def iterate_rows(a: GroupedRows, groups: Groups) -> Iterator[Operand]:
    """Iterate over every group's a_e [M_e, K]."""
    if a.format is None or a.scale is None:
        for codes in groups.split(a.codes):
            yield Operand(codes, dtype=codes.dtype)
        return
    if a.format == FLOAT8:
        for codes, scale in zip(groups.split(a.codes), a.scale[:, :1].unbind(0), strict=True):
            yield Operand(codes, scale, FLOAT8)
        return
    if a.format.swizzled:
        amaxes = _amaxes(a, groups)
        for codes, scale, amax in zip(
            groups.split(a.codes), groups.split(a.scale), amaxes, strict=True
        ):
            yield Operand(codes, scale, a.format, amax)
        return
    blocks = ceil_div(a.codes.shape[1], TILE_ROWS)
    scales = a.scale.split([m * blocks for m in groups.read_rows])
    for codes, scale in zip(groups.split(a.codes), scales, strict=True):
        yield Operand(codes, scale.view(blocks, len(codes)).t(), a.format)


def iterate_columns(a: GroupedColumns, groups: Groups, width: int) -> Iterator[Operand]:
    """Iterate over every group's a_e.T [width, M_e]; quantized: M_e rounded up to 128, with zero codes."""
    if a.format is None or a.scale is None:
        for codes in groups.split(a.codes):
            yield Operand(codes.t(), dtype=codes.dtype)
        return
    if a.format.swizzled:
        rows = groups.read_rows
        parts = a.codes.split([m // a.format.packing for m in rows], 1)
        scales = a.scale.split([m // a.format.length for m in rows], 1)
        for codes, scale, amax in zip(parts, scales, _amaxes(a, groups), strict=True):
            yield Operand(codes, scale, a.format, amax)
        return
    tiles = [ceil_div(m, TILE_ROWS) for m in groups.read_rows]
    if is_tiled(a):
        codes = [part.transpose(0, 1).reshape(-1) for part in a.codes[: sum(tiles)].split(tiles)]
    else:
        codes = a.codes.split([count * TILE_ROWS * width for count in tiles])
    scales = (
        a.scale[:, :1].unbind(0)
        if a.format == FLOAT8
        else a.scale[: sum(tiles) * width].split([count * width for count in tiles])
    )
    for part, scale, count in zip(codes, scales, tiles, strict=True):
        matrix = part.view(width, count * TILE_ROWS)
        yield Operand(
            matrix, scale if a.format == FLOAT8 else scale.view(count, width).t(), a.format
        )


def iterate_matrices(b: GroupedMatrices) -> Iterator[Operand]:
    """Iterate over every group's b_e [N, K]."""
    if b.codes is None or b.scale is None:
        assert b.matrices is not None
        for matrix in b.matrices.tensors:
            yield Operand(matrix.t() if b.transposed else matrix, dtype=matrix.dtype)
        return
    scales = b.scale[:, :1].unbind(0) if b.format == FLOAT8 else b.scale.unbind(0)
    amaxes = [None] * len(b.codes) if b.amax is None else b.amax.split(1)
    for codes, scale, amax in zip(b.codes.unbind(0), scales, amaxes, strict=True):
        yield Operand(codes, scale, b.format, amax)


def _amaxes(a: GroupedRows | GroupedColumns, groups: Groups) -> Sequence[Tensor | None]:
    """Each group's second-level maxima, [1] or [M_e]; None for a format without a second level."""
    if a.amax is None or a.format is None:
        return [None] * groups.count
    return groups.split(a.amax) if a.format.row_scaled else a.amax.split(1)


def list_results(product: GroupedProduct) -> tuple[Tensor, ...]:
    """Return each group's result."""
    out = product.out
    if isinstance(product.b, GroupedMatrices):
        assert isinstance(out, Tensor)
        return product.groups.split(out)
    return tuple(out.unbind(0)) if isinstance(out, Tensor) else tuple(out)


def iterate_operands(product: GroupedProduct) -> Iterator[tuple[int, Operand, Operand, Tensor]]:
    """Iterate over every group's (rows, a, b, result)."""
    groups = product.groups
    if isinstance(product.b, GroupedMatrices):
        assert isinstance(product.a, GroupedRows)
        first, second = iterate_rows(product.a, groups), iterate_matrices(product.b)
    else:
        assert isinstance(product.a, GroupedColumns)
        width, depth = product.extents
        first, second = (
            iterate_columns(product.a, groups, width),
            iterate_columns(product.b, groups, depth),
        )
    return zip(groups.read_rows, first, second, list_results(product), strict=True)
