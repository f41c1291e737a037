"""Delayed scaling under the extension's names: the state of several tensors, and its update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_engine.common.checks import check_option
from transformer_engine.common.formats import E4M3, E5M2
from transformer_engine.common.numbers import to_float
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.primitives.scale_update import advance_scales
from transformer_engine.pytorch.runtime.checks import floating

from .checks import member, sequence, values, with_axes

__all__ = [
    "FP8TensorMeta",
    "fused_amax_and_scale_update_after_reduction",
]

_MAXIMUM = {DType.kFloat8E4M3: E4M3.maximum, DType.kFloat8E5M2: E5M2.maximum}
_ALGORITHMS = ("max", "most_recent")


class FP8TensorMeta:
    """Scales [n], inverse scales [n] and amax history [length, n] of n tensors, float32, which the caller fills in."""

    def __init__(self) -> None:
        self.scale = torch.empty(0, device="cpu")
        self.scale_inv = torch.empty(0, device="cpu")
        self.amax_history = torch.empty(0, 0, device="cpu")


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    amax_compute_algo: str,
    fp8_dtype: DType | int,
    margin: float,
) -> None:
    """Set scale = (largest code / amax) / 2^margin for every column and advance the histories by one step, in place.

    Args:
        amax_reduction_buffer: Latest amaxes for all histories, concatenated, float32, reduced over a group. Where it
            is 0, the history's row 0 is the latest amax.
        amax_histories: Histories float32 [length, n]. A column whose latest amax is 0 does not change.
        scales: Scales float32 [n] per history.
        amax_compute_algo: "max" over the history, or "most_recent".
        fp8_dtype: kFloat8E4M3 or kFloat8E5M2.
        margin: Powers of two that the scales stay below the largest code; may be a fraction.
    """
    check_option("amax_compute_algo", amax_compute_algo, _ALGORITHMS)
    dtype = member("fp8_dtype", DType, fp8_dtype)
    if dtype not in _MAXIMUM:
        raise ValueError(f"fp8_dtype={dtype!r} is not FP8; give kFloat8E4M3 or kFloat8E5M2")
    powers = to_float("margin", margin)
    if not math.isfinite(powers):
        raise ValueError(f"margin={powers} is not finite; give a number of powers of two")
    values(amax_reduction_buffer=amax_reduction_buffer)
    for name, tensors, axes in (("amax_histories", amax_histories, 2), ("scales", scales, 1)):
        sequence(name, tensors)
        for tensor in tensors:
            floating(f"{name} holds a value that", tensor)
            with_axes(f"{name} holds a tensor that", tensor, axes)
    columns = [history.shape[1] for history in amax_histories]
    if sum(columns) != amax_reduction_buffer.numel():
        raise ValueError(
            f"amax_reduction_buffer has {amax_reduction_buffer.numel()} amaxes, the histories {sum(columns)} columns; "
            "give one amax a column"
        )
    if [scale.numel() for scale in scales] != columns:
        raise ValueError(
            f"scales have {[scale.numel() for scale in scales]} elements, the histories {columns} columns; match them"
        )
    parts = amax_reduction_buffer.reshape(-1).split(columns)
    for history, reduced in zip(amax_histories, parts, strict=True):
        history[0].copy_(torch.where(reduced != 0, reduced, history[0]))
    advance_scales(
        list(amax_histories),
        list(scales),
        amax_compute_algo,
        _MAXIMUM[dtype],
        powers,
        keep_idle=True,
    )
