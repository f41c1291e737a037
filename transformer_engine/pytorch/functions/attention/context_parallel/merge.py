"""Rows of dense and packed tensors, and merging partial attentions by their log-sum-exp in float32.

Attention from the same queries to two disjoint key sets, (o_1, lse_1) and (o_2, lse_2), is together
lse = log(exp(lse_1) + exp(lse_2)) and o = o_1 + sigmoid(lse_2 - lse_1) (o_2 - o_1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import half_of_sequences
from .schedule import Part


@dataclass(frozen=True, eq=False)
class Rows:
    """Access to parts of the tensors of one rank.

    Attributes:
        axis: Token axis of q, k, v and the output.
        size: Tokens along it.
        bounds: Packed sequences: cumulative lengths [b + 1] in the rank's part, padding included.
    """

    axis: int
    size: int
    bounds: Tensor | None = None

    def is_whole(self, part: Part) -> bool:
        """Return whether a part is all rows."""
        return part.first == 0 and part.stop == (self.size if self.bounds is None else 2)

    def take(self, x: Tensor, part: Part, axis: int | None = None) -> Tensor:
        """Return the rows of a part, contiguous, along the tokens' axis or another one."""
        axis = self.axis if axis is None else axis
        if self.is_whole(part):
            return x
        if self.bounds is None:
            return x.narrow(axis, part.first, part.stop - part.first).contiguous()
        return x.index_select(axis, self._half(part))

    def put(self, x: Tensor, part: Part, rows: Tensor, axis: int | None = None) -> None:
        """Write the rows of a part in place."""
        axis = self.axis if axis is None else axis
        if self.is_whole(part):
            x.copy_(rows)
        elif self.bounds is None:
            x.narrow(axis, part.first, part.stop - part.first).copy_(rows)
        else:
            x.index_copy_(axis, self._half(part), rows.to(x.dtype))

    def add(self, x: Tensor, part: Part, rows: Tensor) -> None:
        """Add to the rows of a part in place."""
        if self.is_whole(part):
            x.add_(rows)
        elif self.bounds is None:
            x.narrow(self.axis, part.first, part.stop - part.first).add_(rows)
        else:
            x.index_add_(self.axis, self._half(part), rows.to(x.dtype))

    def _half(self, part: Part) -> Tensor:
        assert self.bounds is not None and part.stop - part.first == 1
        return half_of_sequences(self.bounds, self.size, part.first)


class MergedAttention:
    """Output and log-sum-exp for a rank's queries, merged from blocks.

    Attributes:
        output: [.., h, d_v]; float32 (float64 for float64 inputs) if blocks share queries.
        lse: float32 [b, h, s], packed [h, t]; -inf for queries that have seen no key.
    """

    def __init__(self, rows: Rows, output: Tensor, lse: Tensor):
        self._rows = rows
        self.output = output
        self.lse = lse
        self._written: list[Part] = []

    def add(self, part: Part, output: Tensor, lse: Tensor) -> None:
        """Merge the attention from a part of the queries to further keys."""
        rows, last = self._rows, self.lse.dim() - 1
        if any(other.first < part.stop and part.first < other.stop for other in self._written):
            before = rows.take(self.output, part), rows.take(self.lse, part, last)
            output, lse = merge(*before, output, lse, rows.axis)
        rows.put(self.output, part, output)
        rows.put(self.lse, part, lse, last)
        self._written.append(part)

    def add_sink(self, sink: Tensor) -> None:
        """Merge a key without a value, whose logit is sink [h]."""
        lse = torch.logaddexp(self.lse, sink.to(self.lse.dtype)[:, None])
        self.output.mul_(per_token(torch.exp(self.lse - lse), self._rows.axis))
        self.lse = lse


def merge(
    output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, axis: int
) -> tuple[Tensor, Tensor]:
    """Return the output, in the dtype of the first one, and the log-sum-exp for attention to both key sets.

    Args:
        output, other: [s, b, h, d] or [t, h, d] (axis 0), [b, s, h, d] (axis 1).
        lse, other_lse: [b, h, s], packed [h, t]; -inf for a query that has seen no key.
        axis: Token axis.
    """
    share = torch.where(other_lse == -torch.inf, 0.0, torch.sigmoid(other_lse - lse))
    merged = torch.lerp(output, other.to(output.dtype), per_token(share, axis).to(output.dtype))
    return merged, torch.logaddexp(lse, other_lse)


def per_token(x: Tensor, axis: int) -> Tensor:
    """Return numbers [b, h, s] or [h, t] as factors for an output [.., h, d]."""
    if x.dim() == 2:
        return x.t()[..., None]
    return (x.permute(2, 0, 1) if axis == 0 else x.transpose(1, 2))[..., None]
