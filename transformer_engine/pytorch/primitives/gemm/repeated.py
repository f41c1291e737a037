"""out [M, N] = a [M, K] @ b [N, K].T again and again, as a layer asks for it: what never changes is said once.

A product on its own is looked up by all that its backend may depend on. A layer's has one device, result and accuracy,
which it says when its spec is built; what is left to look up is how its two matrices lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import undisturbed
from ....common.memory import Memory
from ..operand import Operand, plain
from . import cublaslt_plan
from .product import TABLE, product
from .request import Epilogue, described, dispatch_modes, is_compiling
from .tuning_switch import Switch, asked

_KEPT = 64
_NATIVE = (Tensor, torch.nn.Parameter)
_Turns = tuple[bool, bool]
_Facts = tuple[Any, Any, torch.dtype, type, torch.device, str | None]


class RepeatedProduct:
    """Products on one device with results in one dtype, exact or not as `Epilogue` says.

    turns   which of two unquantized matrices is given as its transpose, a [K, M] or b [K, N]

    While a compiler traces, a backend is forced, somebody observes or an algorithm is tuned, it is a product like any
    other; so it is for operands of other kinds than torch's own tensors, and in float32, where torch decides how exact.
    """

    __slots__ = ("_epilogue", "_exact", "_matrices", "_operands", "_turns", "dtype")

    def __init__(self, device: torch.device, dtype: torch.dtype, exact: bool, turns: _Turns = (False, False)):
        self.dtype = dtype
        self._exact = exact
        self._epilogue = Epilogue(dtype, exact=exact)
        self._turns = turns
        self._matrices: Memory[Any, Any] = Memory(_of_matrices, _KEPT, device, dtype, exact, turns)
        self._operands: Memory[Any, Any] = Memory(_of_operands, _KEPT, device, dtype, exact)

    def of_matrices(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product of unquantized matrices, each as it lies or turned."""
        epilogue = self._epilogue if bias is None else Epilogue(self.dtype, bias, exact=self._exact)
        if type(a) in _NATIVE and type(b) in _NATIVE and _undisturbed():
            facts = None if bias is None else (bias.dtype, bias.shape)
            call = self._matrices[a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, facts]
            if call is not None:
                return call((a,), (b,), epilogue)
        of_a, of_b = self._turns
        return product(plain(a.t() if of_a else a), plain(b.t() if of_b else b), epilogue)

    def of_operands(self, a: Operand, b: Operand, bias: Tensor | None = None) -> Tensor:
        """The product of operands, which `turns` does not concern."""
        epilogue = self._epilogue if bias is None else Epilogue(self.dtype, bias, exact=self._exact)
        if type(a) is Operand is type(b) and _undisturbed():
            x, _, x_format, _, _ = a
            y, _, y_format, _, _ = b
            if x_format is not None and y_format is not None and type(x) is Tensor is type(y):
                facts = None if bias is None else (bias.dtype, bias.shape)
                names = x_format.name, y_format.name
                key = (x.shape, x.stride(), x.dtype, y.shape, y.stride(), y.dtype, names, facts)
                return self._operands[key](a, b, epilogue)
        return product(a, b, epilogue)


def _undisturbed() -> bool:
    """Is a product one that depends on its matrices alone?"""
    return undisturbed() and not (is_compiling() or dispatch_modes() or Switch.depth or asked() is not None)


def _of_operands(device: torch.device, dtype: torch.dtype, exact: bool, key: Any) -> Callable[..., Tensor]:
    """What computes products of quantized operands that lie as key says."""
    a_shape, a_strides, a_element, b_shape, b_strides, b_element, (a_format, b_format), bias = key
    of_a = a_shape, a_strides, a_element, Tensor, device, a_format
    of_b = b_shape, b_strides, b_element, Tensor, device, b_format
    return _bound(of_a, of_b, device, dtype, exact, bias)


def _of_matrices(
    device: torch.device, dtype: torch.dtype, exact: bool, turns: _Turns, key: Any
) -> Callable[..., Tensor] | None:
    """The same of unquantized ones, where that reads nothing of them but their addresses; else None."""
    a_shape, a_strides, a_element, b_shape, b_strides, b_element, bias = key
    if a_element is torch.float32 or len(a_shape) != 2 or len(b_shape) != 2:
        return None
    a_step, b_step = (-1 if turned else 1 for turned in turns)
    of_a = a_shape[::a_step], a_strides[::a_step], a_element, Tensor, device, None
    of_b = b_shape[::b_step], b_strides[::b_step], b_element, Tensor, device, None
    call = _bound(of_a, of_b, device, dtype, exact, bias)
    return call if isinstance(getattr(call, "__self__", None), cublaslt_plan.Plan) else None


def _bound(
    a: _Facts,
    b: _Facts,
    device: torch.device,
    dtype: torch.dtype,
    exact: bool,
    bias: Any,
) -> Callable[..., Tensor]:
    """What the table binds where nothing disturbs it."""
    of_bias = None if bias is None else (*bias, device)
    return TABLE.bind(described(*a, *b, dtype, of_bias, None, False, exact, False, False, False))
