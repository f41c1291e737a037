"""Logits [m, V] of the first m <= K rows, in the memory [V, K] that waits for the gradient of the weight.

They lie there in blocks of ids: block j, [m, n], takes the beginning of the n rows of the weight's gradient that its
ids have. When all blocks have been seen, the sum over each row is known. Then d, the gradient of block after block,
is made beside it, and

    grad_hidden [m, K] += d @ weight[j]     summed in float32
    grad_weight[j] [n, K] = d.T @ hidden    in place of the block's logits, which are read no more

So these rows' logits take no memory of their own, and their part of the weight's gradient is written once, where a
chunk of rows has to read and write all of it: 1 GB each for [128256, 4096] in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.labels import Labels
from ..primitives.cross_entropy import cross_entropy_losses, cross_entropy_statistics
from ..primitives.gemm import Epilogue, gemm, plain
from .head_gradients import HeadGradients, RowFacts, whole_tiles


@dataclass(frozen=True)
class LentLogits:
    """Logits of hidden [m, K] in blocks of `width` ids; sums in float32 are kept for `rows` rows at a time."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    memory: Tensor
    width: int
    rows: int

    @classmethod
    def within(
        cls, room: int, hidden: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor
    ) -> LentLogits:
        """What takes about as much memory as `room` logits beside that of the weight's gradient."""
        count, features = hidden.shape
        wide = 4 // hidden.itemsize  # a sum in float32, in logits
        rows = min(whole_tiles(2 * room // (3 * features * wide)), count)
        width = whole_tiles((room - rows * features * wide) // count)
        return cls(hidden, weight, bias, memory, width, rows)

    def fill(self) -> Iterator[tuple[int, Tensor]]:
        """(first id, logits [m, n]) of one block after the other, as they are made."""
        for ids, logits in self._blocks():
            bias = None if self.bias is None else self.bias[ids]
            into = Epilogue(logits.dtype, bias, logits)
            yield ids.start, gemm(plain(self.hidden), plain(self.weight[ids]), into)

    def losses(self, targets: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
        """(loss [m], statistics [m, 2])"""
        partials = [
            cross_entropy_statistics(logits, targets, labels._replace(first=first))
            for first, logits in self.fill()
        ]
        return cross_entropy_losses(torch.cat(partials), targets, labels)

    def spend(self, facts: RowFacts, gradients: HeadGradients) -> None:
        """The gradients that these rows begin, in place of the logits; gradients.weight is the memory."""
        count = self.hidden.shape[0]
        at_once = gradients.hidden is not None and self.rows == count
        if gradients.hidden is not None:
            for start in range(0, count, self.rows):
                rows = slice(start, min(start + self.rows, count))
                self._sum_over_ids(rows, facts.part(rows), gradients, at_once)
        if not at_once:
            for ids, logits in self._blocks():
                gradients.take_ids(ids, facts.gradient(logits, ids.start), self.hidden)

    def _sum_over_ids(self, rows: slice, facts: RowFacts, gradients: HeadGradients, whole: bool) -> None:
        """The gradient of hidden[rows]; whole: there are no other rows, and each block has had its last reader."""
        assert gradients.hidden is not None
        total = self.hidden.new_empty(rows.stop - rows.start, self.hidden.shape[1], dtype=torch.float32)
        for ids, logits in self._blocks():
            of_logits = facts.gradient(logits[rows], ids.start)
            summed = Epilogue(total.dtype, out=total, accumulate=ids.start > 0)
            gemm(plain(of_logits), plain(self.weight[ids].t()), summed)
            if whole:
                gradients.take_ids(ids, of_logits, self.hidden)
            del of_logits  # before the next block's is made
        gradients.hidden[rows] = total

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """(ids, logits [m, n]), block after block."""
        count, flat = self.hidden.shape[0], self.memory.view(-1)
        total, features = self.memory.shape
        for start in range(0, total, self.width):
            ids = slice(start, min(start + self.width, total))
            size = ids.stop - start
            yield ids, flat[start * features :][: count * size].view(count, size)
