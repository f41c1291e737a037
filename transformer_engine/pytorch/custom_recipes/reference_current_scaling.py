"""Current scaling in literal PyTorch operations: a reference for quantizers and a custom quantizer example.

codes = cast(x * scale), scale = (largest code) / max|x|, and a product is (codes_x @ codes_w.T) * (1 / scale_x) *
(1 / scale_w) in float32. The codes and scales equal `te.Float8CurrentScalingQuantizer` bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...common import absent
from ...common.formats import E4M3, E5M2
from ..primitives.quantize import cast, scale_from_amax
from ..quantization.roles import BACKWARD_TENSORS, QuantizerRole
from ..tensor.quantized_tensor import QuantizedTensorStorage
from ..tensor.quantizer import Quantizer

__all__ = ["CurrentScalingQuantizerRef", "CurrentScalingTensorRef", "current_scaling_ref_factory"]

absent.install_getter(__name__)

_ELEMENTS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


class CurrentScalingTensorRef(QuantizedTensorStorage):
    """FP8 codes and their inverse scale, in one or both directions.

    Args:
        data: Codes float8 [M, K]; None without the row direction.
        scale: Code factor, float32 [1].
        data_t: Codes float8 [K, M]; None without the column direction.
        scale_t: Code factor in the column direction, float32 [1].
        dtype: Value dtype.
        device: Has no effect: the codes determine the device.
        quant_dtype: Code dtype.
        original_shape: Value shape, [.., K].
        quantizer: Quantizer that multiplies these tensors.
    """

    custom = True
    TENSORS = {"data": "data", "scale": "scale", "data_t": "data_t", "scale_t": "scale_t"}
    ROWWISE: tuple[str, ...] = ("data", "scale")  # pyright: ignore[reportIncompatibleVariableOverride]
    COLUMNWISE: tuple[str, ...] = ("data_t", "scale_t")  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        data: Tensor | None = None,
        scale: Tensor | None = None,
        data_t: Tensor | None = None,
        scale_t: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        quant_dtype: torch.dtype | None = None,
        original_shape: Sequence[int] = (),
        quantizer: Quantizer | None = None,
    ):
        self.data, self.scale, self.data_t, self.scale_t = data, scale, data_t, scale_t
        self._dtype, self.quant_dtype = dtype, quant_dtype
        self.original_shape = torch.Size(original_shape)
        self._quantizer = quantizer

    @property
    def _data(self) -> Tensor | None:
        return self.data

    @property
    def _scale_inv(self) -> Tensor | None:
        return self.scale

    @property
    def shape(self) -> torch.Size:
        return self.original_shape

    def get_usages(self) -> dict[str, bool]:
        """Return the directions that the tensor has."""
        return {"rowwise": self.data is not None, "columnwise": self.data_t is not None}

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return codes * scale [.., K]."""
        if self.data is not None and self.scale is not None:
            values = self.data.float() * self.scale
        else:
            assert self.data_t is not None and self.scale_t is not None
            values = self.data_t.float().t() * self.scale_t
        return values.to(dtype).reshape(self.original_shape)


class CurrentScalingQuantizerRef(Quantizer):
    """Quantizes with one scale per tensor, computed from the tensor's maximum.

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: Make the row direction.
        columnwise: Make the column direction.
        pow_2_scales: Round scales down to powers of two.
        eps: Least maximum.

    Raises:
        ValueError: `dtype` is another dtype.
    """

    custom = True

    def __init__(
        self,
        dtype: torch.dtype,
        rowwise: bool = True,
        columnwise: bool = True,
        pow_2_scales: bool = False,
        eps: float = 0.0,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if dtype not in _ELEMENTS:
            raise ValueError(
                f"dtype={dtype} is not FP8; give torch.float8_e4m3fn or torch.float8_e5m2"
            )
        self.dtype, self.pow_2_scales, self.eps = dtype, pow_2_scales, eps

    def quantize_impl(self, tensor: Tensor) -> CurrentScalingTensorRef:
        """Quantize a tensor [.., K] in the directions of the usages."""
        element = _ELEMENTS[self.dtype]
        matrix = tensor.detach().reshape(-1, tensor.shape[-1]).float()
        amax = matrix.abs().amax().reshape(1) if matrix.numel() else matrix.new_zeros(1)
        scale = scale_from_amax(
            amax, element.maximum, power_of_two=self.pow_2_scales, epsilon=self.eps
        )
        codes, factor = cast(matrix * scale, element), scale.reciprocal()
        rows, columns = self.rowwise_usage, self.columnwise_usage
        return CurrentScalingTensorRef(
            data=codes if rows else None,
            scale=factor if rows else None,
            data_t=codes.t().contiguous() if columns else None,
            scale_t=factor if columns else None,
            dtype=tensor.dtype,
            quant_dtype=self.dtype,
            original_shape=tensor.shape,
            quantizer=self,
        )

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
        """Compute qx @ qw.T * (sx * sw) + bias in float32.

        Args:
            qx: Codes [M, K].
            qw: Codes [N, K].
            m_params: Product options, which have no effect.
            out_dtype: Result dtype.
            sx: Factor of qx.
            sw: Factor of qw.
            bias: Bias [N].
            out: Tensor that receives the result.
            accumulate: Add to `out`.
            gemm_type: Has no effect.
            qresult_x: Has no effect.
            qresult_w: Has no effect.
        """
        product = (qx.float() @ qw.float().t()) * (sx * sw)
        product = (product if bias is None else product + bias.float()).to(out_dtype)
        if out is None:
            return product
        return out.add_(product) if accumulate else out.copy_(product)


def current_scaling_ref_factory(role: QuantizerRole | None) -> CurrentScalingQuantizerRef:
    """Return the reference quantizer of a role: E5M2 for gradients, E4M3 for the rest.

    Args:
        role: Layer and tensor that the quantizer serves; None is an input.
    """
    gradient = getattr(role, "tensor_type", "") in BACKWARD_TENSORS or any(
        role == f"linear_{tensor}" for tensor in BACKWARD_TENSORS
    )
    return CurrentScalingQuantizerRef(torch.float8_e5m2 if gradient else torch.float8_e4m3fn)
