"""Products of a pass that is being listed: operands are symbols, and cuBLASLt's plans are appended to instructions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common.formats import BLOCK_FORMATS, FLOAT8
from ..primitives.gemm import TABLE, Epilogue
from ..primitives.gemm import fused as fused_products
from ..primitives.gemm.block_scales import block_scale_memory
from ..primitives.gemm.composed import GELU, GELU_GRADIENT
from ..primitives.gemm.composed import key_of as fused_key
from ..primitives.gemm.cublaslt_fused import plan_behind
from ..primitives.gemm.cublaslt_plan import CublasPlan
from ..primitives.gemm.request import key_of
from ..primitives.operand import Operand, OwnedOperand
from .symbols import Form, Instructions, NotListed, Symbol


class SymbolicOperand(OwnedOperand):
    """An operand whose codes are a symbol."""

    def multiplied(self, other: Operand, epilogue: Epilogue) -> Tensor:
        """Append self [M, K] @ other [N, K].T (+ bias [N]); return the symbol of the result."""
        if epilogue.out is not None:
            raise NotListed("a product writes to a tensor of its caller")
        instructions, b = _same(self, other)
        call = TABLE.bound_in_eager_mode(_native(key_of(self, b, epilogue)))
        plan = getattr(call, "__self__", None)
        if not isinstance(plan, CublasPlan):
            raise NotListed("cuBLASLt does not compute a product")
        result = instructions.made(Form((self.rows, b.rows), (b.rows, 1), epilogue.dtype))
        scales = _scales(b, self)
        instructions.multiply(plan, b.codes, self.codes, result, (*scales, _bias(plan, epilogue)))
        return result  # pyright: ignore[reportReturnType]

    def multiplied_gelu(self, other: Operand, epilogue: Epilogue, keeps_input: bool) -> Any:
        """Append a product with GELU; return the symbols of gelu(x) and x."""
        instructions, b = _same(self, other)
        plan = _fused_plan(fused_key(GELU, self, b, epilogue, keeps_input))
        if plan is None:
            return None
        form = Form((self.rows, b.rows), (b.rows, 1), epilogue.dtype)
        result = instructions.made(form)
        x = instructions.made(form) if keeps_input else None
        pointers = (*_scales(b, self), _bias(plan, epilogue), x)
        instructions.multiply(plan, b.codes, self.codes, result, pointers)
        return result, x

    def multiplied_gelu_gradient(self, other: Operand, epilogue: Epilogue, x: Any) -> Any:
        """Append a product with the gradient of GELU at x; return the symbol of the result."""
        instructions, b = _same(self, other)
        plan = _fused_plan(fused_key(GELU_GRADIENT, self, b, epilogue, False, x, x.dtype))
        if plan is None:
            return None
        result = instructions.made(Form((self.rows, b.rows), (b.rows, 1), epilogue.dtype))
        instructions.multiply(plan, b.codes, self.codes, result, (*_scales(b, self), None, x))
        return result


def _fused_plan(key: tuple[Any, ...]) -> CublasPlan | None:
    """The plan of a product with a fused epilogue; None if no library call fuses it."""
    return plan_behind(fused_products.TABLE.bound((*key[:5], *_native(key[5:]))))


def _same(a: SymbolicOperand, b: Operand) -> tuple[Instructions, Operand]:
    """Return the instructions of the pass, and b with symbols in place of tensors that the pass was given."""
    codes: Any = a.codes
    instructions: Instructions = codes.instructions
    codes, scale = instructions.symbol(b.codes), instructions.symbol(b.scale)
    return instructions, SymbolicOperand(*b._replace(codes=codes, scale=scale))  # pyright: ignore


def _native(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a product's key in which symbols count as tensors."""
    if torch.float32 in (key[2], key[8]):
        raise NotListed("whether a float32 product uses TF32 may change from call to call")
    return tuple([Tensor if part is Symbol else part for part in key])


def _bias(plan: CublasPlan, epilogue: Epilogue) -> Any:
    bias = epilogue.bias
    if bias is not None and bias.dtype != plan.bias_dtype():
        raise NotListed(f"a bias is converted from {bias.dtype}")
    return bias


def _scales(*operands: Operand) -> tuple[Any, ...]:
    """Return the scales of operands in cuBLASLt's layout."""
    scales = []
    for operand in operands:
        if operand.format in BLOCK_FORMATS.values():
            scales.append(_block_scales(operand))
        elif operand.format in (None, FLOAT8):
            scales.append(operand.scale)
        else:
            raise NotListed(f"a product of {operand.format.name}")
    return tuple(scales)


def _block_scales(operand: Operand) -> Any:
    """Return scales of blocks in cuBLASLt's layout; append a copy if they have another one, as after a gather."""
    codes: Any = operand.codes
    instructions: Instructions = codes.instructions
    scale: Any = instructions.symbol(operand.scale)
    settings, shape = operand._replace(codes=None, scale=None, amax=None), (operand.rows, operand.depth)  # pyright: ignore

    def in_library_layout(given: Tensor) -> tuple[Tensor]:
        return (block_scale_memory(settings._replace(scale=given), shape),)

    (expected,) = in_library_layout(scale.meta)
    if expected is scale.meta:
        return scale
    (copied,) = instructions.apply(in_library_layout, [scale], [Form.of(expected)])
    return copied
