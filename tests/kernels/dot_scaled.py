"""tl.dot_scaled in Triton's interpreter, as products between decoded values.

The interpreter has no tl.dot_scaled before Triton 3.9, and later reads NVFP4's E4M3 scales as exponents.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def decode_codes(codes: np.ndarray, element: torch.dtype | None, axis: int) -> np.ndarray:
    """Decode FP8 codes, or bytes with two E2M1 codes along an axis."""
    if element is None:
        pair = np.stack((CODES[codes & 15], CODES[codes >> 4]), axis + 1)
        shape = list(codes.shape)
        shape[axis] *= 2
        return pair.reshape(shape)
    return (
        torch.from_numpy(np.ascontiguousarray(codes).view(np.uint8)).view(element).float().numpy()
    )


def factors(scale, length: int) -> np.ndarray:
    """Factors [rows, K] from scales: exponents in uint8 or E4M3."""
    if str(scale.dtype.scalar) == "fp8e4nv":
        result = (
            torch.from_numpy(np.ascontiguousarray(scale.data).view(np.uint8))
            .view(torch.float8_e4m3fn)
            .float()
        )
        return result.numpy().repeat(length, 1)
    return np.exp2(scale.data.astype(np.float32) - 127).repeat(length, 1)


def dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, total, *options):
    elements = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": None}
    left = decode_codes(a.handle.data, elements[a_format], 1)
    right = decode_codes(b.handle.data, elements[b_format], 0)
    length = left.shape[1] // a_scale.handle.data.shape[1]
    product = (left * factors(a_scale.handle, length)) @ (right * factors(b_scale.handle, length).T)
    return self.tensor(
        triton_interpreter.TensorHandle(product + total.handle.data, tl.float32), total.type
    )


create_dot = triton_interpreter.InterpreterBuilder.create_dot


def dot_of_values(self, a, b, *rest):
    """The interpreter's product on float32 values; the original multiplies the bits of bfloat16."""
    if a.dtype.scalar == tl.bfloat16:
        a, b = (
            triton_interpreter.TensorHandle(
                (x.data.astype(np.uint32) << 16).view(np.float32), tl.float32
            )
            for x in (a, b)
        )
    return create_dot(self, a, b, *rest)


def install() -> None:
    """Replace tl.dot_scaled, and tl.dot for bfloat16, in this process's interpreter."""
    setattr(triton_interpreter.InterpreterBuilder, "create_dot", dot_of_values)  # noqa: B010
    setattr(TritonSemantic, "dot_scaled", dot_scaled)  # noqa: B010
