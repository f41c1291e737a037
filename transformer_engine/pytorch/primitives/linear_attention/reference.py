"""The gated delta rule recurrence in float32, token by token.

Per head, with the state S [dk, dv] and the updates j = 0 .. n - 1 of token t:

    S <- diag(exp(decay_t)) S
    S <- S + k_tj (write_tj * v_tj - S^T (erase_tj * k_tj))^T
    o_t = S^T q_t

Gated DeltaNet and Gated DeltaProduct have scalar decays, and erase = write = beta. Gated DeltaNet 2 has a gate per
channel. `gates` computes the gates, and scales q.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ....common.dispatch import Backend, always_depends
from .gates import Gated
from .request import ALL_FEATURES, DeltaRequest, binder
from .sequences import run_rows


def recurrence(rows: Gated, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the output [B, T, H, dv] and the state after the last token [B, H, dk, dv]."""
    outputs: list[Tensor] = []
    # One unbind per tensor: the backward pass stacks the tokens' gradients once.
    for q, ks, vs, decay, erases, writes in zip(*(x.unbind(1) for x in rows), strict=True):
        state = torch.exp(decay).unsqueeze(-1) * state
        for k, v, erase, write in zip(
            *(x.unbind(1) for x in (ks, vs, erases, writes)), strict=True
        ):
            update = write * v - _read(state, erase * k)
            state = state + k.unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append(_read(state, q))
    if not outputs:
        return rows.v.flatten(1, 2), state  # no tokens: [B, 0, H, dv]
    return torch.stack(outputs, 1), state


def _read(state: Tensor, key: Tensor) -> Tensor:
    """S^T k by sums in float32, which no matrix-product setting changes."""
    return (state * key.unsqueeze(-1)).sum(-2)


BIND = binder(partial(run_rows, recurrence))
BACKEND: Backend[DeltaRequest] = Backend(
    "reference",
    takes=ALL_FEATURES,
    bind=BIND,
    opaque=True,
    batch_dependent=always_depends(
        "by products that are not verified to be the same for every batch"
    ),
)
