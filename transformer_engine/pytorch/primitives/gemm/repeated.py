"""out [M, N] = a [M, K] @ b [N, K].T again and again, as a layer asks for it: what never changes is said once.

A product on its own is looked up by all that its backend may depend on. A layer's has one device, result and accuracy,
which it says when its spec is built; what is left to look up is how its two matrices lie.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import undisturbed
from ....common.memory import Memory
from ...runtime.recording import active
from ...runtime.tracing import result_in
from ..operand import Operand, plain
from . import cublaslt_plan
from .product import TABLE, product
from .request import Epilogue, described, dispatch_modes, is_compiling
from .tuning_switch import Switch, asked_in_eager_mode

_KEPT = 64
_NATIVE = (Tensor, torch.nn.Parameter)
_Turns = tuple[bool, bool]
_Facts = tuple[Any, Any, torch.dtype, type, torch.device, str | None]


class _Way(NamedTuple):
    """A plan, which reads nothing of its operands but addresses and scales, and what makes room for its result."""

    call: Callable[..., Tensor]
    make: Callable[[], Tensor]


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
        self._turns = turns
        self._matrices: Memory[Any, _Way | None] = Memory(_of_matrices, _KEPT, device, dtype, exact, turns)
        self._operands: Memory[Any, _Way | None] = Memory(_of_operands, _KEPT, device, dtype, exact)

    def of_matrices(
        self, a: Tensor, b: Tensor, bias: Tensor | None = None, leading: torch.Size | None = None
    ) -> Tensor:
        """[.., N] of unquantized matrices, each as it lies or turned; leading: the dimensions of the result before N.

        An a that is not turned may have several such dimensions itself, which are the result's then; as may one that
        is, with those of b.
        """
        if type(a) in _NATIVE and type(b) in _NATIVE and undisturbed_products():
            facts = None if bias is None else (bias.dtype, bias.shape)
            way = self._matrices[a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, facts, leading]
            if way is not None:
                return way[0]((a,), (b,), (self.dtype, bias, _fresh(way), False, self._exact))
        of_a, of_b = self._turns
        if leading is None:
            leading = a.shape[-1:] if of_a else a.shape[:-1]
        a, b = as_matrix(a), as_matrix(b)
        operands = plain(a.t() if of_a else a), plain(b.t() if of_b else b)
        return _shaped(product(*operands, Epilogue(self.dtype, bias, exact=self._exact)), leading)

    def of_operands(
        self, a: Operand, b: Operand, bias: Tensor | None = None, leading: torch.Size | None = None
    ) -> Tensor:
        """[.., N] of operands, which `turns` does not concern."""
        if type(a) is Operand is type(b) and undisturbed_products():
            x, _, x_format, _, _ = a
            y, _, y_format, _, _ = b
            if x_format is not None and y_format is not None and type(x) is Tensor is type(y):
                facts = None if bias is None else (bias.dtype, bias.shape)
                names = x_format.name, y_format.name
                key = (x.shape, x.stride(), x.dtype, y.shape, y.stride(), y.dtype, names, facts, leading)
                way = self._operands[key]
                if way is not None:
                    return way[0](a, b, (self.dtype, bias, _fresh(way), False, self._exact))
        return _shaped(product(a, b, Epilogue(self.dtype, bias, exact=self._exact)), leading)


def _fresh(way: _Way) -> Tensor:
    """Room for a result."""
    made = way[1]()
    if active.recording is not None:
        active.recording.fresh = (made,)
    return made


def as_matrix(tensor: Tensor) -> Tensor:
    """[.., K] as [M, K]."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _shaped(result: Tensor, leading: torch.Size | None) -> Tensor:
    if leading is None or len(leading) == 1:
        return result
    return result_in(result, (*leading, result.shape[-1]))


def undisturbed_products() -> bool:
    """Is a product one that depends on its matrices alone?"""
    return not is_compiling() and undisturbed_in_eager_mode()


def undisturbed_in_eager_mode() -> bool:
    """undisturbed_products(), for a caller that knows that no compiler is tracing."""
    if not undisturbed():
        return False
    return not (dispatch_modes() or Switch.depth or asked_in_eager_mode() is not None)


def _of_operands(device: torch.device, dtype: torch.dtype, exact: bool, key: Any) -> _Way | None:
    """The way of products of quantized operands that lie as key says; None where no plan of the library takes them."""
    a_shape, a_strides, a_element, b_shape, b_strides, b_element, (a_format, b_format), bias, leading = key
    a = a_shape, a_strides, a_element, Tensor, device, a_format
    b = b_shape, b_strides, b_element, Tensor, device, b_format
    return _planned(a, b, device, dtype, exact, bias, a_shape[:1] if leading is None else leading)


def _of_matrices(
    device: torch.device, dtype: torch.dtype, exact: bool, turns: _Turns, key: Any
) -> _Way | None:
    """The same of unquantized ones."""
    a_shape, a_strides, a_element, b_shape, b_strides, b_element, bias, leading = key
    of_a, of_b = _lying(a_shape, a_strides, turns[0]), _lying(b_shape, b_strides, turns[1])
    if a_element is torch.float32 or of_a is None or of_b is None:
        return None
    a, b = (*of_a, a_element, Tensor, device, None), (*of_b, b_element, Tensor, device, None)
    if leading is None:
        leading = of_a[0][:1] if turns[0] else a_shape[:-1]
    return _planned(a, b, device, dtype, exact, bias, leading)


def _lying(
    shape: Sequence[int], strides: Sequence[int], turned: bool
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Shape and strides of a tensor [.., K] as a matrix, or as its transpose; None where it is none without a copy."""
    if len(shape) == 2:
        rows, depth = shape
        down, along = strides
    else:
        depth, down, along, rows = shape[-1], shape[-1], 1, 1
        for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
            if extent != 1 and stride != rows:
                return None
            rows *= extent
        rows //= max(depth, 1)
    return ((depth, rows), (along, down)) if turned else ((rows, depth), (down, along))


def _planned(
    a: _Facts,
    b: _Facts,
    device: torch.device,
    dtype: torch.dtype,
    exact: bool,
    bias: Any,
    leading: Sequence[int],
) -> _Way | None:
    """What the table binds where nothing disturbs it, if that is a plan of the library, with results [*leading, N]."""
    of_bias = None if bias is None else (*bias, device)
    call = TABLE.bind(described(*a, *b, dtype, of_bias, None, False, exact, False, False, False))
    if not isinstance(getattr(call, "__self__", None), cublaslt_plan.Plan):
        return None
    shape = (*leading, b[0][0])
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return _Way(call, functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device))
