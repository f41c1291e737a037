"""NVFP4 by the reference backend: a quantizer whose tensors and products are literal PyTorch operations.

`NVFP4QuantizerRef` has the arithmetic of `te.NVFP4Quantizer` with the same settings, always in the
reference backend, and multiplies decoded codes in float32. Rounding is to nearest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common import absent
from ...common.formats import E4M3
from ..primitives.quantize import (
    cast,
    decode_e2m1,
    e8m0_from_float,
    encode_e2m1,
    pack_fp4,
    unpack_fp4,
)
from ..primitives.quantize.format_row import QuantizeInputs
from ..primitives.quantize.formats import FORMATS
from ..quantization.roles import QuantizerRole
from ..tensor.custom_operand import GEMMType
from ..tensor.nvfp4_tensor import NVFP4Quantizer
from ..tensor.quantizer import Quantizer
from .reference_current_scaling import CurrentScalingTensorRef

__all__ = [
    "NVFP4QuantizerRef",
    "NVFP4TensorRef",
    "cast_from_fp4x2",
    "cast_to_e4m3",
    "cast_to_e8",
    "cast_to_fp4x2",
    "get_wgrad_sign_vector",
    "high_precision_gemm_ref",
    "nvfp4_ref_rht_2d_factory",
    "nvfp4_ref_rht_2d_quantizer_factory",
]

absent.install_getter(__name__)

_BLOCK = 16


def cast_to_fp4x2(x: Tensor) -> Tensor:
    """Cast values [.., K] to the nearest FP4 codes, two per byte: uint8 [.., K / 2]; ties go to the even code.

    Args:
        x: Values [.., K]; K is even.
    """
    return pack_fp4(encode_e2m1(x.float()))


def cast_from_fp4x2(x: Tensor, dq_dtype: torch.dtype) -> Tensor:
    """Decode FP4 codes uint8 [.., K / 2] to values [.., K].

    Args:
        x: Codes, two in a byte, uint8 [.., K / 2].
        dq_dtype: Value dtype.
    """
    return decode_e2m1(unpack_fp4(x)).to(dq_dtype)


def cast_to_e8(decode_scale: Tensor) -> Tensor:
    """Return exponent bytes for the smallest powers of two that are not below float32 scales.

    Args:
        decode_scale: Scales, float32.
    """
    return e8m0_from_float(decode_scale.float())


def cast_to_e4m3(decode_scale: Tensor, global_amax: Tensor) -> Tensor:
    """Return block scales decode_scale * 448 * 6 / global_amax in E4M3, nearest, at most 448.

    Args:
        decode_scale: max|x| / 6 per block, float32.
        global_amax: max|x| over the tensor, float32 [1].
    """
    return cast(decode_scale.float() * (E4M3.maximum * 6.0 / global_amax.float()), E4M3)


def get_wgrad_sign_vector() -> Tensor:
    """Return the signs [16] by which the Hadamard transform multiplies a group, float32."""
    signs = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
    return torch.tensor(signs, dtype=torch.float32, device="cpu")


def high_precision_gemm_ref(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    accumulate: bool = False,
    is_a_transposed: bool = False,
    is_b_transposed: bool = False,
    out: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute a @ b in float32.

    Args:
        a: [M, K], or [K, M] with `is_a_transposed`.
        b: [K, N], or [N, K] with `is_b_transposed`.
        out_dtype: Result dtype.
        accumulate: Add the product to `out`.
        is_a_transposed: `a` is transposed first.
        is_b_transposed: `b` is transposed first.
        out: Tensor [M, N] that receives the result.
        bias: Bias [N].
    """
    left = a.float().t() if is_a_transposed else a.float()
    right = b.float().t() if is_b_transposed else b.float()
    product = left @ right if bias is None else left @ right + bias.float()
    if out is None:
        return product.to(out_dtype)
    return out.copy_(out.float() + product) if accumulate else out.copy_(product)


class NVFP4TensorRef(CurrentScalingTensorRef):
    """FP4 codes uint8 [M, K / 2], block scales E4M3 [M, K / 16] and maxima in one or both directions.

    The column direction has the codes of the transposed matrix. `global_amax_row` is float32 [1],
    or [M] with a scale per row, and `global_amax_col` float32 [1].
    """

    TENSORS = CurrentScalingTensorRef.TENSORS | {
        "global_amax_row": "global_amax_row",
        "global_amax_col": "global_amax_col",
    }
    ROWWISE = ("data", "scale", "global_amax_row")
    COLUMNWISE = ("data_t", "scale_t", "global_amax_col")
    global_amax_row: Tensor | None = None
    global_amax_col: Tensor | None = None

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Decode the row direction, or an untransformed column direction, to values [.., K].

        Raises:
            ValueError: The tensor has only a column direction after a Hadamard transform.
        """
        quantizer: Any = self._quantizer
        if self.data is not None:
            values = quantizer.decoded(self.data, self.scale, self.global_amax_row)
        elif quantizer.inner.with_rht:
            raise ValueError(
                "the column direction holds transformed values; quantize with rowwise=True"
            )
        else:
            values = quantizer.decoded(self.data_t, self.scale_t, self.global_amax_col).t()
        return values.to(dtype).reshape(self.original_shape)


class NVFP4QuantizerRef(Quantizer):
    """Quantizes to NVFP4 by the reference backend.

    Args:
        dtype: Has no effect: E2M1 is the only FP4 format.
        rowwise: Make the row direction.
        columnwise: Make the column direction.
        pow_2_scales: Must be False.
        eps: Must be 0.
        quant_tile_shape: Elements that share a scale, (1, 16) or (16, 16).
        row_scaled_nvfp4: As in `te.NVFP4Quantizer`.
        nvfp4_use_4over6: As in `te.NVFP4Quantizer`.
        nvfp4_e4m3_max: As in `te.NVFP4Quantizer`.
        nvfp4_4over6_err_mode: As in `te.NVFP4Quantizer`.
        nvfp4_4over6_err_use_fast_math: Must be False; NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1 selects it.
        with_rht: Hadamard transform the column direction.
        with_random_sign_mask: Apply the fixed signs of the transform.

    Raises:
        NotImplementedError: An option has another value than it must.
        ValueError: The settings exclude each other.
    """

    custom = True

    def __init__(
        self,
        dtype: Any = None,
        rowwise: bool = True,
        columnwise: bool = True,
        pow_2_scales: bool = False,
        eps: float = 0.0,
        quant_tile_shape: tuple[int, int] = (1, 16),
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        nvfp4_4over6_err_use_fast_math: bool = False,
        with_rht: bool = False,
        with_random_sign_mask: bool = True,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if pow_2_scales or eps:
            raise NotImplementedError(
                f"pow_2_scales={pow_2_scales}, eps={eps}: block scales are E4M3 without a floor here; use "
                "te.MXFP8Quantizer for power-of-two scales"
            )
        if nvfp4_4over6_err_use_fast_math:
            raise NotImplementedError(
                "nvfp4_4over6_err_use_fast_math=True is unsupported; set NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1"
            )
        if tuple(quant_tile_shape) not in ((1, _BLOCK), (_BLOCK, _BLOCK)):
            raise ValueError(
                f"quant_tile_shape={quant_tile_shape}; choose (1, {_BLOCK}) or ({_BLOCK}, {_BLOCK})"
            )
        self.dtype = dtype
        self.inner = NVFP4Quantizer(
            with_rht=with_rht,
            with_post_rht_amax=with_rht,
            with_2d_quantization=tuple(quant_tile_shape) == (_BLOCK, _BLOCK),
            row_scaled_nvfp4=row_scaled_nvfp4,
            nvfp4_use_4over6=nvfp4_use_4over6,
            nvfp4_e4m3_max=nvfp4_e4m3_max,
            nvfp4_4over6_err_mode=nvfp4_4over6_err_mode,
            with_random_sign_mask=with_random_sign_mask,
        )

    def quantize_impl(self, tensor: Tensor) -> NVFP4TensorRef:
        """Quantize a tensor [.., K] in the directions of the usages."""
        matrix = tensor.detach().reshape(-1, tensor.shape[-1])
        spec = self.inner.spec(self.rowwise_usage, self.columnwise_usage)
        quantized = FORMATS[spec.format.name].quantize(matrix, spec, QuantizeInputs())
        result = NVFP4TensorRef(
            data=quantized.codes,
            scale=quantized.scale,
            data_t=quantized.codes_t,
            scale_t=quantized.scale_t,
            dtype=tensor.dtype,
            quant_dtype=torch.uint8,
            original_shape=tensor.shape,
            quantizer=self,
        )
        result.global_amax_row, result.global_amax_col = quantized.amax, quantized.amax_t
        return result

    def decoded(self, codes: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
        """Return code * block scale * second-level scale, float32 [R, K]."""
        values = decode_e2m1(unpack_fp4(codes))
        blocks = scale.float().repeat_interleave(_BLOCK, dim=1)[:, : values.shape[1]]
        largest = amax.float().view(-1, 1)
        unit = self.inner.spec(True, False).format.unit_amax
        assert unit is not None, "NVFP4 has two levels of scales"
        return values * blocks * torch.div(largest, torch.full_like(largest, unit))

    def qgemm(
        self,
        qx: Tensor,
        qw: Tensor,
        m_params: Any,
        out_dtype: torch.dtype,
        sx: Tensor,
        sw: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        accumulate: bool = False,
        gemm_type: Any = None,
        qresult_x: Any = None,
        qresult_w: Any = None,
    ) -> Tensor:
        """Multiply decoded operands in float32; the arguments are as in `CurrentScalingQuantizerRef.qgemm`.

        Raises:
            ValueError: A bias is given.
        """
        if bias is not None:
            raise ValueError("the reference product of NVFP4 has no bias; add it to the result")
        columns = (gemm_type is GEMMType.WGRAD, gemm_type in (GEMMType.WGRAD, GEMMType.DGRAD))
        operand_pairs = ((qx, sx, qresult_x), (qw, sw, qresult_w))
        operands = [
            self.decoded(
                codes, scale, quantized.global_amax_col if column else quantized.global_amax_row
            )
            for (codes, scale, quantized), column in zip(operand_pairs, columns, strict=True)
        ]
        return high_precision_gemm_ref(
            operands[0], operands[1], out_dtype, accumulate, is_b_transposed=True, out=out
        )


def nvfp4_ref_rht_2d_factory(role: QuantizerRole | None) -> NVFP4QuantizerRef:
    """Return the reference quantizer of a role: 16 x 16 blocks for weights, a Hadamard transform for the rest.

    Args:
        role: Layer and tensor that the quantizer serves; None is an input.
    """
    if getattr(role, "tensor_type", "") == "weight" or role == "linear_weight":
        return NVFP4QuantizerRef(quant_tile_shape=(_BLOCK, _BLOCK))
    return NVFP4QuantizerRef(with_rht=True)


nvfp4_ref_rht_2d_quantizer_factory = nvfp4_ref_rht_2d_factory
