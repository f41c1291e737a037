"""FP8 in blocks: codes [..., K] = saturate(x x scale), one scale for 1 x 128 or 128 x 128 elements."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ...common import recipe as recipes
from ...common.formats import BLOCK_1D, BLOCK_2D
from ...common.numbers import to_bool, to_int
from ..constants import DType
from ..primitives.operand import Operand
from ..primitives.quantize import Cast, Quantized, QuantizeSpec, quantize
from .block_scaling import DIRECTIONS, BlockScalingQuantizer, from_values, tensor_fields
from .elements import find_element, float8_number
from .quantized_tensor import QuantizedTensor
from .quantizer import Operands, Quantizer, amax_floor
from .storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

__all__ = ["Float8BlockQuantizer", "Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage"]


@functools.cache
def _spec(
    dimensions: int,
    dtype: DType,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    amax_epsilon: float,
) -> QuantizeSpec:
    tiles = BLOCK_2D if dimensions == 2 else BLOCK_1D
    return QuantizeSpec(
        tiles,
        find_element(dtype),
        rowwise,
        columnwise,
        power_of_two=power_of_two,
        epsilon=amax_epsilon,
    )


_PICKLED = (*DIRECTIONS, "fp8_dtype", "dtype", "shape", "quantizer", "is_2D_scaled", "power_of_two")


class Float8BlockwiseQTensor(QuantizedTensor, Float8BlockwiseQTensorStorage):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """FP8 codes with float32 block scales. The other arguments are as in `QuantizedTensor`."""

    STORAGE = Float8BlockwiseQTensorStorage

    def _default_quantizer(self) -> Quantizer:
        dimensions = 2 if self._is_2D_scaled else 1
        return Float8BlockQuantizer(
            self._fp8_dtype, block_scaling_dim=dimensions, **self.get_usages()
        )

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        return _make_float8_blockwise_tensor_in_reduce_ex, tensor_fields(self, _PICKLED)


class Float8BlockQuantizer(BlockScalingQuantizer):
    """FP8 with a scale for 1 x 128 or 128 x 128 values. Any shape fits: blocks at the edges are smaller.

    Args:
        fp8_dtype: kFloat8E4M3 or kFloat8E5M2.
        amax_epsilon: Least maximum that a scale is computed from.
        force_pow_2_scales: Round scales down to powers of two.
        block_scaling_dim: 1 for 1 x 128 blocks, 2 for 128 x 128, whose directions are exact transposes.
        all_gather_usage: Accepted for compatibility; the layout is the same.

    The other arguments are as in `Quantizer`.
    """

    TENSOR = Float8BlockwiseQTensor
    RECIPE = recipes.Float8BlockScaling
    MULTIPLE = 1
    VECTORS = True

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
        all_gather_usage: bool = False,
    ):
        dimensions = to_int("block_scaling_dim", block_scaling_dim)
        if dimensions not in (1, 2):
            raise ValueError(
                f"block_scaling_dim={block_scaling_dim!r}; choose 1 (1 x 128) or 2 (128 x 128)"
            )
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = float8_number(fp8_dtype)
        self.amax_epsilon = amax_floor(amax_epsilon)
        self.force_pow_2_scales = to_bool("force_pow_2_scales", force_pow_2_scales)
        self.block_scaling_dim = dimensions
        self.block_len = 128
        self.all_gather_usage = to_bool("all_gather_usage", all_gather_usage)

    def spec(self, rowwise: bool, columnwise: bool) -> QuantizeSpec:
        return _spec(
            self.block_scaling_dim,
            self.dtype,
            rowwise,
            columnwise,
            self.force_pow_2_scales,
            self.amax_epsilon,
        )

    @property
    def transposes_scales(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.block_scaling_dim == 1

    def operands(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        return self.adopt(quantize(matrix, self.spec(rowwise, columnwise)), matrix.dtype)

    def cast(self, rowwise: bool, columnwise: bool) -> Cast | None:
        return Cast(self.spec(rowwise, columnwise))

    def adopt(self, quantized: Quantized, dtype: torch.dtype) -> Operands:
        codes, scale, codes_t, scale_t, _, _ = quantized
        tiles = self.spec(True, False).operand_format
        return Operands(
            Operand(codes, scale, tiles, None, dtype) if codes is not None else None,
            Operand(codes_t, scale_t, tiles, None, dtype) if codes_t is not None else None,
        )

    def constants(self) -> dict[str, Any]:
        return {
            "fp8_dtype": self.dtype,
            "is_2D_scaled": self.block_scaling_dim == 2,
            "power_of_two": self.force_pow_2_scales,
        }

    def compile_key(self) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        return (self._configuration(), ()) if type(self) is Float8BlockQuantizer else None

    def _configuration(self) -> Hashable:
        return (self.dtype, self.amax_epsilon, self.force_pow_2_scales, self.block_scaling_dim)


def _make_float8_blockwise_tensor_in_reduce_ex(*values: Any) -> Float8BlockwiseQTensor:
    """Return a Float8BlockwiseQTensor from its pickle."""
    return from_values(Float8BlockwiseQTensor, _PICKLED, values)


PICKLED = (_make_float8_blockwise_tensor_in_reduce_ex,)
