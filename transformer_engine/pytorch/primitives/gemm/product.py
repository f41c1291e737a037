"""out [M, N] = a [M, K] @ b [N, K].T, then the epilogue: a warm call is one look-up by what decides its backend."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ....common import dispatch
from ....common.bounded import Bounded
from ....common.dispatch import Table
from ....common.formats import TensorFormat
from .. import launching
from ..operand import Operand
from ..quantize import FORMATS
from . import cublaslt, matmul, reference, scaled_mm, tuning, widen
from .request import Epilogue, GemmRequest, allows_tf32

TABLE: Table[GemmRequest] = Table(
    "gemm",
    (
        cublaslt.BACKEND,
        matmul.BACKEND,
        scaled_mm.TENSOR_SCALES,
        scaled_mm.BLOCK_SCALES,
        widen.BACKEND,
        reference.BACKEND,
    ),
)

_REMEDY = "quantize both, or neither, with custom quantizers of one family"
_dispatch_modes = torch._C._len_torch_dispatch_stack

_calls: Bounded[Hashable, Callable[[Operand, Operand, Epilogue], Tensor]] = Bounded(8192)


def gemm(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """out [M, N] = a [M, K] @ b [N, K].T (+ bias [N]) in epilogue.dtype; both operands end in the contracted axis.

    With epilogue.out the result is written there (accumulate=True: added to it) and returned.
    Raises ValueError when the extents of operands, bias and out do not fit, and Unsupported when no backend takes
    the formats. Not differentiable: its callers are the forward and backward of autograd functions.
    """
    if type(a) is not Operand:
        return a.multiplied(b, epilogue)  # pyright: ignore[reportAttributeAccessIssue]
    if type(b) is not Operand:
        raise TypeError(f"an operand of its owner's format is multiplied with a plain one; {_REMEDY}")
    if torch.compiler.is_compiling():
        return _traced(a, b, epilogue)
    if dispatch._forced or dispatch._observers or tuning.Switch.depth or _dispatch_modes():
        return _choose(a, b, epilogue)(a, b, epilogue)
    return _warm(a, b, epilogue)


def _warm(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    key = _signature(a, b, epilogue)
    call = _calls.get(key)
    if call is None:
        call = _choose(a, b, epilogue)
        _calls.keep(key, call)
    return call(a, b, epilogue)


def _signature(a: Operand, b: Operand, epilogue: Epilogue) -> Hashable:
    """Everything that `_choose` looks at, gathered without building a request."""
    a_codes, _, a_format, _, _ = a
    b_codes, _, b_format, _, _ = b
    dtype, bias, out, accumulate, exact = epilogue
    element = a_codes.dtype
    return (
        a_codes.shape,
        a_codes.stride(),
        element,
        type(a_codes),
        a_codes.get_device(),
        b_codes.shape,
        b_codes.stride(),
        b_codes.dtype,
        type(b_codes),
        b_codes.get_device(),
        None if a_format is None else a_format.name,
        None if b_format is None else b_format.name,
        dtype,
        None if bias is None else (bias.dtype, bias.shape, bias.stride(), bias.get_device()),
        None if out is None else (out.dtype, out.shape, out.stride(), out.get_device()),
        accumulate,
        exact,
        element is torch.float32 and allows_tf32(a_codes),
    )


def _choose(a: Operand, b: Operand, epilogue: Epilogue) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    """What computes this product and every other one with the same signature."""
    _check(a, b, epilogue)
    if a.rows == 0 or b.rows == 0 or a.depth == 0:
        return _nothing_to_multiply
    request = GemmRequest.of(a, b, epilogue)
    backend = TABLE.select(request)
    if backend is not cublaslt.BACKEND:
        return backend.run
    plan = cublaslt.plan_of(request)
    if tuning.wanted():
        tuning.tune(plan, a, b, epilogue)
    return plan.run


def _check(a: Operand, b: Operand, epilogue: Epilogue) -> None:
    if a.depth != b.depth:
        raise ValueError(
            f"the operands contract {a.depth} and {b.depth} elements; both must end in the same K"
        )
    tensors = {"b": b.codes, "bias": epilogue.bias, "out": epilogue.out}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != a.codes.device:
            raise ValueError(f"{name} is on {tensor.device} and a on {a.codes.device}; move one of them")
    if epilogue.bias is not None and epilogue.bias.shape != (b.rows,):
        raise ValueError(f"the bias has shape {tuple(epilogue.bias.shape)}; it must be ({b.rows},)")
    if epilogue.out is not None and epilogue.out.shape != (a.rows, b.rows):
        raise ValueError(f"out has shape {tuple(epilogue.out.shape)}; it must be ({a.rows}, {b.rows})")


def _nothing_to_multiply(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """A sum over no elements is zero; a result without rows is empty."""
    zeros = torch.zeros(a.rows, b.rows, dtype=torch.float32, device=a.codes.device)
    return epilogue.finish(zeros)


def _traced(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """The product in a graph: an operator that a compiler does not look into where cuBLASLt is called directly.

    Eager mode and the graph then run the same plan, so their results agree bit for bit.
    """
    _check(a, b, epilogue)
    if a.rows == 0 or b.rows == 0 or a.depth == 0:
        return _nothing_to_multiply(a, b, epilogue)
    backend = TABLE.select(GemmRequest.of(a, b, epilogue))
    if backend.name != cublaslt.BACKEND.name:
        return backend.run(a, b, epilogue)
    names = [None if x.format is None else x.format.name for x in (a, b)]
    operands = (a.codes, a.scale, names[0], b.codes, b.scale, names[1], epilogue.bias)
    if epilogue.out is None:
        return _product(*operands, epilogue.dtype, epilogue.exact)
    _product_into(epilogue.out, *operands, epilogue.accumulate, epilogue.exact)
    return epilogue.out


_OPERANDS = "Tensor a, Tensor? a_scale, str? a_format, Tensor b, Tensor? b_scale, str? b_format, Tensor? bias"


def format_named(name: str | None) -> TensorFormat | None:
    """The format that an operator names."""
    return None if name is None else FORMATS[name].format


def _product_now(a, a_scale, a_format, b, b_scale, b_format, bias, dtype, exact) -> Tensor:
    left, right = Operand(a, a_scale, format_named(a_format)), Operand(b, b_scale, format_named(b_format))
    return _warm(left, right, Epilogue(dtype, bias, exact=exact))


def _product_fake(a, a_scale, a_format, b, b_scale, b_format, bias, dtype, exact) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _product_into_now(out, a, a_scale, a_format, b, b_scale, b_format, bias, accumulate, exact) -> None:
    left, right = Operand(a, a_scale, format_named(a_format)), Operand(b, b_scale, format_named(b_format))
    _warm(left, right, Epilogue(out.dtype, bias, out, accumulate, exact))


def _product_into_fake(out, a, a_scale, a_format, b, b_scale, b_format, bias, accumulate, exact) -> None:
    return None


_product = launching.traceable(
    f"product({_OPERANDS}, ScalarType dtype, bool exact) -> Tensor", _product_now, _product_fake
)
_product_into = launching.traceable(
    f"product_into(Tensor(a!) out, {_OPERANDS}, bool accumulate, bool exact) -> ()",
    _product_into_now,
    _product_into_fake,
)
