"""Products in a pass that is being recorded: operands are symbols, and products are appended to instructions.

A cuBLASLt plan becomes a direct library call. Every other backend, such as cuBLASLt with swizzled scales, which
prepares them in each call, is called as in eager mode. `compiled.py` states the gain from compiled passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.formats import BLOCK_FORMATS, FLOAT8
from ..primitives.gemm import TABLE, Epilogue, composed
from ..primitives.gemm import fused as fused_products
from ..primitives.gemm.block_scales import block_scale_memory
from ..primitives.gemm.composed import GELU, GELU_GRADIENT
from ..primitives.gemm.composed import request_key as fused_key
from ..primitives.gemm.cublaslt_fused import find_plan
from ..primitives.gemm.cublaslt_plan import CublasPlan
from ..primitives.gemm.request import request_key
from ..primitives.operand import Operand, OwnedOperand
from .symbols import Instructions, NotRecordable, Symbol, TensorLayout

# Positions in product keys: `request.request_key` follows 5 fields of `composed.request_key`; dtypes of both operands.
_FUSED_FIELDS = 5
_DTYPES = (2, 8)


class SymbolicOperand(OwnedOperand):
    """An operand whose codes are a symbol."""

    def multiplied(self, other: Operand, epilogue: Epilogue) -> Tensor:
        """Append self [M, K] @ other [N, K].T (+ bias [N]); return the result symbol."""
        if epilogue.out is not None:
            raise NotRecordable("a product writes to a tensor of its caller")
        instructions, b = _symbolic(self, other)
        call = TABLE.bound_in_eager_mode(_native(request_key(self, b, epilogue)))
        plan = getattr(call, "__self__", None)
        if not isinstance(plan, CublasPlan):
            return _apply(call, self, b, epilogue, 1)[0]
        result = instructions.allocate(
            TensorLayout((self.rows, b.rows), (b.rows, 1), epilogue.dtype)
        )
        scales = _scales(b, self)
        instructions.multiply(plan, b.codes, self.codes, result, (*scales, _bias(plan, epilogue)))
        return result  # pyright: ignore[reportReturnType]

    def multiply_gelu(self, other: Operand, epilogue: Epilogue, keeps_input: bool) -> Any:
        """Append a product with GELU; return the symbols for gelu(x) and x."""
        instructions, b = _symbolic(self, other)
        call = _fused_call(fused_key(GELU, self, b, epilogue, keeps_input))
        if call is None:
            return None
        plan = find_plan(call)
        if plan is None or plan.problem.swizzled:
            out, *saved_input = _apply(call, self, b, epilogue, 2 if keeps_input else 1)
            return out, saved_input[0] if saved_input else None
        layout = TensorLayout((self.rows, b.rows), (b.rows, 1), epilogue.dtype)
        result = instructions.allocate(layout)
        x = instructions.allocate(layout) if keeps_input else None
        pointers = (*_scales(b, self), _bias(plan, epilogue), x)
        instructions.multiply(plan, b.codes, self.codes, result, pointers)
        return result, x

    def multiply_gelu_gradient(self, other: Operand, epilogue: Epilogue, x: Any) -> Any:
        """Append a product with the GELU gradient at x; return the result symbol."""
        instructions, b = _symbolic(self, other)
        call = _fused_call(fused_key(GELU_GRADIENT, self, b, epilogue, False, x, x.dtype))
        if call is None:
            return None
        plan = find_plan(call)
        if plan is None or plan.problem.swizzled:
            return _apply(call, self, b, epilogue, 1, x)[0]
        result = instructions.allocate(
            TensorLayout((self.rows, b.rows), (b.rows, 1), epilogue.dtype)
        )
        instructions.multiply(plan, b.codes, self.codes, result, (*_scales(b, self), None, x))
        return result


def _fused_call(key: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The bound product with a fused epilogue; None if it is a product followed by the activation."""
    call = fused_products.TABLE.bound((*key[:_FUSED_FIELDS], *_native(key[_FUSED_FIELDS:])))
    return None if _is_composed(call) else call


def _symbolic(a: SymbolicOperand, b: Operand) -> tuple[Instructions, Operand]:
    """Return the pass instructions, and b with symbols in place of pass inputs."""
    codes: Any = a.codes
    instructions: Instructions = codes.instructions
    codes, scale, amax = (instructions.symbol(part) for part in (b.codes, b.scale, b.amax))
    return instructions, SymbolicOperand(*b._replace(codes=codes, scale=scale, amax=amax))


def _is_composed(call: Callable[..., Any]) -> bool:
    """Whether a bound product with GELU is a product followed by the activation."""
    return isinstance(call, functools.partial) and call.func in (
        composed.gelu,
        composed.gelu_gradient,
    )


def _apply(
    call: Callable[..., Any],
    a: SymbolicOperand,
    b: Operand,
    epilogue: Epilogue,
    count: int,
    *others: Any,
) -> Sequence[Any]:
    """Append a call to a bound backend; return the symbols for its first `count` results, each [M, N].

    Args:
        others: Further call arguments.
    """
    codes: Any = a.codes
    instructions: Instructions = codes.instructions
    # The function holds no symbols, which would keep this call's tensors alive.
    a_format, a_dtype = a.format, a.dtype
    b_format, b_dtype = b.format, b.dtype
    settings = epilogue._replace(bias=None)

    def multiply(
        a_codes: Any,
        a_scale: Any,
        a_amax: Any,
        b_codes: Any,
        b_scale: Any,
        b_amax: Any,
        bias: Any,
        *others: Any,
    ) -> tuple[Tensor, ...]:
        left = Operand(a_codes, a_scale, a_format, a_amax, a_dtype)
        right = Operand(b_codes, b_scale, b_format, b_amax, b_dtype)
        results = call(left, right, settings._replace(bias=bias), *others)
        results = results if isinstance(results, tuple) else (results,)
        return tuple([result.contiguous() for result in results[:count]])

    layout = TensorLayout((a.rows, b.rows), (b.rows, 1), epilogue.dtype)
    tensors = (a.codes, a.scale, a.amax, b.codes, b.scale, b.amax, epilogue.bias, *others)
    return instructions.apply(multiply, tensors, [layout] * count)


def _native(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a product's key in which symbols count as tensors.

    Raises:
        NotRecordable: A float32 product.
    """
    if torch.float32 in [key[position] for position in _DTYPES]:
        raise NotRecordable("whether a float32 product uses TF32 may change from call to call")
    return tuple([Tensor if part is Symbol else part for part in key])


def _bias(plan: CublasPlan, epilogue: Epilogue) -> Any:
    bias = epilogue.bias
    if bias is not None and bias.dtype != plan.bias_dtype():
        raise NotRecordable(f"a bias is converted from {bias.dtype}")
    return bias


def _scales(*operands: Operand) -> tuple[Any, ...]:
    """Return operand scales in cuBLASLt's layout."""
    scales = []
    for operand in operands:
        if operand.format in BLOCK_FORMATS.values():
            scales.append(_block_scales(operand))
        elif operand.format in (None, FLOAT8):
            scales.append(operand.scale)
        else:
            raise NotRecordable(f"a product of {operand.format.name}")
    return tuple(scales)


def _block_scales(operand: Operand) -> Any:
    """Return block scales in cuBLASLt's layout; append a copy if they have another one, as after a gather."""
    codes: Any = operand.codes
    instructions: Instructions = codes.instructions
    scale: Any = instructions.symbol(operand.scale)
    settings = operand._replace(codes=None, scale=None, amax=None)
    shape = (operand.rows, operand.depth)

    def to_library_layout(scale: Tensor) -> tuple[Tensor]:
        return (block_scale_memory(settings._replace(scale=scale), shape),)

    (expected,) = to_library_layout(scale.meta)
    if expected is scale.meta:
        return scale
    (copied,) = instructions.apply(to_library_layout, [scale], [TensorLayout.of(expected)])
    return copied
