"""FusedScaleMaskSoftmax: probabilities from attention scores, for attention that is not fused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...common.checks import check_option, function
from ...common.numbers import to_bool
from ..constants import AttnMaskTypes
from ..functions.softmax import scaled_softmax
from ..runtime.checks import floating, tensor_or_none
from .arguments import finite_or_none


class FusedScaleMaskSoftmax(nn.Module):
    """y [b, h, q, k] = softmax(scale * scores), in one kernel if the kernel can read the mask directly.

    Args:
        mask_func: `mask_func(scores, mask)` returns masked scores; used for masks that are neither bool nor uint8.
        softmax_in_fp32: Accepted without effect; every path computes in float32.
    """

    def __init__(self, mask_func: Callable[[Tensor, Tensor], Tensor], softmax_in_fp32: bool = True):
        function("mask_func", mask_func)
        super().__init__()
        self.mask_func = mask_func
        self.softmax_in_fp32 = to_bool("softmax_in_fp32", softmax_in_fp32)

    def forward(
        self, inp: Tensor, mask: Tensor | None, attn_mask_type: str, scale: float | None = None
    ) -> Tensor:
        """Return the score probabilities.

        Args:
            inp: Scores [b, h, q, k].
            mask: bool or uint8, True where a key is hidden; None: no mask tensor.
            attn_mask_type: A name that contains "causal" hides later keys.
            scale: Score factor; None: 1.
        """
        floating("inp", inp)
        tensor_or_none("mask", mask)
        check_option("attn_mask_type", attn_mask_type, AttnMaskTypes)
        causal = None
        if "causal" in attn_mask_type:
            causal = "bottom_right" if "bottom_right" in attn_mask_type else "top_left"
        factor = finite_or_none("scale", scale)
        factor = 1.0 if factor is None else factor
        if mask is None or mask.dtype in (torch.bool, torch.uint8):
            return scaled_softmax(inp, factor, mask, causal)
        return scaled_softmax(self.mask_func(inp * factor, mask), 1.0, None, causal)
