"""w' = w * factor, row by row, of the projection of queries and keys, so that no logit passes a threshold (QK-clip)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Heads(NamedTuple):
    """A group's rows in the projection's weight: its queries, their gate, one key, one value, `size` rows a head."""

    groups: int
    queries: int
    gates: int
    size: int


def factors(greatest: Tensor, threshold: float, groups: int) -> Tensor:
    """min(1, threshold / greatest logit) [groups] of logits [heads], which may be negative: then it is 1."""
    return threshold / greatest.view(groups, -1).amax(dim=1).clamp(min=threshold)


def clip(weight: Tensor, factor: Tensor, alpha: float, heads: Heads) -> None:
    """Rows of queries times factor^alpha and rows of keys times factor^(1 - alpha), group by group, in place."""
    parts = weight.view(heads.groups, heads.queries + heads.gates + 2, heads.size, -1)
    factor = factor.to(weight.device).view(-1, 1, 1, 1)
    with torch.no_grad():
        parts[:, : heads.queries].mul_(factor.pow(alpha))
        parts[:, heads.queries + heads.gates].mul_(factor.pow(1 - alpha).squeeze(1))
