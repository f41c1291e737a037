"""Triton's CPU interpreter with correctly rounded narrow floating-point conversions, for tests only.

Triton 3.6's interpreter truncates float32 to bfloat16 and rounds to FP8 half away from zero, without carrying into
the exponent; torch's casts replace them here, with the GPU's saturation (`cvt.rn.satfinite`). Call
`repair()` before the first kernel runs, in a process that has TRITON_INTERPRET=1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os

import numpy as np
import pytest
import torch
from triton.language import core
from triton.runtime import interpreter

from tests.support.cases import cover, group_cases
from transformer_engine.common.kernels import launch

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
    """values (a numpy array with source's bits or numbers) in target's bits or numbers, ties to even."""
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
    if str(target) in _MAXIMUM:  # the instruction's canonical NaN, for both signs
        narrow = torch.where(numbers.isnan(), 0x7F, narrow.view(torch.uint8))
    return narrow.view(_SIGNED[size]).numpy().view(_UNSIGNED[size]).reshape(values.shape)


_original_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor, scope):
    """As the original, but with a loop bound of shape [1], which NumPy 2.4 does not accept as an integer."""
    _original_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_patched: set[str] = set()


def _call_device_function(self, *arguments, **keywords):
    """Call without patching the language each time, which takes a third of a test's time in Triton.

    The calling kernel has patched the names that kernels import. Names that only Triton's own functions import (sums,
    maxima) are patched before the first such call and stay patched, as in Triton.
    """
    module = self.fn.__module__
    if module.startswith("triton.") and module not in _patched:
        _patched.add(module)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*arguments, **keywords)


_NUMPY_TYPES: dict[str, np.dtype] = {}
_original_numpy_type = interpreter._get_np_dtype


def _numpy_type(type):
    """NumPy dtype for a Triton type. The original builds a table with all types in each call."""
    scalar = type.scalar
    result = _NUMPY_TYPES.get(scalar.name)
    if result is None:
        result = _NUMPY_TYPES[scalar.name] = _original_numpy_type(scalar)
    return result


def _initialize_tensor(self, handle, type):
    """Like the original, with one object per shape for `tensor.shape` and `tensor.numel`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _numel_and_shape(*(type.shape.values if type.is_block() else ()))


@functools.cache
def _numel_and_shape(*sizes: int):
    return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])


def _initialize_block_type(self, element_ty, shape):
    """Like the original, with each type's shape, element count and name computed once."""
    sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _facts_of_block(element_ty.name, sizes)


@functools.cache
def _facts_of_block(element: str, sizes: tuple):
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    shape = core.tuple(sizes)
    return shape, core.validate_block_shape(shape), f"<{shape}, {element}>"


def repair() -> None:
    """Replace the interpreter's float conversions and conversions of tensors to integers; watch launches."""
    # Integer additions and products compute whether they overflow, and discard the result unless `options.debug`.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._get_np_dtype = _numpy_type
    core.tensor.__init__ = _initialize_tensor
    core.block_type.__init__ = _initialize_block_type
    interpreter._convert_float = _convert_float
    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter.InterpretedFunction.__call__ = _call_device_function
    launch._compile = _watch_launches


_original_compile = launch._compile
_POISON = 0xA5


def _watch_launches(record, tensors):
    """Launch function that raises AssertionError if a launch changes a tensor that its record does not name.

    The outputs are filled with other bytes before every launch, so no kernel may rely on their earlier contents.
    """
    start = _original_compile(record, tensors)
    name = record.kernel.fn.__name__
    reaches_more = any(launch.WRITTEN in table.columns for table in record.tables)

    def start_watched(device, pointers, args, result):
        every = (*args, *result)
        for output, tensor in zip(record.outputs, every[record.inputs :], strict=True):
            if output is None or not tensor.numel():
                continue
            if output.begins is None:
                _bytes(tensor).fill_(_POISON)
            else:
                assert bool((tensor == output.begins).all()), (
                    f"{name}: an output does not begin as it must"
                )
        before = {
            position: tensor.clone()
            for position, tensor in enumerate(every[: record.inputs])
            if tensor is not None and position not in record.in_place and not reaches_more
        }
        start(device, pointers, args, result)
        for index, old in before.items():
            assert _same_memory(every[index], old), f"{name} writes its input {index}"

    return start_watched


def _bytes(tensor):
    """The tensor's own memory, byte by byte; it is dense."""
    axes = [axis for axis in range(tensor.dim()) if tensor.shape[axis] > 1]
    ordered = tensor.squeeze().permute(
        [axes.index(a) for a in sorted(axes, key=tensor.stride, reverse=True)]
    )
    return (ordered if axes else ordered.reshape(1)).view(torch.uint8)


def _same_memory(actual, expected):
    """Equal bits, NaN or not."""
    return torch.equal(
        *(tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (actual, expected))
    )


def same_bits(actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Whether shapes and bits are equal; float32 NaNs are equal for any sign and payload."""
    if actual is None or expected is None:
        return actual is None and expected is None
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not actual.is_floating_point():
        return bool((actual == expected).all())
    size = actual.element_size()
    if size == 1:
        return _same_memory(actual, expected)
    bits = {4: torch.int32}[size]
    number = ~torch.isnan(expected.to(torch.float32))
    same_numbers = (
        actual.contiguous().view(bits)[number] == expected.contiguous().view(bits)[number]
    )
    return bool(same_numbers.all()) and bool(
        (torch.isnan(actual.to(torch.float32)) == ~number).all()
    )


def keep_cover(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep INTERPRET cases per test (two unless set), which differ as much as possible, or all cases."""
    count = os.environ.get("INTERPRET", "2")
    if count == "all":
        return
    saved = {item for cases in group_cases(items).values() for item in cover(cases, int(count))}
    config.hook.pytest_deselected(items=[item for item in items if item not in saved])
    items[:] = [item for item in items if item in saved]
