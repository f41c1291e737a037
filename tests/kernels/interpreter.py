"""Triton's CPU interpreter with correctly rounded narrow floating-point conversions, for tests only.

Triton 3.6's interpreter truncates float32 to bfloat16 and rounds to FP8 half away from zero, without carrying into
the exponent; torch's casts take their place here, with the saturation of the GPU's `cvt.rn.satfinite`. Call
`repair()` before the first kernel runs, in a process that has TRITON_INTERPRET=1.
"""

from __future__ import annotations

import numpy as np
import torch
from triton.runtime import interpreter

_TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_MAXIMUM = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_original = interpreter._convert_float


def _convert_float(values, source, target, rounding):
    """values (a numpy array of source's bits or numbers) as numbers or bits of target, nearest ties to even."""
    source_dtype, target_dtype = _TORCH.get(str(source)), _TORCH.get(str(target))
    toward_zero = rounding == interpreter._ir.ROUNDING_MODE.RTZ
    if source_dtype is None or target_dtype is None or toward_zero:
        return _original(values, source, target, rounding)
    bits = np.ascontiguousarray(values).view(_UNSIGNED[values.dtype.itemsize])
    signed = bits if bits.dtype == np.uint8 else bits.view(f"i{bits.dtype.itemsize}")
    numbers = torch.from_numpy(signed.copy()).view(source_dtype).to(torch.float32)
    if str(target) in _MAXIMUM:
        numbers = numbers.clamp(-_MAXIMUM[str(target)], _MAXIMUM[str(target)])
    narrow = numbers.to(target_dtype)
    size = narrow.element_size()
    return narrow.view(_SIGNED[size]).numpy().view(_UNSIGNED[size]).reshape(values.shape)


_original_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor, scope):
    """As the original, but with a loop bound of shape [1], which NumPy 2.4 refuses to take for an integer."""
    _original_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def repair() -> None:
    """Replace the interpreter's conversion between floating-point types, and of tensors to integers."""
    interpreter._convert_float = _convert_float
    interpreter._patch_lang_tensor = _patch_lang_tensor


def same_bits(actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Equal shapes and bits, NaN codes of either sign being the same."""
    if actual is None or expected is None:
        return actual is None and expected is None
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not actual.is_floating_point():
        return bool((actual == expected).all())
    size = actual.element_size()
    bits = {1: torch.uint8, 4: torch.int32}[size]
    number = ~torch.isnan(expected.to(torch.float32))
    same_numbers = actual.contiguous().view(bits)[number] == expected.contiguous().view(bits)[number]
    return bool(same_numbers.all()) and bool((torch.isnan(actual.to(torch.float32)) == ~number).all())
