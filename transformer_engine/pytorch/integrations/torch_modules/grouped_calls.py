"""torch's grouped_mm, and the calls of it that the engine computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_PRODUCTS = tuple(
    getattr(owner, name)
    for owner, name in ((F, "grouped_mm"), (torch, "_grouped_mm"))
    if hasattr(owner, name)
)


def unsupported_call(
    x: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> str | None:
    """Reason why a grouped_mm call stays in torch; None if the engine computes it.

    Args:
        x: Rows [S, K] of all experts, in order.
        weight: Experts [E, K, N].
        offs: Ends of the experts' rows, int32 [E].
        bias: As in torch, which rejects it.
        out_dtype: Result dtype.
    """
    if x.dim() != 2 or weight.dim() != 3 or offs is None:
        return "called with other operands than rows [S, K], experts [E, K, N] and offsets"
    if bias is not None or out_dtype not in (None, x.dtype):
        return "called with a bias or another result dtype"
    if not x.dtype == weight.dtype == torch.bfloat16:
        return f"called with {x.dtype} and {weight.dtype}; bfloat16 is supported"
    if type(x) is not Tensor or not weight.mT.is_contiguous():
        return "its experts are not stored as [E, N, K], or an operand is not a plain tensor"
    return None
