"""Element formats of quantized tensors by number, their torch dtypes, and code and scale allocation."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...common.formats import E2M1, E4M3, E5M2, FLOAT8, Element, ceil_div
from ..constants import DType
from ..primitives.quantize import Quantized, QuantizeSpec, torch_dtype
from ..runtime.checks import tensor, values_dtype

_SCALE_DTYPES = {"float32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


def empty_quantized(
    spec: QuantizeSpec, rows: int, depth: int, device: torch.device | str | None
) -> Quantized:
    """Allocate codes and scales for a matrix [rows, depth], shaped as `quantize` returns them."""
    form, block = spec.format, spec.format.block
    buffers: dict[str, Tensor] = {}
    for used, suffix, m, k in (
        (spec.rowwise, "", rows, depth),
        (spec.columnwise, "_t", depth, rows),
    ):
        if not used:
            continue
        scales = (1,) if block is None else (ceil_div(m, block[0]), ceil_div(k, block[1]))
        codes = torch.empty((m, k // form.packing), dtype=torch_dtype(spec.element), device=device)
        buffers[f"codes{suffix}"] = codes
        buffers[f"scale{suffix}"] = torch.empty(
            scales, dtype=_SCALE_DTYPES[form.scale], device=device
        )
        if form.levels is not None:
            maxima = rows if form.row_scaled and suffix == "" else 1
            buffers[f"amax{suffix}"] = torch.empty(maxima, dtype=torch.float32, device=device)
    return Quantized(**buffers)


_ELEMENTS = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2, DType.kFloat4E2M1: E2M1}
_VALUES = frozenset(int(number) for number in DType)
_NUMBERS = {torch.float8_e4m3fn: DType.kFloat8E4M3, torch.float8_e5m2: DType.kFloat8E5M2}


def element_number(dtype: DType | torch.dtype | int) -> DType:
    """Return the number of an element, given as a number, a member of another enumeration, or a torch dtype."""
    number = None
    if isinstance(dtype, torch.dtype):
        number = _NUMBERS.get(dtype)
    elif (
        not isinstance(dtype, (str, float)) and hasattr(dtype, "__int__") and int(dtype) in _VALUES
    ):
        number = DType(int(dtype))
    if number is None or number not in _ELEMENTS:
        raise ValueError(
            f"{dtype!r} is not a quantized element; choose from {', '.join(n.name for n in _ELEMENTS)}"
        )
    return number


def float8_number(dtype: DType | torch.dtype | int) -> DType:
    """Return the number of an FP8 element; raise ValueError for FP4."""
    number = element_number(dtype)
    if number is DType.kFloat4E2M1:
        raise ValueError("kFloat4E2M1 is not an FP8 element; choose kFloat8E4M3 or kFloat8E5M2")
    return number


def find_element(number: DType) -> Element:
    """Return the element format of a number."""
    return _ELEMENTS[number]


def float8_dtype(number: DType) -> torch.dtype:
    """Return the torch dtype in which a view of the uint8 codes has their values."""
    return torch_dtype(_ELEMENTS[number])


def nominal_dtype(fake_dtype: torch.dtype | None, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that a storage presents; None if neither name is given.

    Args:
        fake_dtype: The dtype under NVIDIA's keyword.
        dtype: The dtype under this package's keyword.

    Raises:
        ValueError: Both are given and differ.
    """
    if fake_dtype is None:
        return dtype
    values_dtype("fake_dtype", fake_dtype)
    if dtype is not None and dtype is not fake_dtype:
        raise ValueError(
            f"fake_dtype={fake_dtype} and dtype={dtype} are one setting; give one of them"
        )
    return fake_dtype


def check_scalar(name: str, value: Tensor | None) -> None:
    """Raise TypeError or ValueError unless value is a one-element float32 tensor, or None."""
    if value is None:
        return
    tensor(name, value)
    if value.dtype != torch.float32 or value.numel() != 1:
        raise ValueError(
            f"{name} is {value.dtype} {list(value.shape)}; give a float32 tensor of one element"
        )


@functools.cache
def float8_spec(
    dtype: DType, rowwise: bool, columnwise: bool, power_of_two: bool = False, epsilon: float = 0.0
) -> QuantizeSpec:
    """Describe a quantization with one scale."""
    return QuantizeSpec(
        FLOAT8, find_element(dtype), rowwise, columnwise, power_of_two=power_of_two, epsilon=epsilon
    )
