"""MXFP8: codes [..., K] = saturate(x * 2^(127 - e)), one exponent e per 32 elements along the contracted dimension."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common import recipe as recipes
from ...common.formats import MXFP8
from ...common.numbers import to_bool
from ..constants import DType
from ..primitives.quantize import QuantizeSpec
from .block_scaling import DIRECTIONS, BlockScalingQuantizer, from_values, tensor_fields
from .elements import find_element, float8_number
from .quantized_tensor import QuantizedTensor
from .quantizer import Quantizer
from .storage.mxfp8_tensor_storage import MXFP8TensorStorage

__all__ = ["MXFP8Quantizer", "MXFP8Tensor", "MXFP8TensorStorage"]


_PICKLED = (
    *DIRECTIONS,
    "fp8_dtype",
    "dtype",
    "shape",
    "quantizer",
    "square_tiles",
    "with_gemm_swizzled_scales",
)


class MXFP8Tensor(QuantizedTensor, MXFP8TensorStorage):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """FP8 codes with one exponent per 32 values. The other arguments are as in `QuantizedTensor`."""

    STORAGE = MXFP8TensorStorage

    def _default_quantizer(self) -> Quantizer:
        return MXFP8Quantizer(
            self._fp8_dtype, with_2d_quantization=self._square_tiles, **self.get_usages()
        )

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        return _make_mxfp8_tensor_in_reduce_ex, tensor_fields(self, _PICKLED)


@functools.cache
def _spec(dtype: DType, rowwise: bool, columnwise: bool, square: bool) -> QuantizeSpec:
    return QuantizeSpec(MXFP8, find_element(dtype), rowwise, columnwise, two_dimensional=square)


class MXFP8Quantizer(BlockScalingQuantizer):
    """MXFP8: FP8 with one power-of-two scale per 32 values. Each direction is quantized from the values.

    Args:
        fp8_dtype: kFloat8E4M3 or kFloat8E5M2.
        with_2d_quantization: Share scales over 32 x 32 values, equal in both directions.

    The other arguments are as in `Quantizer`.
    """

    TENSOR = MXFP8Tensor
    RECIPE = recipes.MXFP8BlockScaling
    MULTIPLE = 32

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = float8_number(fp8_dtype)
        self.with_2d_quantization = to_bool("with_2d_quantization", with_2d_quantization)

    def can_join_shards(self, kind: type) -> bool:
        return issubclass(kind, MXFP8TensorStorage)

    def spec(self, rowwise: bool, columnwise: bool) -> QuantizeSpec:
        return _spec(self.dtype, rowwise, columnwise, self.with_2d_quantization)

    def get_columnwise_shape(self, rowwise_data_shape: Sequence[int]) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().get_columnwise_shape(rowwise_data_shape)

    def constants(self) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype, "square_tiles": self.with_2d_quantization}

    def create_tensor_from_data(
        self,
        data: Tensor,
        scale_inv: Tensor,
        fake_dtype: torch.dtype = torch.float32,
        fp8_dtype: DType | torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> MXFP8Tensor:
        """Return a tensor from existing row-wise codes [..., K] and padded exponents.

        Args:
            data: Codes [..., K].
            scale_inv: Exponents, padded as by this quantizer.
            fake_dtype: Nominal dtype.
            fp8_dtype: Code element; None: the quantizer's.
            requires_grad: As for `torch.Tensor`.
        """
        constants = self.constants()
        if fp8_dtype is not None:
            constants["fp8_dtype"] = float8_number(fp8_dtype)
        storage = MXFP8TensorStorage(
            data.view(torch.uint8),
            scale_inv,
            columnwise_data=None,
            columnwise_scale_inv=None,
            quantizer=self,
            dtype=fake_dtype,
            **constants,
        )
        return self.wrap(storage, requires_grad=requires_grad)

    def compile_key(self) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        if type(self) is not MXFP8Quantizer:
            return None
        return (self._configuration(), self.optimize_for_gemm), ()

    def _configuration(self) -> Hashable:
        return (self.dtype, self.with_2d_quantization)


def _make_mxfp8_tensor_in_reduce_ex(*values: Any) -> MXFP8Tensor:
    """Return an MXFP8Tensor from its pickle."""
    return from_values(MXFP8Tensor, _PICKLED, values)


PICKLED = (_make_mxfp8_tensor_in_reduce_ex,)
