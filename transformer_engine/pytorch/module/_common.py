"""apply_normalization: normalization in the fused layers, under the name that clients replace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common.checks import check_option
from ..compat.replaceable import watched
from ..functions.normalization import NORMALIZATIONS, Norm
from ..functions.weight_gradient import WeightGradStore as WeightGradStore


def apply_normalization(
    inputmat: Tensor,
    ln_out: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor | None,
    eps: float,
    output_quantizer: Any,
    output_dtype: torch.dtype,
    normalization: str,
    fwd_ln_sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, Tensor | None, Tensor]:
    """Normalize a matrix and return the result with the saved statistics.

    Args:
        inputmat: Input [M, K].
        ln_out: Result buffer, or None.
        ln_weight: Weight [K].
        ln_bias: Bias [K], or None.
        eps: Added to the variance, or to the mean square in RMSNorm.
        output_quantizer: Result quantizer, or None.
        output_dtype: Dtype for an unquantized result.
        normalization: "LayerNorm" or "RMSNorm".
        fwd_ln_sm_margin: Accepted without effect; the kernels here reserve no multiprocessors.
        zero_centered_gamma: The weight is stored minus one.

    Returns:
        (normalized input [M, K], mean [M] or None, reciprocal deviation [M]).
    """
    check_option("normalization", normalization, NORMALIZATIONS)
    y, mean, rstdev = Norm(normalization, eps, zero_centered_gamma).forward(
        inputmat, ln_weight, ln_bias
    )
    y = y.to(output_dtype)
    if ln_out is not None:
        y = ln_out.copy_(y)
    return y if output_quantizer is None else output_quantizer(y), mean, rstdev


_replaced = watched(__name__, {"apply_normalization": apply_normalization})
