"""Quantized-tensor values under NVIDIA's path: `dequantize(tensor)` for every scaling mode."""

from __future__ import annotations

from typing import Any

from jax import Array

from ...common import absent
from ...common.checks import described
from ...common.numbers import with_article
from .grouped_tensors import GroupedScaledTensor1x
from .tensors import NoScaleTensor, ScaledTensor1x, ScaledTensor2x

__all__ = ["dequantize"]

absent.install_getter(__name__)


def dequantize(
    tensor: ScaledTensor1x | ScaledTensor2x | GroupedScaledTensor1x | NoScaleTensor,
) -> Any:
    """Convert a quantized tensor to values in its `dq_dtype`, as its method `dequantize` does.

    Args:
        tensor: Quantized tensor; if it has two directions, the row-wise one is read.

    Raises:
        TypeError: The argument is not a quantized tensor.
    """
    if not isinstance(
        tensor, (ScaledTensor1x, ScaledTensor2x, GroupedScaledTensor1x, NoScaleTensor)
    ):
        kind = "an array" if isinstance(tensor, Array) else with_article(type(tensor))
        raise TypeError(f"tensor={described(tensor)} is {kind}; pass a quantized tensor")
    return tensor.dequantize()
