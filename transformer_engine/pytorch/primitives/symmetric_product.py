"""symmetric_product(a, b, c) = alpha a [L, M, K] @ b [L, M, K].T + beta c, where a @ b.T is symmetric.

a @ b.T is symmetric if b is a, or if a and b are symmetric matrices that commute, such as polynomials of one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.dispatch import BY_ALGORITHM, Backend, Table
from ..runtime.launching import DTYPE_NAMES, processors, run, unsupported_elementwise

__all__ = ["TABLE", "SymmetricRequest", "symmetric_product"]

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class SymmetricRequest(NamedTuple):
    """Matrices a and b [L, M, K] of one dtype.

    Attributes:
        plain: The operands are contiguous tensors, not of a subclass.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    plain: bool


def symmetric_product(
    a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """Compute alpha a @ b.T + beta c in the operands' dtype; sums are float32 for 16-bit operands.

    Args:
        a: Matrices [L, M, K].
        b: Matrices [L, M, K] for which a @ b.T is symmetric. If it is not, the result is undefined.
        c: Symmetric matrices [L, M, M]; None: nothing is added.
        alpha: Factor for the product.
        beta: Factor for c.
    """
    operands = (a, b) if c is None else (a, b, c)
    plain = all(type(one) is Tensor and one.is_contiguous() for one in operands)
    return TABLE.bound((a.shape, a.dtype, a.device, plain))(a, b, c, alpha, beta)


def _unsupported_reason(request: SymmetricRequest) -> str | None:
    if (reason := unsupported_elementwise(request.device)) is not None:
        return reason
    if request.dtype not in _SIXTEEN_BITS:
        return f"it multiplies bfloat16 and float16, not {request.dtype}"
    if not request.plain:
        return "an operand is not contiguous, or not a plain tensor"
    return "there is nothing to multiply" if 0 in request.shape else None


def _bind(request: SymmetricRequest) -> Callable[..., Tensor]:
    from ...common.kernels.symmetric_product import symmetric_product as launch

    sizes = (*request.shape, DTYPE_NAMES[request.dtype])
    index = request.device.index
    memory = processors(torch.cuda.current_device() if index is None else index).shared_memory

    def multiply(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
        return run(launch(*sizes, (alpha, beta), memory), (a, b, c))[0]

    return multiply


def _reference(request: SymmetricRequest) -> Callable[..., Tensor]:
    # On a CPU, torch sums products of 16-bit matrices in 16 bits.
    wide = request.device.type == "cpu" and request.dtype in _SIXTEEN_BITS
    dtype = torch.float32 if wide else request.dtype

    def multiply(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
        a_values, b_values = a.to(dtype), b.to(dtype).mT
        if c is None:
            product = torch.bmm(a_values, b_values)
            product = product if alpha == 1.0 else product * alpha
        else:
            product = torch.baddbmm(c.to(dtype), a_values, b_values, beta=beta, alpha=alpha)
        lower = product.to(request.dtype).tril()
        return lower + lower.tril(-1).mT  # symmetric to the bit, as the kernel's results are

    return multiply


TABLE: Table[SymmetricRequest] = Table(
    "symmetric_product",
    (
        Backend("triton", unsupported_reason=_unsupported_reason, bind=_bind),
        Backend(
            "reference",
            bind=_reference,
            batch_dependent=lambda request: BY_ALGORITHM if request.device.type == "cuda" else None,
        ),
    ),
    describe=SymmetricRequest,
)
