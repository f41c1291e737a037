"""The element formats that quantized tensors name by number: number <-> element <-> torch dtype."""

from __future__ import annotations

import torch

from ...common.formats import E2M1, E4M3, E5M2, Element
from ..constants import DType
from ..primitives.quantize import torch_dtype

_ELEMENTS = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2, DType.kFloat4E2M1: E2M1}
_VALUES = frozenset(int(number) for number in DType)
_NUMBERS = {torch.float8_e4m3fn: DType.kFloat8E4M3, torch.float8_e5m2: DType.kFloat8E5M2}


def element_number(dtype: DType | torch.dtype | int) -> DType:
    """The number of an element given as a number, as another enumeration's member, or as a torch dtype."""
    number = _NUMBERS.get(dtype) if isinstance(dtype, torch.dtype) else _known(dtype)
    if number is None or number not in _ELEMENTS:
        raise ValueError(
            f"{dtype!r} is not a quantized element; choose from {', '.join(n.name for n in _ELEMENTS)}"
        )
    return number


def _known(dtype: DType | int) -> DType | None:
    """The number as ours; None for what is no number of an element type."""
    if isinstance(dtype, (str, float)) or not hasattr(dtype, "__int__") or int(dtype) not in _VALUES:
        return None
    return DType(int(dtype))


def float8_number(dtype: DType | torch.dtype | int) -> DType:
    """The number of an FP8 element; ValueError for FP4."""
    number = element_number(dtype)
    if number is DType.kFloat4E2M1:
        raise ValueError("kFloat4E2M1 is not an FP8 element; choose kFloat8E4M3 or kFloat8E5M2")
    return number


def element_of(number: DType) -> Element:
    """The element format of a number."""
    return _ELEMENTS[number]


def float8_dtype(number: DType) -> torch.dtype:
    """The torch dtype whose view of the uint8 codes has their values."""
    return torch_dtype(_ELEMENTS[number])
