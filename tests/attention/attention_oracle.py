"""softmax(softcap(scale * q k^T) + bias) v as float64 loops over rows, the reference for every backend."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Rule = Callable[[int, int, int], bool]


def visibility(
    name: str,
    size_q: int,
    size_kv: int,
    lengths_q: list[int] | None = None,
    lengths_kv: list[int] | None = None,
    window: tuple[int, int] = (-1, -1),
    windows_bottom_right: bool = True,
    masked: Tensor | None = None,
) -> Rule:
    """sees(b, i, j): the mask `name` in words."""

    def sees(b: int, i: int, j: int) -> bool:
        real_q, real_kv = size_q, size_kv
        if name.startswith("padding"):
            assert lengths_q is not None and lengths_kv is not None
            real_q, real_kv = lengths_q[b], lengths_kv[b]
            if i >= real_q or j >= real_kv:
                return False
        if name == "arbitrary" and masked is not None and bool(masked[b, 0, i, j]):
            return False
        top_left = name in ("causal", "padding_causal") or (
            not windows_bottom_right and "causal" not in name
        )
        diagonal = i if top_left else i + real_kv - real_q
        if "causal" in name and j > diagonal:
            return False
        left, right = window
        if left >= 0 and j < diagonal - left:
            return False
        return not (right >= 0 and "causal" not in name and j > diagonal + right)

    return sees


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Rule,
    scale: float | None = None,
    bias: Callable[[int, int, int, int], Tensor | float] = lambda b, h, i, j: 0.0,
    bias_before_scale: bool = False,
    sink: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out [b, i, h * d], max_logit [h]) from q [b, i, h, d], k, v [b, j, g, d]; differentiable."""
    batch, size_q, heads, width = q.shape
    size_kv, groups = k.shape[1:3]
    scale = 1.0 / math.sqrt(width) if scale is None else scale
    best = [-math.inf] * heads
    rows = []
    for b in range(batch):
        for i in range(size_q):
            for h in range(heads):
                g = h // (heads // groups)
                records = [j for j in range(size_kv) if sees(b, i, j)]
                if not records:
                    rows.append(v.new_zeros(v.shape[-1]) + 0.0 * q[b, i, h].sum())
                    continue
                logits = []
                for j in records:
                    product = (q[b, i, h] * k[b, j, g]).sum()
                    extra = bias(b, h, i, j)
                    score = (product + extra if bias_before_scale else product) * scale
                    if softcap:
                        score = softcap * torch.tanh(score / softcap)
                    logits.append(score if bias_before_scale else score + extra)
                stacked = torch.stack(logits)
                best[h] = max(best[h], float(stacked.detach().max()))
                exponentials = torch.exp(stacked)
                total = exponentials.sum() + (torch.exp(sink[h]) if sink is not None else 0.0)
                rows.append(
                    sum(e / total * v[b, j, g] for e, j in zip(exponentials, records, strict=True))
                )
    out = torch.stack(rows).reshape(batch, size_q, heads * v.shape[-1])
    return out, torch.tensor(best, dtype=torch.float64)


def cumulative(lengths: list[int], device: torch.device | str) -> Tensor:
    total = [0]
    for length in lengths:
        total.append(total[-1] + length)
    return torch.tensor(total, dtype=torch.int32, device=device)


def padding_mask(lengths: list[int], size: int, device: torch.device | str) -> Tensor:
    """[b, 1, 1, size], True = padding."""
    mask = torch.ones(len(lengths), 1, 1, size, dtype=torch.bool, device=device)
    for b, length in enumerate(lengths):
        mask[b, :, :, :length] = False
    return mask
