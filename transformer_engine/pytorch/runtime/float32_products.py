"""Products in float32 arithmetic, also where torch may round the operands of float32 products.

`torch.set_float32_matmul_precision("high")`, `torch.backends.cuda.matmul.allow_tf32` and their neighbors round float32
operands to TF32 or bfloat16, which leaves 11 or 8 of 24 bits. The functions here turn this off while torch chooses the
kernel, in backward passes and captures too, and have derivatives of every order and mode.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .autograd import Function

# The getter and the setter also cover settings by the older names, such as `allow_tf32`.
_read: Any = torch._C._get_fp32_precision_getter
_write: Any = torch._C._set_fp32_precision_setter
_LIBRARIES = {"cuda": "cuda", "cpu": "mkldnn"}  # device type -> library of its matrix products
_ROUNDED = ("tf32", "bf16")
_lock = threading.Lock()
# Threads inside `_unrounded` per library, and the setting to restore after the last of them.
_inside: dict[str, int] = {}
_before: dict[str, str] = {}


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a [.., M, K] @ b [.., K, N] with equal leading axes, without rounding float32 operands."""
    return _apply(_UnroundedProduct, a, b) if _is_rounded(a) else a @ b


def solve_unit_triangular(a: Tensor, b: Tensor, upper: bool = False) -> Tensor:
    """Solve a x = b for a unitriangular matrix [.., N, N] and b [.., N, M], without rounding float32 operands.

    Args:
        a: Triangular matrix; its diagonal is not read, and counts as ones.
        b: Right sides.
        upper: The matrix is upper instead of lower triangular.
    """
    if _is_rounded(a):
        return _apply(_UnroundedSolution, a, b, upper)
    return torch.linalg.solve_triangular(a, b, upper=upper, unitriangular=True)


def _is_rounded(x: Tensor) -> bool:
    """Whether torch may round the float32 operands of a product on the tensor's device."""
    library = _LIBRARIES.get(x.device.type)
    if library is None or x.dtype != torch.float32:
        return False
    with _lock:  # another thread may have turned the rounding off for its own product
        return bool(_inside.get(library)) or _read(library, "matmul") in _ROUNDED


@contextmanager
def _unrounded(device_type: str) -> Iterator[None]:
    """Turn the rounding of float32 operands off.

    The setting is process-wide: until the end, other threads multiply without rounding too.
    """
    library = _LIBRARIES[device_type]
    with _lock:
        if not _inside.get(library):
            _before[library] = _read(library, "matmul")
            _write(library, "matmul", "ieee")
        _inside[library] = _inside.get(library, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _inside[library] -= 1
            if not _inside[library]:
                # A setting equal to that of all products may be inherited: "none" inherits it again.
                inherited = _read(library, "all") == _before[library]
                _write(library, "matmul", "none" if inherited else _before[library])


def _apply(function: type[Function], *args: Any) -> Tensor:
    """Compute a function; unlike others of the package, those of this file support the transforms of torch.func."""
    return super(Function, function).apply(*args)


class _UnroundedProduct(Function):
    """a @ b."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        with _unrounded(a.device.type):
            return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        grad_a = float32_product(grad_output, b.mT) if needs_a else None
        return grad_a, float32_product(a.mT, grad_output) if needs_b else None

    @staticmethod
    def jvp(ctx: Any, tangent_a: Tensor, tangent_b: Tensor) -> Tensor:
        a, b = ctx.saved_tensors
        return float32_product(tangent_a, b) + float32_product(a, tangent_b)


class _UnroundedSolution(Function):
    """Solution x of a x = b for a unitriangular matrix."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, upper: bool) -> Tensor:
        with _unrounded(a.device.type):
            return torch.linalg.solve_triangular(a, b, upper=upper, unitriangular=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        a, _, ctx.upper = inputs
        ctx.save_for_backward(a, output)
        ctx.save_for_forward(a, output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor, None]:
        a, x = ctx.saved_tensors
        grad_b = solve_unit_triangular(a.mT, grad_output, not ctx.upper)
        if not ctx.needs_input_grad[0]:
            return None, grad_b, None
        return _triangle(-float32_product(grad_b, x.mT), ctx.upper), grad_b, None

    @staticmethod
    def jvp(ctx: Any, tangent_a: Tensor, tangent_b: Tensor, _: None) -> Tensor:
        a, x = ctx.saved_tensors
        change = float32_product(_triangle(tangent_a, ctx.upper), x)
        return solve_unit_triangular(a, tangent_b - change, ctx.upper)


def _triangle(x: Tensor, upper: bool) -> Tensor:
    """The part of a matrix that `solve_unit_triangular` reads."""
    return x.triu(1) if upper else x.tril(-1)
