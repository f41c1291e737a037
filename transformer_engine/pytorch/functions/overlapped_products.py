"""Matrix products whose rows are gathered, or reduced and scattered, while the product runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..distributed.faults import check_collective
from ..distributed.overlap import GATHER, SCATTER, peer_buffers
from ..distributed.overlapped_rows import GatheredRows, ScatteredRows, message_bytes
from ..distributed.tensor_parallel import TensorParallel
from ..primitives.gemm import Epilogue, as_matrix, gemm
from ..primitives.operand import Operand, OwnedOperand, plain
from ..primitives.scale_order import row_major


def gather_over_peers(x: Any, parallel: TensorParallel) -> GatheredRows | None:
    """Start to gather matrix rows through peer buffers; return None where the process group gathers them.

    Args:
        x: Values [.., K] or an operand with this rank's rows. Rows with other types are gathered by the process group.
        parallel: The layer's boundary.
    """
    if type(x) not in (Tensor, torch.nn.Parameter, Operand):
        return None
    if isinstance(x, Tensor):
        parts = [x]
    else:
        x = row_major(x)
        parts = [x.codes, x.scale] if x.has_block_scales else [x.codes]
    layout = tuple([(part.shape, part.dtype) for part in parts])
    buffers = peer_buffers(GATHER, parts[0].device, message_bytes(layout), parallel.checked_group())
    return None if buffers is None else GatheredRows(buffers, parts, layout, _rebuilding(x))


def _rebuilding(x: Tensor | Operand) -> Any:
    """Return a function that rebuilds a matrix like x from gathered tensors."""
    if isinstance(x, Tensor):
        return lambda parts: parts[0]
    scale, form, amax, dtype = x[1:]
    return lambda parts: Operand(parts[0], parts[1] if len(parts) > 1 else scale, form, amax, dtype)


def product_of_rows(rows: GatheredRows, right: Operand, epilogue: Epilogue) -> Tensor:
    """Return rows @ right.T [n * m, N], computed rank by rank as the rows arrive.

    Args:
        rows: The rows [m, K] on n ranks.
        right: Operand [N, K].
        epilogue: Product bias, dtype and accumulation.
    """
    y: Tensor | None = None
    for rank in rows.order():
        found = rows.rows_of(rank)
        left = plain(as_matrix(found)) if isinstance(found, Tensor) else found
        if y is None:
            shape = (rows.ranks * left.rows, right.rows)
            y = torch.empty(shape, dtype=epilogue.dtype, device=left.codes.device)
        part = y[rank * left.rows : (rank + 1) * left.rows]
        gemm(left, right, epilogue._replace(out=part))
    assert y is not None
    return y


def scatter_over_peers(
    left: Operand, right: Operand, epilogue: Epilogue, parallel: TensorParallel
) -> ScatteredRows | None:
    """Start to compute left @ right.T and to sum its rows over the ranks through peer buffers.

    Args:
        left: Operand [n * m, K]; rank r gets the summed rows from r * m on.
        right: Operand [N, K].
        epilogue: Product dtype and accumulation.
        parallel: The layer's boundary.

    Returns:
        The pending sum [m, N], or None where the process group computes it.
    """
    check_collective(parallel, "reduce_scatter", left)
    rows, block = left.rows, None if left.format is None else left.format.block
    if rows % (parallel.size * (1 if block is None else block[0])) or isinstance(
        left, OwnedOperand
    ):
        return None
    layout = ((torch.Size((rows // parallel.size, right.rows)), epilogue.dtype),) * (
        parallel.size - 1
    )
    device = left.codes.device
    buffers = peer_buffers(SCATTER, device, message_bytes(layout), parallel.checked_group())
    if buffers is None:
        return None

    parts = _rows_of_ranks(left, parallel.size)

    def multiply(rank: int, out: Tensor) -> None:
        gemm(parts[rank], right, epilogue._replace(out=out))

    return ScatteredRows(buffers, layout, multiply)


def _rows_of_ranks(operand: Operand, ranks: int) -> list[Operand]:
    """Return the operand rows of each rank."""
    operand = row_major(operand)
    codes, scale, form, amax, dtype = operand
    scales = (
        [scale] * ranks if scale is None or not operand.has_block_scales else scale.chunk(ranks)
    )
    # one per row
    maxima = [amax] * ranks if amax is None or amax.numel() == 1 else amax.chunk(ranks)
    return [
        Operand(rows, of_rank, form, maximum, dtype)
        for rows, of_rank, maximum in zip(codes.chunk(ranks), scales, maxima, strict=True)
    ]
