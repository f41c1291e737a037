"""Gradients for grouped product biases, and for scales that multiply their biases' rows."""

from __future__ import annotations

import torch
from torch import Tensor

from . import check_float32, group_sums

__all__ = ["compute_grouped_dbias", "compute_grouped_dbias_dscales"]


def compute_grouped_dbias(
    dy: Tensor, offsets: Tensor, num_groups: int, dbias: Tensor | None = None
) -> Tensor:
    """Sum each group's rows, its bias gradient.

    Args:
        dy: The products' result gradient [T, N].
        offsets: Each group's first row and the last group's end, integers [num_groups + 1].
        num_groups: Group count G.
        dbias: float32 [G, N] to which the sums are added.

    Returns:
        Gradient float32 [G, N]; `dbias` if it is given.

    Raises:
        AssertionError: `dbias` has another dtype or shape.
    """
    check_float32("dbias", dbias, (num_groups, dy.shape[1]))
    return group_sums(dy, offsets, num_groups, out=dbias)


def compute_grouped_dbias_dscales(
    dy: Tensor,
    scales: Tensor,
    bias: Tensor,
    offsets: Tensor,
    dbias: Tensor | None = None,
    dscales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the bias and scale gradients of y[t] = product[t] + scales[t] * bias[group of t].

    Args:
        dy: y's gradient [T, N].
        scales: Scale per row, [T].
        bias: Biases [G, N].
        offsets: Each group's first row and the last group's end, integers [G + 1].
        dbias: float32 [G, N] to which the bias gradient is added.
        dscales: float32 [T] to which the scale gradient is added.

    Returns:
        `(dbias float32 [G, N], dscales float32 [T])`: dy * scale summed over a group's rows, and dy
        * bias summed over the columns. Rows outside the groups have gradient 0.

    Raises:
        AssertionError: A buffer has another dtype or shape.
    """
    groups = bias.shape[0]
    check_float32("dbias", dbias, bias.shape)
    check_float32("dscales", dscales, dy.shape[:1])
    weighted = dy.float() * scales.float()[:, None]
    rows = torch.arange(dy.shape[0], device=dy.device)
    group = torch.bucketize(rows, offsets.to(dy.device, torch.int64), right=True) - 1
    inside = (group >= 0) & (group < groups)
    own_bias = bias.float().index_select(0, group.clamp(0, groups - 1))
    products = torch.where(inside, (dy.float() * own_bias).sum(-1), 0.0)
    sums = group_sums(weighted, offsets, groups, out=dbias)
    return sums, products if dscales is None else dscales.add_(products)
