"""Products, activations and casts of GroupedTensors under the extension's names; each is a loop over the matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor
from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

from .activation import scaled_clamped_swiglu, scaled_swiglu
from .cast import torch_dtype
from .gemm import generic_gemm
from .group_cast import Extents, group_quantize

__all__ = [
    "group_requantize_inplace",
    "group_scaled_clamped_swiglu",
    "group_scaled_swiglu",
    "multi_tensor_pad_last_dim",
    "multi_tensor_transpose_to_bhsd",
    "te_general_grouped_gemm_for_discrete_in",
    "te_general_grouped_gemm_for_discrete_out",
    "te_general_grouped_gemm_for_grouped_tensor",
]

Group = GroupedTensorStorage | Sequence[Any]


def _members(group: Group) -> list[Any]:
    return group.members() if isinstance(group, GroupedTensorStorage) else list(group)


def _products(
    A: Group,
    transa: bool,
    B: Group,
    transb: bool,
    D: Group,
    bias: GroupedTensorStorage | None,
    bias_scale: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    use_split_accumulator: bool,
) -> Any:
    """Compute D[i] = alpha[i] * product(A[i], B[i]) + beta[i] * D[i] + bias[i] * scale in place, group by group."""
    left, right, results = _members(A), _members(B), _members(D)
    if not len(left) == len(right) == len(results) == alpha.numel() == beta.numel():
        raise ValueError(
            f"{len(left)} A, {len(right)} B, {len(results)} results, {alpha.numel()} alpha and {beta.numel()} beta; "
            "give as many of each"
        )
    biases = [None] * len(results) if bias is None else _members(bias)
    start = 0
    for i, (a, b, out, added) in enumerate(zip(left, right, results, biases, strict=True)):
        rows = out.shape[0]
        if out.numel():
            y = generic_gemm(
                a,
                transa,
                b,
                transb,
                D=None,
                quantizer=None,
                output_dtype=torch.float32,
                bias=None,
                bias_type=None,
                gelu=False,
                gelu_in=None,
                grad=False,
                workspace=None,
                workspace_size=0,
                accumulate=False,
                use_split_accumulator=use_split_accumulator,
            )[0]
            y = y * alpha.reshape(-1)[i] + torch.where(
                beta.reshape(-1)[i] == 0, 0.0, beta.reshape(-1)[i] * out.float()
            )
            if added is not None:
                scales = (
                    1.0
                    if bias_scale is None
                    else bias_scale.reshape(-1)[start : start + rows, None].float()
                )
                y = y + added.float().reshape(1, -1) * scales
            with torch.no_grad():
                out.copy_(y)
        start += rows
    return D


def te_general_grouped_gemm_for_grouped_tensor(
    A: GroupedTensorStorage,
    transa: bool,
    B: GroupedTensorStorage,
    transb: bool,
    D: GroupedTensorStorage,
    bias: GroupedTensorStorage | None,
    bias_scale: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    workspace_setup: Any = None,
    workspace_cublas: Any = None,
    use_split_accumulator: bool = False,
    math_sm_count: int = 0,
) -> Any:
    """Compute D_i = alpha_i * product of A_i and B_i + beta_i * D_i + bias_i * bias_scale, as `generic_gemm` does.

    Args:
        A: Left operands in NVIDIA's column-major convention.
        transa: See `generic_gemm`.
        B: Right operands.
        transb: See `generic_gemm`.
        D: Plain matrices that receive the results.
        bias: One vector [N] per matrix, or None.
        bias_scale: Bias factor for each row in all matrices, or None.
        alpha: Factors float32 [n].
        beta: Factors float32 [n] for D's present values; 0 ignores them.
        workspace_setup: Has no effect.
        workspace_cublas: Has no effect.
        use_split_accumulator: See `generic_gemm`.
        math_sm_count: Has no effect.

    Returns:
        D.
    """
    return _products(A, transa, B, transb, D, bias, bias_scale, alpha, beta, use_split_accumulator)


# A, or D, is a matrix list instead of a GroupedTensor.
te_general_grouped_gemm_for_discrete_in = te_general_grouped_gemm_for_grouped_tensor
te_general_grouped_gemm_for_discrete_out = te_general_grouped_gemm_for_grouped_tensor


def group_requantize_inplace(
    grouped_x: GroupedTensorStorage,
    quantizer: Any,
    num_tensors: int,
    first_dims: Extents,
    otype: Any,
    tensor_offsets: Tensor | None = None,
    return_dequantized: bool = False,
) -> Tensor | None:
    """Add column-wise codes to a group that has row-wise codes, computed from the decoded values, in place.

    Args:
        grouped_x: Group with row-wise codes.
        quantizer: Quantizer for the column-wise codes.
        num_tensors: Number of matrices.
        first_dims: Has no effect: the group has its extents.
        otype: Dtype for the decoded values.
        tensor_offsets: Has no effect.
        return_dequantized: Return the decoded values.

    Returns:
        The decoded values [total rows, K], or None.

    Raises:
        ValueError: The group has another number of matrices, or no row-wise codes.
    """
    if grouped_x.num_tensors != num_tensors or not grouped_x.has_data():
        raise ValueError(
            f"grouped_x has {grouped_x.num_tensors} matrices, row-wise codes: {grouped_x.has_data()}; give row-wise "
            f"codes of num_tensors={num_tensors} matrices"
        )
    columns = _columnwise(quantizer)
    members, decoded = [], []
    for member in grouped_x.members():
        values = member.decode(torch_dtype(otype))
        fresh = columns.encode(values, False, True)
        for name in member.COLUMNWISE:
            setattr(member, name, getattr(fresh, name))
        members.append(member)
        decoded.append(values)
    requantized = GroupedTensorStorage.of(members, grouped_x.writer(), grouped_x.get_dtype())
    extents = ("first_dims", "last_dims", "tensor_offsets")
    for name in (*GroupedTensorStorage.TENSORS, "_layout"):
        if name not in extents:
            setattr(grouped_x, name, getattr(requantized, name))
    return (
        torch.cat([values.reshape(-1, values.shape[-1]) for values in decoded])
        if return_dequantized
        else None
    )


def _columnwise(quantizer: Any) -> Any:
    columns = quantizer.copy()
    columns.set_usage(rowwise=False, columnwise=True)
    return columns


def group_scaled_swiglu(
    input_2h: Tensor,
    prob: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Extents = None,
    last_dims: Extents = None,
    tensor_offsets: Tensor | None = None,
) -> GroupedTensor:
    """Column-wise codes for `scaled_swiglu(input_2h, prob)`, by group.

    Args:
        input_2h: Values [rows, 2 H].
        prob: Scale per row.
        quantizer: Quantizer for every matrix.
        num_tensors: Number of matrices.
        first_dims: Rows of each matrix; None if they are equal.
        last_dims: Columns of each matrix; None if they are equal.
        tensor_offsets: First element of each matrix and the end, int64 [num_tensors + 1].
    """
    values = scaled_swiglu(input_2h, prob, None)
    return group_quantize(
        values, _columnwise(quantizer), num_tensors, first_dims, last_dims, tensor_offsets
    )


def group_scaled_clamped_swiglu(
    input_2h: Tensor,
    prob: Tensor,
    quantizer: Any,
    num_tensors: int,
    limit: float,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    first_dims: Extents = None,
    last_dims: Extents = None,
    tensor_offsets: Tensor | None = None,
) -> GroupedTensor:
    """Column-wise codes for `scaled_clamped_swiglu(input_2h, prob)`, by group.

    Args:
        limit: Bound for both halves; see `scaled_clamped_swiglu`.
        alpha: Factor in the sigmoid.
        glu_linear_offset: Number that is added to the linear half.

    The other arguments are as in `group_scaled_swiglu`.
    """
    values = scaled_clamped_swiglu(input_2h, prob, None, limit, alpha, glu_linear_offset)
    return group_quantize(
        values, _columnwise(quantizer), num_tensors, first_dims, last_dims, tensor_offsets
    )


def multi_tensor_transpose_to_bhsd(
    inputs: Sequence[Tensor], original_format: Any, outputs: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Transpose tensors in layout sbhd or bshd to bhsd.

    Args:
        inputs: Tensors [s, b, h, d] or [b, s, h, d].
        original_format: "sbhd" or "bshd", or the member of NVTE_QKV_Format.
        outputs: Tensors that receive the results; allocated if empty.
    """
    name = getattr(original_format, "name", str(original_format)).lower().replace("nvte_", "")
    orders = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
    if name not in orders:
        raise ValueError(f"original_format={original_format!r}; give sbhd or bshd")
    turned = [x.permute(orders[name]) for x in inputs]
    if not outputs:
        return [x.contiguous() for x in turned]
    return [out.copy_(x) for out, x in zip(outputs, turned, strict=True)]


def multi_tensor_pad_last_dim(inputs: Sequence[Tensor], alignment: int) -> list[Tensor]:
    """Zero-pad the tensors' last dimension to a multiple of `alignment`.

    Args:
        inputs: Tensors [.., K].
        alignment: Divisor of the results' last dimension.

    Returns:
        A tensor for each input; an input that needs no padding is returned unchanged.
    """
    return [
        torch.nn.functional.pad(x, (0, -x.shape[-1] % alignment)) if x.shape[-1] % alignment else x
        for x in inputs
    ]


def is_row_scaled(group: Group) -> bool:
    """Whether a group has NVFP4 codes with a maximum per row."""
    members = [group] if isinstance(group, GroupedTensorStorage) else list(group)
    return any(
        getattr(m, "row_scaled_nvfp4", getattr(m, "_row_scaled_nvfp4", False)) for m in members
    )
