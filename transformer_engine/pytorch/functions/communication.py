"""Communication of a pass as two calls: pending = begin(..), other work, x = pending.wait().

Overlap never changes results. With the `ub_*` flags of a layer, rows can be in transit while a product multiplies
the rows that have arrived (`gather_and_multiply`) or computes the rows that follow (`multiply_and_scatter`).

A pass that is recorded on Symbols appends the same calls to its instructions (`fast/recorded_collectives.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..constants import dist_group_type
from ..distributed.collectives import (
    allreduce,
    gather_along_first_dim,
    gather_rows,
    reduce_scatter_along_first_dim,
)
from ..distributed.faults import check_collective
from ..distributed.operands import PendingOperand, gather_operand
from ..distributed.overlapped_rows import GatheredRows, ScatteredRows
from ..distributed.symmetric_memory import symmetric_all_reduce
from ..distributed.tensor_parallel import TensorParallel
from ..fast.recorded_collectives import (
    RecordedPending,
    is_symbolic,
    record_begin,
    record_gathered_product,
    record_scattered_product,
    record_wait,
)
from ..primitives.gemm import Epilogue, gemm
from ..primitives.operand import Operand
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable
from ..tensor.quantized_tensor import QuantizedTensorStorage, get_storage
from .linear_operands import dense_values, to_operand
from .overlapped_products import gather_over_peers, product_of_rows, scatter_over_peers

COLLECTIVES = {
    "all_gather": gather_rows,
    "all_reduce": allreduce,
    "reduce_scatter": reduce_scatter_along_first_dim,
}


class Pending(NamedTuple):
    """A collective that has begun.

    Attributes:
        work: Rows or an operand in transit, or (result, process group handle).
        parallel: The tensor-parallel group.
        overlaps: all_gather rows may arrive one rank after another, for `gather_and_multiply`.
        dense: The result is values that form a matrix with a contiguous axis; see `dense_values`.
    """

    work: Any
    parallel: TensorParallel
    overlaps: bool = False
    dense: bool = False

    def wait(self) -> Any:
        """Wait for the result on the current stream."""
        work, parallel, overlaps, dense = self
        if type(work) is RecordedPending:
            return record_wait(
                lambda started: Pending(started, parallel, overlaps, dense).wait(), work
            )
        if isinstance(work, (PendingOperand, GatheredRows, ScatteredRows)):
            result = work.wait()
        else:
            result, handle = work
            if handle is not None:
                handle.wait()
        return dense_values(result) if dense else result


def begin(
    collective: str,
    x: Any,
    parallel: TensorParallel,
    axis: int = 0,
    overlaps: bool = False,
    dense: bool = False,
) -> Pending:
    """Begin a collective over the tensor-parallel group.

    Args:
        collective: "all_gather", "all_reduce" or "reduce_scatter" on rows.
        x: Values, a quantized tensor, or (to gather) an operand, whose codes and scales are sent.
            An all_reduce sum may be written in place.
        parallel: The group.
        axis: Axis that an operand all_gather joins: 0, or 1 for the column direction [K, M] of sharded rows.
        overlaps, dense: See `Pending`.
    """
    return Pending(
        _begin_collective(collective, x, parallel, axis, overlaps), parallel, overlaps, dense
    )


def _begin_collective(
    collective: str, x: Any, parallel: TensorParallel, axis: int, overlaps: bool
) -> Any:
    """`Pending.work` for a collective."""
    if is_symbolic(x):
        return record_begin(
            lambda sent: _begin_collective(collective, sent, parallel, axis, overlaps),
            collective,
            x,
            parallel.size,
            axis,
        )
    check_collective(parallel, collective, x)
    if collective == "all_gather" and overlaps:
        rows = gather_over_peers(x, parallel)
        if rows is not None:
            return rows
    if isinstance(x, Operand):
        return gather_operand(x, parallel.checked_group(), axis)
    if collective == "all_reduce" and parallel.sums_symmetrically:
        return symmetric_all_reduce(x, parallel.checked_group(), all_reduce_type=parallel.symmetric)
    traced, quantized = torch.compiler.is_compiling(), isinstance(x, QuantizedTensorStorage)
    if traced and quantized:
        x = get_storage(x)  # a compiler cannot trace quantized tensor construction
    later = not (quantized or traced)
    return COLLECTIVES[collective](x, parallel.checked_group(), later)


def begin_sum(x: Tensor, parallel: TensorParallel) -> Pending:
    """Begin summing partial results [M, N] over the ranks; with sequence parallelism each rank gets its rows."""
    return begin("reduce_scatter" if parallel.sequence else "all_reduce", x, parallel)


def gather_and_multiply(pending: Pending, b: Any, epilogue: Epilogue) -> tuple[Tensor, Any]:
    """Compute a @ b.T for a matrix a that is being gathered, rank by rank if its rows arrive so.

    Args:
        pending: The gather for a [M, K].
        b: Operand [N, K], or a `Matrix` that is read as its transpose.
        epilogue: Product bias, dtype and accumulation.

    Returns:
        y [M, N], and the gathered a.
    """
    work, parallel, overlaps, dense = pending
    if overlaps and type(work) is RecordedPending:
        # The instruction's function is called with real tensors. The bias is an instruction argument.
        settings = epilogue._replace(bias=None)
        return record_gathered_product(
            lambda started, other, bias: gather_and_multiply(
                Pending(started, parallel, overlaps, dense), other, settings._replace(bias=bias)
            ),
            work,
            b,
            epilogue,
            to_operand(b).rows,
        )
    if isinstance(work, GatheredRows):
        y = product_of_rows(work, to_operand(b), epilogue)
        return y, pending.wait()
    gathered = pending.wait()
    return gemm(to_operand(gathered), to_operand(b), epilogue), gathered


def multiply_and_scatter(a: Any, b: Any, epilogue: Epilogue, parallel: TensorParallel) -> Pending:
    """Compute a @ b.T and begin its reduce-scatter, which sends rows while the other rows are multiplied.

    Args:
        a: Operand [M, K], or values.
        b: Operand [N, K], or a `Matrix` that is read as its transpose.
        epilogue: Product dtype and accumulation.
        parallel: The group.
    """
    left, right = to_operand(a), to_operand(b)
    if is_symbolic(a):
        started = record_scattered_product(
            lambda first, second: multiply_and_scatter(first, second, epilogue, parallel).work,
            a,
            b,
            (left.rows, right.rows),
            epilogue.dtype,
            parallel.size,
        )
        return Pending(started, parallel)
    rows = scatter_over_peers(left, right, epilogue, parallel)
    if rows is not None:
        return Pending(rows, parallel)
    return begin("reduce_scatter", gemm(left, right, epilogue), parallel)


def gather_sequence(x: Tensor, group: dist_group_type | None) -> Tensor:
    """Gather x [M, ...] from all ranks in the group in rank order; gradients from all ranks are summed."""
    return _GatherSequence.apply(x, group)


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_along_first_dim(x, group)[0]

    @staticmethod
    @once_differentiable("the gathering of a sequence over ranks")
    def backward(ctx, dy):
        return reduce_scatter_along_first_dim(dy, ctx.group)[0], None
