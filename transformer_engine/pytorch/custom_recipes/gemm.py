"""Products of custom quantizers' tensors, computed by the quantizers' `qgemm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common import absent
from ...common.checks import described
from ..tensor.custom_operand import GEMMType, MMParams

__all__ = ["GEMMType", "MMParams", "custom_gemm"]

absent.install_getter(__name__)

# Product layout and whether a gradient is computed: the linear layer product.
_KINDS = {"NN": GEMMType.DGRAD, "NT": GEMMType.WGRAD}


def custom_gemm(
    A: Any,
    B: Any,
    workspace: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
) -> tuple[Tensor, None, None, None]:
    """Compute a linear layer product whose operands come from custom quantizers.

    Args:
        A: "TN" and "NN": the weight [N, K]. "NT": the input [M, K].
        B: "TN": the input [.., K]. "NN" and "NT": the output gradient [M, N].
        workspace: Has no effect.
        out_dtype: Result dtype; by default the first operand's.
        quantization_params: Must be None.
        gelu: Must be False.
        gelu_in: Must be None.
        accumulate: Add to `out`.
        layout: "TN" multiplies B by A transposed, "NN" B by A, "NT" B transposed by A.
        out: Tensor that receives the result.
        bias: Bias [N], only with "TN".
        use_split_accumulator: Passed to `qgemm` in MMParams.
        grad: Has no effect: the layout determines the product.

    Returns:
        `(result, None, None, None)`: [.., N], [M, K] or [N, K].

    Raises:
        TypeError: An operand is not a custom tensor.
        ValueError: No operand has a quantizer, an operand lacks a direction, or the options are unsupported.
    """
    for name, operand in (("A", A), ("B", B)):
        if not getattr(operand, "custom", False):
            raise TypeError(f"{name}={described(operand)} is not a custom tensor; use general_gemm")
    if quantization_params is not None or gelu or gelu_in is not None:
        raise ValueError(
            "custom_gemm has no GELU and no quantized result; apply them to its result"
        )
    kind = _KINDS.get(layout, GEMMType.FPROP)
    if bias is not None and kind is not GEMMType.FPROP:
        raise ValueError(f"bias is only added with layout='TN', not with {layout!r}; leave it out")
    quantizer = getattr(A, "_quantizer", None) or getattr(B, "_quantizer", None)
    if quantizer is None:
        raise ValueError(
            "neither A nor B has a quantizer; quantize them with one that has a method qgemm"
        )
    # result = x @ w.T, both contracted along their last axis: column-wise data is stored transposed.
    x_columns, w_columns = kind is GEMMType.WGRAD, kind is not GEMMType.FPROP
    x, x_scale = (B.data_t, B.scale_t) if x_columns else (B.data, B.scale)
    w, w_scale = (A.data_t, A.scale_t) if w_columns else (A.data, A.scale)
    for name, value in (("B", x), ("A", w)):
        if value is None:
            raise ValueError(
                f"{name} lacks the direction that layout={layout!r} reads; enable it in its quantizer"
            )
    dtype = out_dtype if out_dtype is not None else getattr(A, "dtype", torch.float32)
    params = MMParams(dtype, use_split_accumulator)
    product = quantizer.qgemm(
        x, w, params, dtype, x_scale, w_scale, bias, gemm_type=kind, qresult_x=B, qresult_w=A
    )
    if kind is GEMMType.FPROP and len(B.size()) > 2:
        product = product.view(*B.size()[:-1], product.shape[-1])
    if out is not None:
        product = out.add_(product) if accumulate else out.copy_(product)
    return product, None, None, None
