"""Packed sequences in linear attention as equally long rows, whose padding leaves the state unchanged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .gates import Gated, gated
from .request import DeltaInputs, DeltaResult, DeltaSpec, Option, compute_dtype

# (inputs, initial state [B, H, dk, dv]) -> (output [B, T, H, dv], final state [B, H, dk, dv])
Recurrence = Callable[[Gated, Tensor], tuple[Tensor, Tensor]]


def run_rows(recurrence: Recurrence, inputs: DeltaInputs, spec: DeltaSpec) -> DeltaResult:
    """Compute a call by a recurrence over equally long rows.

    The longest packed length is read on the host. Tokens after the last packed sequence get zeros.
    """
    rows, dtype = gated(inputs, spec), compute_dtype(inputs)
    cu_seqlens = inputs.cu_seqlens
    token_index: Tensor | None = None
    if cu_seqlens is not None:
        rows, token_index = _padded(rows, cu_seqlens)
    batch, heads, sizes = rows.q.shape[0], rows.q.shape[2], (rows.q.shape[-1], rows.v.shape[-1])
    if inputs.initial_state is None:
        state = torch.zeros(batch, heads, *sizes, dtype=dtype, device=inputs.q.device)
    else:
        state = inputs.initial_state.to(dtype).transpose(-1, -2)
    output, state = recurrence(rows, state)
    if token_index is not None:
        output = _packed(output, token_index, inputs.q.shape[1])
    final: Tensor | None = None
    if Option.FINAL_STATE in spec.options:
        final = state.transpose(-1, -2).contiguous()
        if rows.q.shape[1] == 0:  # `final` may be the caller's initial state
            final = final.clone()
    return output.to(inputs.q.dtype), final


def _padded(rows: Gated, cu_seqlens: Tensor) -> tuple[Gated, Tensor]:
    """Return the inputs as [N, L, ..], zero in padding, and the packed index of each token [N, L]; -1 for padding.

    Padding has zero keys and log decays, so that it leaves the state unchanged.
    """
    starts, tokens = cu_seqlens.long(), rows.q.shape[1]
    lengths = starts[1:] - starts[:-1]
    longest = int(lengths.max()) if lengths.shape[0] and tokens else 0
    position = torch.arange(longest, device=starts.device)
    token_index = torch.where(position < lengths[:, None], starts[:-1, None] + position, -1)

    def pad(x: Tensor) -> Tensor:
        is_token = (token_index >= 0).reshape(*token_index.shape, *(1,) * (x.ndim - 2))
        return torch.where(is_token, x[0, token_index.clamp(min=0)], 0.0)

    return Gated(*(pad(x) for x in rows)), token_index


def _packed(output: Tensor, token: Tensor, tokens: int) -> Tensor:
    """Pack rows [N, L, ..] to [1, T, ..], the inverse of `_padded`."""
    is_token = token >= 0
    packed = output.new_zeros(tokens, *output.shape[2:])
    return packed.index_put((token[is_token],), output[is_token]).unsqueeze(0)
