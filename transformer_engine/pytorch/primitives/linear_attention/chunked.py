"""Gated delta rules in chunks of tokens, in torch operations: matrix products instead of a step per token.

Within a chunk that begins with the state S, let G_i be the sum of the log decays up to token i. The
updates r_i = write_i v_i - (the decayed state before update i)^T (erase_i k_i) solve a triangular system:

    r_i + sum_{j < i} (erase_i k_i)^T (exp(G_i - G_j) k_j) r_j = write_i v_i - S^T (exp(G_i) erase_i k_i)
    o_i = S^T (exp(G_i) q_i) + sum_{j <= i} q_i^T (exp(G_i - G_j) k_j) r_j
    S <- diag(exp(G_C)) S + sum_j (exp(G_C - G_j) k_j) r_j^T

Yang et al., Gated Delta Networks (2024). The systems of all chunks are solved in one call; a loop over chunks then
carries the state. With several updates per token, each update takes the place of a token, and only the first decays S.
Each G_i - G_j is a sum of its own decays, not a difference, so that the gradient of a decay near 0 keeps its digits: a
linear gate divides that gradient by the decay.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ....common.dispatch import Backend, always_depends
from ...runtime.float32_products import float32_product, solve_unit_triangular
from .gates import Gated
from .request import ALL_FEATURES, DeltaRequest, binder
from .sequences import run_rows

CHUNK = 64
# Smaller, because with a decay per channel the sums G_i - G_j take [C, C, dk] per chunk.
CHUNK_OF_CHANNELS = 16


def unsupported_reason(request: DeltaRequest) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if request.q[1] * request.updates <= 1:
        return "there is at most one update, which needs no chunks"
    return None


def recurrence(rows: Gated, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the output [B, T, H, dv] and the state after the last token [B, H, dk, dv]."""
    updates, length = rows.k.shape[2], rows.q.shape[1]
    if length == 0:
        return rows.v.flatten(1, 2), state  # no tokens: [B, 0, H, dv]
    decay, q = rows.decay, rows.q
    if updates > 1:
        # A token decays before its first update and is read after its last one.
        decay = F.pad(decay.unsqueeze(2), (0, 0, 0, 0, 0, updates - 1)).flatten(1, 2)
        q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, updates - 1, 0)).flatten(1, 2)
    k, v, erase, write = (x.flatten(1, 2) for x in (rows.k, rows.v, rows.erase, rows.write))
    size = min(CHUNK if decay.shape[-1] == 1 else CHUNK_OF_CHANNELS, length * updates)
    q, k, v, decay, erase, write = (_chunks(x, size) for x in (q, k, v, decay, erase, write))
    output, state = _scan_chunks(Gated(q, k, v, decay, erase, write), state)
    output = output.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, : length * updates]
    return output[:, updates - 1 :: updates], state


def _scan_chunks(chunks: Gated, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute outputs [B, H, N, C, dv] from tensors [B, H, N, C, ..]."""
    q, k, v, decay, erase, write = chunks
    from_start = torch.exp(decay.cumsum(-2))
    between = torch.exp(_sums_between(decay))
    erased = erase * k
    system = _pairs(erased, k, between).tril(-1)
    right_side = torch.cat((write * v, from_start * erased), -1)
    # The identity, r_i itself, is the implied diagonal.
    solved = solve_unit_triangular(system, right_side)
    from_values, from_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    parts = (
        from_values,
        from_state,
        from_start * q,
        _pairs(q, k, between),
        between[..., -1, :, :] * k,
        from_start[..., -1:, :].transpose(-1, -2),
    )
    outputs: list[Tensor] = []
    for from_value, factor, query, scores, key, total in zip(
        *(x.unbind(2) for x in parts), strict=True
    ):
        update = from_value - float32_product(factor, state)
        outputs.append(float32_product(query, state) + float32_product(scores, update))
        state = total * state + float32_product(key.mT, update)
    return torch.stack(outputs, 2), state


def _sums_between(decay: Tensor) -> Tensor:
    """Sum decay_t over j < t <= i, which is G_i - G_j, for i >= j; -inf elsewhere: [.., C, C, dk] from [.., C, dk]."""
    size = decay.shape[-2]
    not_before = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril().unsqueeze(-1)
    after = not_before & ~not_before.transpose(0, 1)  # t > j
    terms = torch.where(after, decay.unsqueeze(-2), 0.0)
    return terms.cumsum(-3).masked_fill(~not_before, -torch.inf)


def _pairs(left: Tensor, right: Tensor, between: Tensor) -> Tensor:
    """left_i^T (between_ij right_j) [.., C, C]."""
    if between.shape[-1] == 1:
        return float32_product(left, right.mT) * between.squeeze(-1)
    products = left.unsqueeze(-2) * right.unsqueeze(-3)
    # The sum over channels is a matrix product: an elementwise product would save a third tensor [C, C, dk].
    return float32_product(products.unsqueeze(-2), between.unsqueeze(-1)).squeeze(-1).squeeze(-1)


def _chunks(x: Tensor, size: int) -> Tensor:
    """Split [B, T, H, ..] into chunks [B, H, N, C, ..], padded with zeros, which leave the state unchanged."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)


BACKEND: Backend[DeltaRequest] = Backend(
    "chunked",
    takes=ALL_FEATURES,
    unsupported_reason=unsupported_reason,
    bind=binder(partial(run_rows, recurrence)),
    opaque=True,
    batch_dependent=always_depends("by chunks that begin with the first token of a call"),
)
