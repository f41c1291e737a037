"""Products under the names of the extension: plain or quantized matrices in, the original's column-major letters read.

A product is named by what is transposed of A and B where rows are contiguous: D = op(B) op(A).
transA, not transB  ("TN")  D [M, N] = B [M, K] A[N, K].T   the forward pass: A the weight, B the input
neither             ("NN")  D [M, K] = B [M, N] A[N, K]     the input's gradient: B the gradient of the output
transB              ("NT")  D [N, K] = B[M, N].T A[M, K]    the weight's gradient: A the input, B the gradient
both                ("TT")  D [N, J] = B[M, N].T A[J, M].T  of no layer: each operand along its other axis
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.checks import described, number, number_or_none, switch, whole_numbers
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.primitives.activation import activation_backward, activation_forward
from transformer_engine.pytorch.primitives.column_sums import column_sums
from transformer_engine.pytorch.primitives.gemm import Epilogue, gemm
from transformer_engine.pytorch.primitives.operand import Operand, plain
from transformer_engine.pytorch.runtime.checks import floating, tensor_or_none
from transformer_engine.pytorch.tensor.axis import COLS, ROWS
from transformer_engine.pytorch.tensor.storage.quantized_tensor_storage import (
    QuantizedTensorStorage,
    plain_matrix,
)

from .cast import torch_dtype
from .checks import output_or_none, quantizer_or_none, sequence, with_axes


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Tensor | None,
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
    """[D, bias gradient | None, GELU's input | None, None]: D = alpha op(B) op(A) (+ beta D), see above.

    output_dtype   of a fresh D; None: that of D, else of A
    bias           forward (grad=False): [N] or [1, N], added. Else it has the dtype of its gradient, B's sum over rows
    gelu           forward: D = gelu(product), tanh approximation, and the third result is the product. Backward: the
                   product times gelu's derivative at gelu_in
    beta           what D is multiplied by before the product is added, with accumulate; None: 1
    quantizer      makes D a quantized tensor
    bias_type, workspace and workspace_size are accepted, nothing needs them; userbuffers are refused.
    Operands in blocks of 128 raise RuntimeError where the library has no product of them: without
    use_split_accumulator, two of 128 x 128, extents that are no multiples of 16, and some epilogues.
    """
    _refuse_userbuffers(comm_overlap, comm_type, extra_output, bulk_overlap)
    _check_kinds(A, B, D, bias, quantizer, output_dtype)
    _check_settings(gelu=gelu, grad=grad, accumulate=accumulate, use_split_accumulator=use_split_accumulator)
    number("alpha", alpha)
    number_or_none("beta", beta)
    if beta not in (None, 0.0) and not accumulate:
        raise ValueError(f"beta={beta} without accumulate; set accumulate=True, or leave beta None")
    if quantizer is not None and (D is not None or accumulate):
        raise NotImplementedError(
            "a quantizer with D or accumulate; give D to quantizer.quantize(out=) yourself"
        )
    if gelu and grad and gelu_in is None:
        raise ValueError("gelu=True with grad=True needs gelu_in, the product of the forward pass")
    if accumulate and D is None:
        raise ValueError(f"accumulate={accumulate} without D; give the tensor that is added to")
    accumulate = accumulate and beta != 0.0  # what D holds does not matter then, be it NaN
    dtype = _output_dtype(A, D, output_dtype)
    b, a = _operands(A, transA, B, transB)
    added = bias if bias is not None and not grad else None
    if added is not None and added.shape == (1, a.rows):
        added = added[0]
    _check_extents(a, b, D, added)
    _check_blocks(a, b, gelu and accumulate, grad and bias is not None, use_split_accumulator)
    if accumulate and D is not None and beta not in (None, 1.0):
        D.mul_(beta)
    fused = not gelu and alpha == 1.0
    epilogue = Epilogue(
        dtype if fused else torch.promote_types(dtype, torch.float32),
        added if alpha == 1.0 else None,
        None if D is None or not fused else D.view(b.rows, a.rows),
        accumulate and fused,
        use_split_accumulator,
    )
    made = gemm(b, a, epilogue)
    before = None
    if not fused:
        made, before = _finished(made, alpha, added, gelu, grad, gelu_in, dtype)
        if D is not None:
            made = D.add_(made.view(D.shape)) if accumulate else D.copy_(made.view(D.shape))
    result: Any = made.view(_shape(B, transB, made)) if D is None else D
    if quantizer is not None:
        result = quantizer.quantize(result)
    grad_bias = column_sums(plain_matrix(B), bias.dtype) if grad and bias is not None else None
    return [result, grad_bias, gelu_in if grad else before, None]


def _check_kinds(A: Any, B: Any, D: Any, bias: Any, quantizer: Any, output_dtype: Any) -> None:
    """TypeError unless the operands are matrices of floating-point values, quantized or not."""
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


def _check_settings(**switches: Any) -> None:
    for name, value in switches.items():
        switch(name, value)


def _check_extents(a: Operand, b: Operand, D: Tensor | None, bias: Tensor | None) -> None:
    """Before D is scaled: ValueError where the product, D and the bias do not fit."""
    if a.depth != b.depth:
        raise ValueError(
            f"the operands contract {b.depth} and {a.depth} elements; give operands that agree, or another layout"
        )
    if D is not None and D.numel() != b.rows * a.rows:
        raise ValueError(f"D is {list(D.shape)}; the product is {[b.rows, a.rows]}, give its shape")
    if bias is not None and bias.shape != (a.rows,):
        raise ValueError(f"the bias has shape {tuple(bias.shape)}; it must be ({a.rows},)")


def _check_blocks(a: Operand, b: Operand, adds_gelu: bool, sums_bias: bool, split: bool) -> None:
    """RuntimeError for a product of block-scaled operands that the original's kernel refuses, before D is scaled."""
    blocks = (BLOCK_1D, BLOCK_2D)
    if a.format not in blocks or b.format not in blocks:
        return
    if not split:
        reason = "use_split_accumulator=False: their partial sums are always promoted; set it True"
    elif a.format == b.format == BLOCK_2D:
        reason = "both have 128 x 128 blocks; quantize one with block_scaling_dim=1"
    elif adds_gelu:
        reason = "gelu=True with accumulate=True; add the result to D afterwards"
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
    """The bias gradients (grad=True) of products D[i] of A[i] and B[i], each as generic_gemm makes it.

    D              results to be written, or with single_output one tensor [sum of m_splits, ..] of all of them
    pre_gelu_out   D[i] = gelu(product), and the product is written here
    bias           an entry without elements is none
    Plain loops: every product has the bits of a product alone. workspaces and math_sm_count are accepted.
    """
    if D is None:
        raise ValueError("D=None: the results are written; give a list of tensors, or one with single_output")
    for name, given in (("A", A), ("B", B), ("D", D)):
        sequence(name, given)
    if m_splits is not None:
        whole_numbers("m_splits", m_splits)
    if bias is not None:
        sequence("bias", bias)
    for out in D:
        output_or_none("D holds a result that", out, None)
    for added in bias or ():
        tensor_or_none("bias holds a value that", added)
    outputs = list(D[0].split(list(m_splits or ()))) if single_output else list(D)
    if not len(A) == len(B) == len(outputs):
        raise ValueError(f"{len(A)} A, {len(B)} B and {len(outputs)} results; give as many of each")
    for i, (left, right, out) in enumerate(zip(A, B, outputs, strict=True)):
        given = None if not bias or bias[i] is None or bias[i].numel() == 0 else bias[i]
        _check_kinds(left, right, out, given, None, None)
        b, a = _operands(left, transa, right, transb)
        _check_extents(a, b, out, None if grad else given)
    gradients: list[Tensor | None] = []
    for i, (left, right, out) in enumerate(zip(A, B, outputs, strict=True)):
        before = None if not pre_gelu_out or pre_gelu_out[i].numel() == 0 else pre_gelu_out[i]
        given = None if not bias or bias[i] is None or bias[i].numel() == 0 else bias[i]
        options = (None, out.dtype, given, bias_type, before is not None, before, grad, None, 0)
        done = generic_gemm(left, transa, right, transb, out, *options, accumulate, use_split_accumulator)
        if before is not None and not grad:
            before.copy_(done[2].view(before.shape))
        gradients.append(done[1])
    return gradients


def _refuse_userbuffers(
    comm_overlap: Any, comm_type: Any, extra_output: Tensor | None, bulk_overlap: bool
) -> None:
    given = {"comm_overlap": comm_overlap, "comm_type": comm_type, "extra_output": extra_output}
    named = {name: value for name, value in given.items() if value is not None}
    if bulk_overlap:
        named["bulk_overlap"] = bulk_overlap
    if named:
        values = ", ".join(described(value) for value in named.values())
        raise NotImplementedError(
            f"{', '.join(named)}: products do not overlap communication here; leave out {values}, and communicate "
            "before or after the product"
        )


def _output_dtype(A: Any, D: Tensor | None, asked: DType | int | torch.dtype | None) -> torch.dtype:
    if D is not None:
        return D.dtype
    return A.dtype if asked is None else torch_dtype(asked)


def _operands(A: Any, transA: bool, B: Any, transB: bool) -> tuple[Operand, Operand]:
    """(b, a) with D = b @ a.T; plain matrices of two dtypes meet in the wider one."""
    b, a = _operand(B, ROWS if transB else COLS), _operand(A, COLS if transA else ROWS)
    if a.format is None and b.format is None and a.codes.dtype != b.codes.dtype:
        wide = torch.promote_types(a.codes.dtype, b.codes.dtype)
        a, b = plain(a.codes.to(wide)), plain(b.codes.to(wide))
    return b, a


def _operand(x: Any, axis: str) -> Operand:
    if isinstance(x, QuantizedTensorStorage):
        return x.contract(axis)
    matrix = plain_matrix(x)
    return plain(matrix if axis == COLS else matrix.t())


def _finished(
    product: Tensor,
    alpha: float,
    bias: Tensor | None,
    gelu: bool,
    grad: bool,
    gelu_in: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """What a product that is scaled, or goes through GELU, becomes, and GELU's input in the forward pass."""
    if alpha != 1.0:
        product = product * alpha
        product = product if bias is None else product + bias
    if not gelu:
        return product.to(dtype), None
    if not grad:
        return activation_forward("gelu", product).to(dtype), product.to(dtype)
    assert gelu_in is not None
    return activation_backward("gelu", product, gelu_in.view(product.shape).to(product.dtype)).to(dtype), None


def _shape(B: Any, transB: bool, made: Tensor) -> tuple[int, ...]:
    """The leading axes of B come back in D, unless they were summed over."""
    return tuple(made.shape) if transB else (*B.size()[:-1], made.shape[-1])
