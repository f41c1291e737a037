"""What a product is asked for: the epilogue, and the request that backends judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.formats import TensorFormat
from ...device import get_device_compute_capability
from ..operand import Operand


class Epilogue(NamedTuple):
    """What happens to a @ b.T [M, N] before it is a result.

    dtype       of the result when `out` is None
    bias        [N], added in float32
    out         [M, N], receives the result; accumulate=True adds to what it holds
    exact       partial sums are promoted to float32 (the original's "split accumulator"); False allows the
                faster accumulation of Hopper's FP8 tensor cores, which keeps about 14 bits
    """

    dtype: torch.dtype
    bias: Tensor | None = None
    out: Tensor | None = None
    accumulate: bool = False
    exact: bool = True

    def finish(self, product: Tensor) -> Tensor:
        """Bias, accumulation and cast of a product that no library call has fused."""
        if self.bias is not None:
            # An FP8 product takes its bias in bfloat16 when the result is float32, as cuBLASLt does.
            product = product.float() + self.bias.float()
        return self.store(product)

    def store(self, product: Tensor) -> Tensor:
        """Accumulate into `out`, or cast."""
        if self.out is None:
            return product.to(self.dtype)
        if self.accumulate:
            return self.out.add_(product)
        return self.out.copy_(product)


class Layout(NamedTuple):
    """How a matrix lies in memory: its last axis (row_major) or its first is contiguous; elements between lines.

    stride 0 stands for a matrix neither of whose axes is contiguous.
    """

    row_major: bool
    stride: int

    @classmethod
    def of(cls, matrix: Tensor) -> Layout:
        """The layout of a matrix; a single line lies as if more followed it without a gap."""
        rows, columns = matrix.shape
        down, along = matrix.stride()
        if along == 1 and (down >= columns or rows == 1):
            return cls(True, columns if rows == 1 else down)
        if down == 1 and (along >= rows or columns == 1):
            return cls(False, rows if columns == 1 else along)
        return cls(True, 0)


@dataclass(frozen=True)
class GemmRequest:
    """The facts a backend may judge: formats, element types, extents, layouts and the device; never values.

    dtype       of the result
    device      "cuda", "cpu" ..; index is its number, -1 for a device without one
    bias        dtype of the bias, None without one
    native      the operands are torch's own tensors, no subclass, and no TorchDispatchMode (a flop counter, say) is
                to see the operators of torch that compute with them
    tf32        torch allows float32 products to round their operands to TF32
    """

    a_format: TensorFormat | None
    b_format: TensorFormat | None
    a_element: torch.dtype
    b_element: torch.dtype
    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]
    index: int
    a_layout: Layout
    b_layout: Layout
    out_layout: Layout
    bias: torch.dtype | None
    accumulate: bool
    exact: bool
    native: bool
    tf32: bool

    @classmethod
    def of(cls, a: Operand, b: Operand, epilogue: Epilogue) -> GemmRequest:
        """What backends judge of this product."""
        out = epilogue.out
        on_gpu = a.codes.device.type == "cuda"
        return cls(
            a.format,
            b.format,
            a.codes.dtype,
            b.codes.dtype,
            a.rows,
            b.rows,
            a.depth,
            epilogue.dtype if out is None else out.dtype,
            a.codes.device.type,
            get_device_compute_capability() if on_gpu else (0, 0),
            a.codes.device.index if on_gpu else -1,
            Layout.of(a.codes),
            Layout.of(b.codes),
            Layout(True, b.rows) if out is None else Layout.of(out),
            None if epilogue.bias is None else epilogue.bias.dtype,
            epilogue.accumulate and out is not None,
            epilogue.exact,
            _is_native(a.codes) and _is_native(b.codes) and not dispatch_modes(),
            allows_tf32(a.codes),
        )


def _is_native(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)


def dispatch_modes() -> int:
    """How many TorchDispatchModes see every operator of torch; a tracing compiler is none of them."""
    return 0 if torch.compiler.is_compiling() else torch._C._len_torch_dispatch_stack()


def allows_tf32(codes: Tensor) -> bool:
    """Does torch let a product of these codes round them to TF32? False for anything but float32 on a GPU."""
    if codes.dtype is not torch.float32 or not codes.is_cuda or torch.compiler.is_compiling():
        return False  # a compiler cannot trace the question
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
