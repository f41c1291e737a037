"""Gradients of a linear head, logits [M, V] = hidden [M, K] @ weight [V, K].T + bias [V], from parts of the logits'."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.operation_settings import Labels
from ..primitives.column_sums import column_sums
from ..primitives.cross_entropy import cross_entropy_gradient
from ..primitives.gemm import Epilogue, gemm, plain

TILES = (128, 64)  # rows in a product tile: parts with this many rows or more are whole tiles
_FEWEST = 16


def whole_tiles(size: int) -> int:
    """The most rows up to `size` that fill tiles; for few rows, as many as there are, or a few more."""
    for tile in TILES:
        if size >= tile:
            return size // tile * tile
    return max(size, _FEWEST)


class RowFacts(NamedTuple):
    """Inputs to the gradient for logit rows, except the logits; factor: float32 [M], or [1] for all rows."""

    targets: Tensor
    statistics: Tensor
    factor: Tensor
    labels: Labels

    def part(self, rows: slice) -> RowFacts:
        """Return the facts for some rows."""
        factor = self.factor if self.factor.shape[0] == 1 else self.factor[rows]
        return self._replace(
            targets=self.targets[rows], statistics=self.statistics[rows], factor=factor
        )

    def gradient(self, logits: Tensor, first: int = 0, in_place: bool = False) -> Tensor:
        """Compute the logit gradient [M, n] for ids from `first` on."""
        labels = self.labels._replace(first=first)
        return cross_entropy_gradient(
            logits, self.targets, self.statistics, self.factor, labels, in_place
        )


@dataclass
class HeadGradients:
    """Gradient buffers, in the input dtypes (float32 for the bias); None: not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def wanted(
        cls, wants: tuple[bool, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> HeadGradients:
        """Allocate the wanted gradients; the bias gradient begins with float32 zeros, the others are uninitialized."""
        of_hidden, of_weight, of_bias, *_ = wants
        return cls(
            torch.empty_like(hidden) if of_hidden else None,
            torch.empty_like(weight) if of_weight else None,
            torch.zeros_like(bias, dtype=torch.float32) if of_bias and bias is not None else None,
        )

    def of(self, rows: slice) -> HeadGradients:
        """Return the gradients to which some rows contribute."""
        return replace(self, hidden=None if self.hidden is None else self.hidden[rows])

    def take_rows(self, rows: slice, of_logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Add the contribution of some rows, of_logits [m, V]; the first rows begin the sums."""
        if self.hidden is not None:
            gemm(plain(of_logits), plain(weight.t()), Epilogue(hidden.dtype, out=self.hidden[rows]))
        if self.weight is not None:
            summed = Epilogue(weight.dtype, out=self.weight, accumulate=rows.start > 0)
            gemm(plain(of_logits.t()), plain(hidden[rows].t()), summed)
        if self.bias is not None:
            self.bias += column_sums(of_logits, torch.float32)

    def take_ids(self, ids: slice, of_logits: Tensor, hidden: Tensor, begin: bool) -> None:
        """Add the contribution of some ids to weight and bias, of_logits [m, n], or begin their sums."""
        if self.weight is not None:
            summed = Epilogue(self.weight.dtype, out=self.weight[ids], accumulate=not begin)
            gemm(plain(of_logits.t()), plain(hidden.t()), summed)
        if self.bias is not None:
            self.bias[ids] += column_sums(of_logits, torch.float32)

    def results(self, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients in the input dtypes."""
        of_bias = None if self.bias is None or bias is None else self.bias.to(bias.dtype)
        return self.hidden, self.weight, of_bias
