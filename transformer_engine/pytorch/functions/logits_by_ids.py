"""Logits [m, V] for a row group in id blocks, computed for the sums over each row and again for the gradients.

A block is [m, n]. After all blocks, the sum over each row is complete. Then d, the logit gradient
of a block, contributes to the gradients (the first sum is in float32):

    grad_hidden [m, K] += d @ weight[block]
    grad_weight[block] [n, K] += d.T @ hidden

The weight's gradient is therefore written, or accumulated into, once for all these rows. A row
chunk, whose logits are computed once, instead reads and writes the whole gradient (1 GB each for
[128256, 4096] in bfloat16) and rounds it once more.

Logits for the first m <= K rows need not be computed twice. No earlier sum exists, so the weight gradient's unused
memory [V, K] stores them: a block occupies the beginning of its n rows there, until d.T @ hidden replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.operation_settings import Labels
from ..primitives.cross_entropy import cross_entropy_losses, cross_entropy_statistics
from ..primitives.gemm import Epilogue, gemm, plain
from .head_gradients import HeadGradients, RowFacts, whole_tiles


@dataclass(frozen=True)
class LogitsByIds:
    """Logits for hidden [m, K] in blocks with `width` ids.

    Attributes:
        hidden: Features [m, K].
        weight: Weight [V, K].
        bias: Bias [V], or None.
        memory: Memory for one block, which the next block reuses, or for all blocks if `lent`.
        lent: Whether `memory` is the weight's gradient.
        width: Ids per block.
        rows: Rows whose sums over the ids are in memory at once; all rows, unless the memory is lent.
        sums: Memory for these sums in float32, lent by the hidden gradient; None: newly allocated.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    memory: Tensor
    lent: bool
    width: int
    rows: int
    sums: Tensor | None = None

    @classmethod
    def create_in_gradients(
        cls,
        room: int,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradients: HeadGradients,
    ) -> LogitsByIds:
        """Return the logits for the first rows, with memory for about `room` logits in addition to the gradients."""
        assert gradients.weight is not None
        (count, features), of_hidden = hidden.shape, gradients.hidden
        wide = 4 // hidden.itemsize  # number of logits in the memory of one float32 sum
        if of_hidden is not None and count * wide <= of_hidden.shape[0]:
            sums = (
                of_hidden.view(-1)[: count * wide * features]
                .view(torch.float32)
                .view(count, features)
            )
            width = whole_tiles(room // count)
            return cls(hidden, weight, bias, gradients.weight, True, width, count, sums)
        rows = min(_rows_per_sum(room, hidden), count)
        width = whole_tiles((room - rows * features * wide) // count)
        return cls(hidden, weight, bias, gradients.weight, True, width, rows)

    @classmethod
    def iterate_groups(
        cls, room: int, among: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Iterator[tuple[slice, LogitsByIds]]:
        """Yield (rows, their logits) for row groups; each needs memory for about `room` logits."""
        if among.start == among.stop:
            return
        features = hidden.shape[1]
        most = min(_rows_per_sum(room, hidden), among.stop - among.start)
        width = min(
            whole_tiles((room - most * features * (4 // hidden.itemsize)) // most), weight.shape[0]
        )
        memory = hidden.new_empty(most * width)
        for start in range(among.start, among.stop, most):
            rows = slice(start, min(start + most, among.stop))
            yield rows, cls(hidden[rows], weight, bias, memory, False, width, rows.stop - start)

    def losses(self, targets: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
        """Return (loss [m], statistics [m, 2])."""
        partials = [
            cross_entropy_statistics(
                self._make(ids, logits), targets, labels._replace(first=ids.start)
            )
            for ids, logits in self._blocks()
        ]
        return cross_entropy_losses(torch.cat(partials), targets, labels)

    def spend(self, facts: RowFacts, gradients: HeadGradients, begin: bool) -> None:
        """Compute the gradients for these rows.

        Args:
            facts: Row targets, statistics and factors.
            gradients: Destination. `gradients.weight` may be the memory of the logits.
            begin: Write the weight and bias gradients instead of accumulating into them.
        """
        count = self.hidden.shape[0]
        at_once = gradients.hidden is not None and self.rows == count
        if gradients.hidden is not None:
            for start in range(0, count, self.rows):
                rows = slice(start, min(start + self.rows, count))
                self._sum_over_ids(rows, facts.part(rows), gradients, at_once, begin)
        if not at_once:
            for ids, logits in self._blocks():
                gradients.take_ids(ids, self._gradient(ids, logits, facts), self.hidden, begin)

    def _sum_over_ids(
        self, rows: slice, facts: RowFacts, gradients: HeadGradients, complete: bool, begin: bool
    ) -> None:
        """Compute the gradient of hidden[rows]; with `complete`, these are all rows and blocks are read no more."""
        assert gradients.hidden is not None
        total = self.sums
        if total is None:
            total = self.hidden.new_empty(
                rows.stop - rows.start, self.hidden.shape[1], dtype=torch.float32
            )
        for ids, logits in self._blocks():
            of_logits = self._gradient(ids, logits[rows], facts)
            summed = Epilogue(total.dtype, out=total, accumulate=ids.start > 0)
            gemm(plain(of_logits), plain(self.weight[ids].t()), summed)
            if complete:
                gradients.take_ids(ids, of_logits, self.hidden, begin)
            del of_logits  # frees the memory before the next block is computed
        # Sums that share the memory of the gradient are converted into new memory first.
        gradients.hidden[rows] = total if self.sums is None else total.to(gradients.hidden.dtype)

    def _gradient(self, ids: slice, logits: Tensor, facts: RowFacts) -> Tensor:
        """Return the logit gradient, in new memory if they are kept, otherwise in place."""
        if not self.lent:
            self._make(ids, logits)
        return facts.gradient(logits, ids.start, in_place=not self.lent)

    def _make(self, ids: slice, logits: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[ids]
        return gemm(
            plain(self.hidden), plain(self.weight[ids]), Epilogue(logits.dtype, bias, logits)
        )

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (ids, memory for their logits [m, n]), block by block."""
        count, flat = self.hidden.shape[0], self.memory.view(-1)
        total, features = self.weight.shape
        for start in range(0, total, self.width):
            ids = slice(start, min(start + self.width, total))
            size = ids.stop - start
            offset = start * features if self.lent else 0
            yield ids, flat[offset:][: count * size].view(count, size)


def _rows_per_sum(room: int, hidden: Tensor) -> int:
    """Return for how many rows the sums use 70% of the room: half of 8192 rows with 4096 features and 128256 ids."""
    return whole_tiles(7 * room // (10 * hidden.shape[1] * (4 // hidden.itemsize)))
