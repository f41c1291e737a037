"""Tensor differences and FP8 code counts, for a first look; `te.observe` reports tensors in layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.checks import check_option, switch
from ..common.formats import E4M3, E5M2
from .runtime.checks import tensor as check_tensor
from .tensor.float8_tensor import Float8Tensor

__all__ = ["all_close", "compare_tensors", "debug", "fp8_tensor_statistics", "print_rank_0"]

_ELEMENTS = {
    "E4M3": (torch.float8_e4m3fn, E4M3.maximum),
    "E5M2": (torch.float8_e5m2, E5M2.maximum),
}
_enabled = False


def debug(enabled: bool = True) -> None:
    """Print the statistics from `fp8_tensor_statistics` with every call.

    Args:
        enabled: False stops the output.
    """
    global _enabled
    switch("enabled", enabled)
    _enabled = enabled


def fp8_tensor_statistics(tensor: Any, fp8_format: str = "E4M3") -> tuple[int, int]:
    """Count the zeros and the largest magnitudes among FP8 codes.

    Many zeros show underflow, and many values at the maximum show saturation.

    Args:
        tensor: `Float8Tensor`, or its codes as uint8 or float8 in any shape.
        fp8_format: "E4M3" or "E5M2", the uint8 code format.

    Returns:
        `(number of zeros, number of codes with the largest finite magnitude)`.

    Raises:
        ValueError: The format is unknown, or the tensor has no row-wise codes.
        TypeError: The tensor holds other values than codes.
    """
    check_option("fp8_format", fp8_format, tuple(_ELEMENTS))
    check_tensor("tensor", tensor)
    codes: Tensor | None = tensor._data if isinstance(tensor, Float8Tensor) else tensor
    if codes is None:
        raise ValueError("tensor has no row-wise codes; quantize it with rowwise=True")
    dtype, maximum = _ELEMENTS[fp8_format]
    if codes.element_size() != 1:
        raise TypeError(
            f"tensor is {codes.dtype}; give FP8 codes as uint8 or float8, or a Float8Tensor"
        )
    values = (codes if codes.is_floating_point() else codes.view(dtype)).float()
    zeros, largest = int((values == 0.0).sum()), int((values.abs() == maximum).sum())
    if _enabled:
        print(
            f"{fp8_format} {list(codes.shape)}: {zeros} zeros, {largest} at the maximum {maximum:g}"
        )
    return zeros, largest


def all_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal within the default tolerances of `torch.allclose`."""
    return torch.allclose(a, b)


def print_rank_0(*values: object) -> None:
    """Print on rank 0 only, or always where torch.distributed is not initialized."""
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not ranks or torch.distributed.get_rank() == 0:
        print(*values, flush=True)


def compare_tensors(a: Tensor, b: Tensor) -> None:
    """Print the largest absolute difference between two equally shaped tensors, and the values at its position."""
    if a.shape != b.shape:
        raise ValueError(
            f"the tensors are {list(a.shape)} and {list(b.shape)}; give two of one shape"
        )
    difference = (a.float() - b.float()).abs().flatten()
    if difference.numel() == 0:
        print("both tensors are empty")
        return
    at = int(difference.argmax())
    print(
        f"largest difference {float(difference[at]):g} at flat index {at}: "
        f"{float(a.flatten()[at]):g} and {float(b.flatten()[at]):g}"
    )
