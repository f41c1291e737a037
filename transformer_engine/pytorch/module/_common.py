"""apply_normalization: y = norm(x) with its statistics, under the name by which fused layers' norms are replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common.checks import one_of
from ..functions.normalization import NORMALIZATIONS, Norm
from ..functions.weight_gradient import WeightGradStore as WeightGradStore
from ..runtime.replaceable import watched


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
    """(norm(inputmat [M, K]), mean [M] or None, 1 / deviation [M]), in ln_out where one is given.

    output_quantizer    quantizes the result
    fwd_ln_sm_margin    accepted; kernels here leave no multiprocessor to others
    """
    one_of("normalization", normalization, NORMALIZATIONS)
    y, statistics = Norm(normalization, eps, zero_centered_gamma).forward(inputmat, ln_weight, ln_bias)
    y = y.to(output_dtype)
    if ln_out is not None:
        y = ln_out.copy_(y)
    return y if output_quantizer is None else output_quantizer(y), statistics.mean, statistics.rstdev


_replaced = watched(__name__, {"apply_normalization": apply_normalization})
