"""`general_gemm` and `general_grouped_gemm`: products in linear layers, by layout name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import transformer_engine_torch as tex
from transformer_engine_torch.checks import sequence
from transformer_engine_torch.grouped_products import is_row_scaled

from ...common.checks import check_option, described
from ...common.numbers import to_bool, to_ints
from ..primitives.gemm.cublaslt_library import WORKSPACE_BYTES
from ..runtime.checks import tensor_or_none
from ..runtime.warn_once import warn_once
from ..tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

# (transpose A, transpose B); see transformer_engine_torch.generic_gemm.
LAYOUTS = {"TN": (True, False), "NN": (False, False), "NT": (False, True)}


def get_cublas_workspace_size_bytes() -> int:
    """Return the scratch memory size that a cuBLASLt product may use."""
    return WORKSPACE_BYTES


def general_gemm(
    A: Any,
    B: Any,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    workspace: Tensor | None = None,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """Multiply plain or quantized matrices.

    Args:
        layout: "TN": out [M, N] = B [M, K] A[N, K].T; "NN": out [M, K] = B [M, N] A [N, K];
            "NT": out [N, K] = B[M, N].T A [M, K].
        quantization_params: Result quantizer.
        use_split_accumulator: Has no effect on operands in 128-element blocks, whose partial sums are always promoted.
        ub: `comm_overlap` of `generic_gemm`.
        ub_type: `comm_type` of `generic_gemm`; requires `ub`.

    The other arguments are as in `transformer_engine_torch.generic_gemm`.

    Returns:
        `(out, bias gradient, GELU's input, extra_output)`.
    """
    if ub is None and ub_type is not None:
        raise ValueError(
            f"ub_type={described(ub_type)} without ub; give the buffer, or leave both out"
        )
    trans_a, trans_b = _transposes(layout)
    results = tex.generic_gemm(
        A,
        trans_a,
        B,
        trans_b,
        out,
        quantization_params,
        out_dtype,
        bias,
        None,
        gelu,
        gelu_in,
        grad,
        workspace,
        0,
        accumulate,
        use_split_accumulator or _in_blocks(A) or _in_blocks(B),
        comm_overlap=ub,
        comm_type=ub_type,
        extra_output=extra_output,
        bulk_overlap=bulk_overlap,
        alpha=alpha,
        beta=beta,
    )
    return results[0], results[1], results[2], results[3]


def general_grouped_gemm(
    A: Sequence[Any],
    B: Sequence[Any],
    out: Sequence[Tensor],
    quantization_params: Sequence[Any] | None = None,
    out_dtype: torch.dtype | None = None,
    layout: str = "TN",
    m_splits: Sequence[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: Sequence[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: torch.dtype | None = None,
    single_output: bool = False,
) -> tuple[Sequence[Tensor], Sequence[Tensor | None] | None, list[Tensor] | None]:
    """Compute the products of A[i] and B[i] in the layout of `general_gemm`.

    Args:
        out: Written: a tensor for each product, or with `single_output` one [sum of m_splits, ...].
        quantization_params: Has no effect, as in NVIDIA's engine: the results are written unquantized.
        out_dtype, D_dtype: Ignored: the results have the dtype of `out`.
        m_splits: Rows per group, in any whole-number sequence.
        bias, use_bias: Forward: [N] per product. With `grad=True` the bias gradients are computed,
            in their dtype or `out`'s.

    Returns:
        `(out, bias gradients or the biases, GELU's inputs)`.
    """
    trans_a, trans_b = _transposes(layout)
    gelu, grad, use_bias = (
        to_bool("gelu", gelu),
        to_bool("grad", grad),
        to_bool("use_bias", use_bias),
    )
    accumulate = to_bool("accumulate", accumulate)
    for name, value in (("A", A), ("B", B), ("out", out)):
        sequence(name, value)
    if bias is not None:
        sequence("bias", bias)
        for value in bias:
            tensor_or_none("bias holds a value that", value)
    if quantization_params is not None and any(q is not None for q in quantization_params):
        warn_once(
            "general_grouped_gemm(quantization_params=)",
            "general_grouped_gemm ignores quantization_params: the results are written unquantized; quantize them "
            "afterwards",
        )
    if gelu and grad:
        raise NotImplementedError(
            "gelu=True with grad=True; multiply by GELU's derivative afterwards"
        )
    if use_bias and bias is None:
        if not grad:
            raise ValueError(f"use_bias={use_bias} with bias=None; give one [N] for each product")
        bias = [out[0].new_empty(B[0].shape[-1]) for _ in B]
    before = None
    if gelu:
        splits = [] if m_splits is None else to_ints("m_splits", m_splits)
        parts = out[0].split(splits) if single_output else out
        before = [torch.empty_like(part) for part in parts]
    gradients = tex.te_general_grouped_gemm(
        A,
        trans_a,
        B,
        trans_b,
        out,
        D_dtype or out_dtype,
        m_splits,
        bias if use_bias else None,
        None,
        single_output,
        before,
        grad,
        None,
        0,
        accumulate,
        use_split_accumulator or any(_in_blocks(matrix) for matrix in (*A, *B)),
        0,
    )
    return out, gradients if grad and use_bias else bias, before


def general_grouped_gemm_for_grouped_tensor(
    A: Any,
    B: Any,
    out: Any,
    *,
    layout: str = "TN",
    accumulate: bool = False,
    use_split_accumulator: bool = False,
    bias: Any = None,
    bias_scale: Tensor | None = None,
    grad: bool = False,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
) -> Any:
    """Compute out_i = alpha_i * (A_i B_i product) + beta_i * out_i + bias_i * bias_scale, for GroupedTensors.

    Args:
        A: GroupedTensor, or a matrix list.
        B: GroupedTensor.
        out: GroupedTensor of plain matrices, or a list of them, unless A is a list.
        layout: "TN", "NN" or "NT", as in `general_gemm`.
        accumulate: Default for beta: ones instead of zeros.
        use_split_accumulator: See `general_gemm`; on for operands in FP8 blocks.
        bias: GroupedTensor with one vector [N] per matrix.
        bias_scale: Bias factor per row.
        grad: Must be False.
        alpha: float32 [n], by default ones.
        beta: float32 [n].

    Returns:
        `out`.

    Raises:
        NotImplementedError: `grad` is True, or an operand is NVFP4 with a scale per row.
        ValueError: A and out are lists, `bias` is given with a list `out`, or `bias_scale` without `bias`.
    """
    if grad:
        raise NotImplementedError(
            "grad=True; compute the gradient of the bias with tex.bgrad_group_quantize"
        )
    if any(is_row_scaled(group) for group in (A, B)):
        raise NotImplementedError("operands are NVFP4 with a scale per row; multiply their members")
    lists = [isinstance(group, (list, tuple)) for group in (A, out)]
    if all(lists):
        raise ValueError(
            "A and out are both lists; give at least one GroupedTensor, or call general_grouped_gemm"
        )
    if bias is not None and lists[1]:
        raise ValueError("bias with a list of results is unsupported; give out as a GroupedTensor")
    if bias_scale is not None and bias is None:
        raise ValueError(
            "bias_scale without bias has nothing to multiply; give bias, or leave bias_scale None"
        )
    trans_a, trans_b = _transposes(layout)
    count = len(A) if lists[0] else A.num_tensors
    device = B.device
    alpha = torch.ones(count, dtype=torch.float32, device=device) if alpha is None else alpha
    if beta is None:
        beta = torch.full((count,), float(accumulate), dtype=torch.float32, device=device)
    split = use_split_accumulator or any(
        map(_in_blocks, [*(A if lists[0] else A.members()), *B.members()])
    )
    arguments = (A, trans_a, B, trans_b, out, bias, bias_scale, alpha, beta, None, None, split, 0)
    if lists[0]:
        return tex.te_general_grouped_gemm_for_discrete_in(*arguments)
    if lists[1]:
        return tex.te_general_grouped_gemm_for_discrete_out(*arguments)
    return tex.te_general_grouped_gemm_for_grouped_tensor(*arguments)


def _in_blocks(matrix: Any) -> bool:
    return isinstance(matrix, Float8BlockwiseQTensorStorage)


def _transposes(layout: str) -> tuple[bool, bool]:
    check_option("layout", layout, LAYOUTS)
    return LAYOUTS[layout]
