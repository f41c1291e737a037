"""weight [N, K], bias [N] from their pieces along N, without a copy if the pieces are adjacent in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..runtime.autograd import Function, check_transforms

# Memory plan tensors share storages, too.
_NATIVE = (Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor)


def whole(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the pieces per parameter as one tensor, differentiable in every piece; None without biases.

    One autograd node serves both; its backward pass returns gradient slices.
    """
    if torch.compiler.is_compiling() or any(
        type(piece) not in _NATIVE for piece in (*weights, *biases)
    ):
        return torch.cat(list(weights)), torch.cat(list(biases)) if biases else None
    if not torch.is_grad_enabled():
        check_transforms(_JoinPieces.OPERATION, weights, biases)
        return _join_pieces(weights), _join_pieces(biases) if biases else None
    return _JoinPieces.apply(len(weights), *weights, *biases)


def _join_pieces(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate the pieces along rows: as a view if they are adjacent in one storage."""
    first = pieces[0]
    storage = first.untyped_storage()._cdata
    neighbours = all(piece.is_contiguous() for piece in pieces) and all(
        before.storage_offset() + before.numel() == after.storage_offset()
        and after.dtype is before.dtype
        and after.untyped_storage()._cdata == storage
        for before, after in pairwise(pieces)
    )
    if not neighbours:
        return torch.cat(list(pieces))
    rows = sum(piece.shape[0] for piece in pieces)
    return first.detach().as_strided(
        (rows, *first.shape[1:]), first.stride(), first.storage_offset()
    )


class _JoinPieces(Function):
    OPERATION = "a layer with split parameters"

    @staticmethod
    def forward(ctx, weights, *pieces):
        parts = pieces[:weights], pieces[weights:]
        joined = [_join_pieces(part) if part else None for part in parts]
        frozen = [
            full
            for full, part in zip(joined, parts, strict=True)
            if full is not None and not any(piece.requires_grad for piece in part)
        ]
        ctx.mark_non_differentiable(*frozen)
        ctx.set_materialize_grads(False)
        ctx.rows = [[piece.shape[0] for piece in part] for part in parts]
        ctx.weights, ctx.versions = parts[0], [piece._version for piece in parts[0]]
        return tuple(joined)

    @staticmethod
    def backward(ctx, *grads):
        # Autograd detects writes to the first piece only. Pieces that were made together count writes together;
        # unpickled pieces count separately.
        first, *rest = [
            piece._version != version
            for piece, version in zip(ctx.weights, ctx.versions, strict=True)
        ]
        if any(rest) and not first:
            piece = ctx.weights[1 + rest.index(True)]
            raise RuntimeError(
                f"a piece {list(piece.shape)} of a weight was changed in place between forward and backward; "
                "change it after the backward pass"
            )
        results: list[Tensor | None] = [None]
        for grad, rows in zip(grads, ctx.rows, strict=True):
            results += [None] * len(rows) if grad is None else grad.split(rows)
        return tuple(results)
