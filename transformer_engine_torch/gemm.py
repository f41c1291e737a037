"""`generic_gemm` and `te_general_grouped_gemm`: matrix products under the extension's names.

The operands are plain or quantized matrices. `transA` and `transB` use NVIDIA's column-major convention; with
contiguous rows the product is D = op(B) op(A):

| transA | transB | layout | product | use in a linear layer |
| --- | --- | --- | --- | --- |
| True | False | "TN" | D [M, N] = B [M, K] A [N, K].T | forward: A is the weight, B the input |
| False | False | "NN" | D [M, K] = B [M, N] A [N, K] | input gradient: B is the output gradient |
| False | True | "NT" | D [N, K] = B [M, N].T A [M, K] | weight gradient: A is the input, B the output gradient |
| True | True | "TT" | D [N, J] = B [M, N].T A [J, M].T | none |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.common.checks import described
from transformer_engine.common.formats import BLOCK_FORMATS
from transformer_engine.common.numbers import to_bool, to_float, to_ints
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.primitives.activation import activation_backward, activation_forward
from transformer_engine.pytorch.primitives.column_sums import column_sums
from transformer_engine.pytorch.primitives.gemm import Epilogue, gemm
from transformer_engine.pytorch.primitives.operand import COLUMNWISE, ROWWISE, Operand, plain
from transformer_engine.pytorch.runtime.checks import floating, tensor_or_none
from transformer_engine.pytorch.runtime.warn_once import warn_once
from transformer_engine.pytorch.tensor.storage.quantized_tensor_storage import (
    QuantizedTensorStorage,
    plain_matrix,
)

from .cast import torch_dtype
from .checks import output_or_none, quantizer_or_none, sequence, with_axes
from .comm_overlap import ProductExchange

__all__ = [
    "generic_gemm",
    "te_general_grouped_gemm",
]


class _AfterProduct(NamedTuple):
    """Steps after a product: D = activation(alpha * product + beta * D + bias).

    Attributes:
        beta: Multiplier of the values that D holds; 0 ignores them.
        gelu: Whether the activation is GELU, or with `grad` the multiplication by its derivative at `gelu_in`.
    """

    alpha: float
    beta: float
    bias: Tensor | None
    gelu: bool
    gelu_in: Tensor | None
    grad: bool


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: DType | int | torch.dtype | None,
    bias: Tensor | None,
    bias_type: DType | int | None,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor | None,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Compute D = activation(alpha * op(B) op(A) + beta * D + bias).

    Accumulation comes before the activation, as in cuBLASLt: with `gelu` and `accumulate` the result is
    gelu(product + D).

    Args:
        D: Receives the result. A quantized tensor is written by `quantizer`, or by its own quantizer.
        quantizer: Quantizes the result. With a plain D it must be None.
        output_dtype: Type for a new result; by default A's.
        bias: Forward (`grad=False`): [N] or [1, N], added to the product; a tensor without elements is ignored.
            With `grad=True` only its dtype is read: the second result is the sum of B over its rows.
        bias_type: Ignored, like workspace and workspace_size.
        gelu: Forward: apply GELU (tanh approximation) and return its input as the third result. With `grad=True`
            multiply by the derivative of GELU at `gelu_in`.
        accumulate: Add to D's values; requires D.
        use_split_accumulator: Promote partial sums in FP8 products to float32.
        comm_overlap: CommOverlap or CommOverlapP2P whose collective runs with the product; see
            `transformer_engine_torch.comm_overlap`. Without it the next three arguments have no effect.
        comm_type: AG or RS; by default `comm_overlap`'s.
        extra_output: Receives this rank's reduce-scatter rows, or a copy of the gathered rows.
        bulk_overlap: The collective is independent of the product and runs beside it.
        beta: Multiplier for D with `accumulate`; 1 by default.

    Returns:
        `[D, bias gradient or None, GELU's input or None, extra_output]`.

    Raises:
        TypeError: `comm_overlap` has no buffer.
        ValueError: The operands, D and the bias do not fit each other, or the operands do not fit the collective.
        NotImplementedError: A quantizer is given with a plain D.
        RuntimeError: Two block-scaled operands (1 x 128 and 128 x 128) that NVIDIA's engine does not multiply: without
            `use_split_accumulator`, both in 128 x 128 blocks, with a bias gradient, or with extents that are not
            multiples of 16.
    """
    exchange = None
    if comm_overlap is not None:
        exchange = ProductExchange(comm_overlap, comm_type, extra_output, bulk_overlap)
    elif comm_type is not None or extra_output is not None or bulk_overlap:
        warn_once(
            "generic_gemm without comm_overlap",
            "comm_type, extra_output and bulk_overlap have no effect without comm_overlap; leave them out",
        )
    _check_kinds(A, B, D, bias, quantizer, output_dtype)
    gelu, grad = to_bool("gelu", gelu), to_bool("grad", grad)
    accumulate = to_bool("accumulate", accumulate)
    split = to_bool("use_split_accumulator", use_split_accumulator)
    alpha, beta = _finite("alpha", alpha), None if beta is None else _finite("beta", beta)
    if beta not in (None, 0.0) and not accumulate:
        raise ValueError(f"beta={beta} without accumulate; set accumulate=True, or leave beta None")
    if quantizer is not None and D is not None and not isinstance(D, QuantizedTensorStorage):
        raise NotImplementedError(
            f"a quantizer with D={described(D)}, which is not quantized; give a quantized D, or quantize D afterwards"
        )
    if gelu and grad and gelu_in is None:
        raise ValueError("gelu=True with grad=True needs gelu_in, the product of the forward pass")
    if accumulate and D is None:
        raise ValueError(f"accumulate={accumulate} without D; give the tensor that is added to")
    # beta = 0 ignores D's values, even NaN.
    beta = (1.0 if beta is None else beta) if accumulate else 0.0
    if D is not None:
        dtype = D.dtype
    else:
        dtype = A.dtype if output_dtype is None else torch_dtype(output_dtype)
    b, a = _operands(A, transA, B, transB)
    added = None if grad or bias is None or not bias.numel() else bias.view(-1)
    _check_extents(a, b, D, None if added is None else bias)
    _check_blocks(a, b, grad and bias is not None, split)
    steps = _AfterProduct(alpha, beta, added, gelu, gelu_in, grad)
    if exchange is not None:
        exchange.before_product(b.codes)
    plain_result = not gelu and alpha == 1.0 and not isinstance(D, QuantizedTensorStorage)
    compute: Any = _product if plain_result else _product_in_steps
    result, before = compute(a, b, D, dtype, split, steps)
    if isinstance(D, QuantizedTensorStorage):
        writer: Any = quantizer if quantizer is not None else D.writer()
        result = writer.update_quantized(result.view(D.shape), D)
    elif D is None:
        result = result.view(_shape(B, transB, result))
        result = result if quantizer is None else quantizer.quantize(result)
    else:
        result = D
    grad_bias = column_sums(plain_matrix(B), bias.dtype) if grad and bias is not None else None
    extra = None if exchange is None else exchange.after_product(result)
    return [result, grad_bias, gelu_in if grad else before, extra]


def _product(
    a: Operand, b: Operand, D: Tensor | None, dtype: torch.dtype, split: bool, steps: _AfterProduct
) -> tuple[Tensor, None]:
    """Compute b @ a.T + beta * D + bias in one product, into D if it is given."""
    if D is not None and steps.beta not in (0.0, 1.0):
        D.mul_(steps.beta)
    out = None if D is None else D.view(b.rows, a.rows)
    return gemm(b, a, Epilogue(dtype, steps.bias, out, steps.beta != 0.0, split)), None


def _product_in_steps(
    a: Operand, b: Operand, D: Any, dtype: torch.dtype, split: bool, steps: _AfterProduct
) -> tuple[Tensor, Tensor | None]:
    """Compute the result in float32 (float64 for a float64 result), rounded once; write a plain D.

    Returns:
        The result, and GELU's input in the forward pass.
    """
    wide = torch.promote_types(dtype, torch.float32)
    fused_bias = steps.bias if steps.alpha == 1.0 else None
    y = gemm(b, a, Epilogue(wide, fused_bias, out=None, accumulate=False, exact=split))
    if steps.alpha != 1.0:
        y = y * steps.alpha
        y = y if steps.bias is None else y + steps.bias
    if steps.beta != 0.0:
        accumulator = D.dequantize() if isinstance(D, QuantizedTensorStorage) else D
        y = y + steps.beta * accumulator.view(y.shape).to(wide)
    before = None
    if steps.gelu and steps.grad:
        assert steps.gelu_in is not None
        y = activation_backward("gelu", y, steps.gelu_in.view(y.shape).to(y.dtype))
    elif steps.gelu:
        before, y = y.to(dtype), activation_forward("gelu", y)
    y = y.to(dtype)
    if isinstance(D, Tensor) and not isinstance(D, QuantizedTensorStorage):
        D.copy_(y.view(D.shape))
    return y, before


def _check_kinds(A: Any, B: Any, D: Any, bias: Any, quantizer: Any, output_dtype: Any) -> None:
    """Raise TypeError unless the operands are floating-point matrices, quantized or not."""
    for name, operand in (("A", A), ("B", B)):
        if not isinstance(operand, QuantizedTensorStorage):
            floating(name, operand)
            with_axes(name, operand, 1)
    output_or_none("D", D, None)
    if bias is not None:
        floating("bias", bias)
    quantizer_or_none(quantizer)
    if output_dtype is not None:
        torch_dtype(output_dtype)


def _finite(name: str, value: Any) -> float:
    number = to_float(name, value)
    if not math.isfinite(number):
        raise ValueError(f"{name}={number} is not finite; give a finite number")
    return number


def _check_extents(a: Operand, b: Operand, D: Any, bias: Tensor | None) -> None:
    """Raise ValueError unless the product, D and the bias fit; called before D is written."""
    if a.depth != b.depth:
        raise ValueError(
            f"the operands contract {b.depth} and {a.depth} elements; give operands that agree, or another layout"
        )
    if D is not None and math.prod(D.shape) != b.rows * a.rows:
        raise ValueError(f"D is {list(D.shape)}; the product is {[b.rows, a.rows]}, give its shape")
    if bias is not None and tuple(bias.shape) not in ((a.rows,), (1, a.rows)):
        raise ValueError(
            f"the bias has shape {tuple(bias.shape)}; give [{a.rows}] or [1, {a.rows}]"
        )


def _check_blocks(a: Operand, b: Operand, sums_bias: bool, split: bool) -> None:
    """Raise RuntimeError for block-scaled operands whose product NVIDIA's engine rejects."""
    formats = a.format, b.format
    if not all(form in BLOCK_FORMATS.values() for form in formats):
        return
    squares = [BLOCK_FORMATS[True, powers] for powers in (False, True)]
    if not split:
        reason = "use_split_accumulator=False: their partial sums are always promoted; set it True"
    elif all(form in squares for form in formats):
        reason = "both have 128 x 128 blocks; quantize one with block_scaling_dim=1"
    elif sums_bias:
        reason = "grad=True with a bias; sum the gradient over its rows before it is quantized"
    elif a.rows % 16 or b.rows % 16 or a.depth % 16:
        reason = f"M={b.rows}, N={a.rows}, K={a.depth} are not all multiples of 16; pad them"
    else:
        return
    raise RuntimeError(f"a product of block-scaled operands: {reason}")


def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[Tensor] | None,
    D_type: DType | int | torch.dtype | None,
    m_splits: Sequence[int] | None,
    bias: Sequence[Tensor] | None,
    bias_type: DType | int | None,
    single_output: bool,
    pre_gelu_out: Sequence[Tensor] | None,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[Tensor | None]:
    """Multiply A[i] and B[i] into D[i], one after the other, each as in `generic_gemm`.

    Args:
        D: Results that are written; with `single_output` one tensor [sum of m_splits, ...] that holds all of them.
        m_splits: Rows per group, as any sequence of whole numbers.
        bias: A bias per product; entries without elements, and None, are ignored.
        pre_gelu_out: D[i] = gelu(product), and GELU's input is written here.
        D_type: Ignored, like workspaces, workspace_size and math_sm_count.

    Returns:
        The bias gradients with `grad=True`, None for products without a bias.

    Raises:
        ValueError: D is None, or the operands and results do not fit.
    """
    if D is None:
        raise ValueError(
            "D=None: the results are written; give a list of tensors, or one with single_output"
        )
    for name, given in (("A", A), ("B", B), ("D", D)):
        sequence(name, given)
    splits = [] if m_splits is None else to_ints("m_splits", m_splits)
    if bias is not None:
        sequence("bias", bias)
    for out in D:
        output_or_none("D holds a result that", out, None)
    for added in bias or ():
        tensor_or_none("bias holds a value that", added)
    outputs = list(D[0].split(splits)) if single_output else list(D)
    if not len(A) == len(B) == len(outputs):
        raise ValueError(f"{len(A)} A, {len(B)} B and {len(outputs)} results; give as many of each")
    for i, (left, right, out) in enumerate(zip(A, B, outputs, strict=True)):
        given = None if not bias or bias[i] is None or bias[i].numel() == 0 else bias[i]
        _check_kinds(left, right, out, given, quantizer=None, output_dtype=None)
        b, a = _operands(left, transa, right, transb)
        _check_extents(a, b, out, None if grad else given)
    gradients: list[Tensor | None] = []
    for i, (left, right, out) in enumerate(zip(A, B, outputs, strict=True)):
        before = None if not pre_gelu_out or pre_gelu_out[i].numel() == 0 else pre_gelu_out[i]
        given = None if not bias or bias[i] is None or bias[i].numel() == 0 else bias[i]
        options = (None, out.dtype, given, bias_type, before is not None, before, grad, None, 0)
        results = generic_gemm(
            left, transa, right, transb, out, *options, accumulate, use_split_accumulator
        )
        if before is not None and not grad:
            before.copy_(results[2].view(before.shape))
        gradients.append(results[1])
    return gradients


def _operands(A: Any, transA: bool, B: Any, transB: bool) -> tuple[Operand, Operand]:
    """Arrange operands (b, a) with D = b @ a.T; plain matrices with two dtypes are converted to the wider one."""
    b, a = (
        _operand(B, COLUMNWISE if transB else ROWWISE),
        _operand(A, ROWWISE if transA else COLUMNWISE),
    )
    if a.format is None and b.format is None and a.codes.dtype != b.codes.dtype:
        wide = torch.promote_types(a.codes.dtype, b.codes.dtype)
        a, b = plain(a.codes.to(wide)), plain(b.codes.to(wide))
    return b, a


def _operand(x: Any, direction: str) -> Operand:
    if isinstance(x, QuantizedTensorStorage):
        return x.contract(direction)
    matrix = plain_matrix(x)
    return plain(matrix if direction == ROWWISE else matrix.t())


def _shape(B: Any, transB: bool, product: Tensor) -> tuple[int, ...]:
    """Shape for a new D: with B's leading axes, unless the product contracts them."""
    return tuple(product.shape) if transB else (*B.size()[:-1], product.shape[-1])
