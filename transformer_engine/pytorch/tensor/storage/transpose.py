"""The operand of the transposed matrix, exact where square tiles share a scale: codes and scales only move."""

from __future__ import annotations

from torch import Tensor

from ...primitives.operand import Operand
from ...primitives.quantize import pack_fp4, unpack_fp4
from ...primitives.transpose import transposed_codes


def transposed(operand: Operand) -> Operand:
    """[rows, K] -> [K, rows]; where scales belong to rows, a square tile's is repeated on each of its rows."""
    assert operand.format is not None and operand.scale is not None
    codes = operand.codes
    if operand.format.packing > 1:
        codes = pack_fp4(unpack_fp4(codes).t().contiguous())
    else:
        codes = transposed_codes(codes)
    return operand._replace(codes=codes, scale=_transposed_scale(operand))


def _transposed_scale(operand: Operand) -> Tensor:
    assert operand.format is not None and operand.scale is not None
    if operand.format.block is None:
        return operand.scale
    rows_of_tile, side = operand.format.block or (1, 1)
    if rows_of_tile == side:
        return operand.scale.t().contiguous()
    tiles = operand.scale[::side].t()
    repeated = tiles.unsqueeze(1).expand(-1, side, -1).reshape(-1, tiles.shape[1])
    return repeated[: operand.depth]
