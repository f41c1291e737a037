"""NVFP4: codes [..., K] = e2m1(x / (s x g)), s an E4M3 scale for 16 elements and g one float32 scale for the tensor."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common import recipe as recipes
from ...common.checks import switch
from ...common.formats import E2M1, NVFP4
from ..constants import DType
from ..primitives.quantize import Quantized, QuantizeSpec, absolute_maximum, hadamard_transform, quantize
from ..runtime.checks import group_or_none
from .block_scaling import BlockScalingQuantizer
from .elements import element_number
from .pickling import DIRECTIONS, from_values, values_of
from .quantized_tensor import QuantizedTensor
from .quantizer import Quantizer
from .reduced_maximum import ReducesMaximum
from .storage.nvfp4_tensor_storage import NVFP4TensorStorage

__all__ = ["NVFP4Quantizer", "NVFP4Tensor", "NVFP4TensorStorage"]


_PICKLED = (
    *DIRECTIONS,
    *("amax_rowwise", "amax_columnwise", "fp4_dtype"),
    *("dtype", "shape", "quantizer", "square_tiles", "transform_signs"),
)


class NVFP4Tensor(QuantizedTensor, NVFP4TensorStorage):
    """Presents a standard dtype; holds packed FP4 codes and two levels of scales, in one or both directions."""

    STORAGE = NVFP4TensorStorage

    def _default_quantizer(self) -> Quantizer:
        transforms = self._transform_signs is not None
        return NVFP4Quantizer(
            self._fp4_dtype,
            with_rht=transforms,
            with_post_rht_amax=transforms,
            with_2d_quantization=self._square_tiles,
            with_random_sign_mask=self._transform_signs is not False,
            rowwise=self._rowwise_data is not None,
            columnwise=self._columnwise_data is not None,
        )

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        return _make_nvfp4_tensor_in_reduce_ex, values_of(self, _PICKLED)


@functools.cache
def _spec(
    rowwise: bool, columnwise: bool, square: bool, hadamard: bool, random_sign: bool, stochastic: bool
) -> QuantizeSpec:
    return QuantizeSpec(
        NVFP4,
        E2M1,
        rowwise,
        columnwise,
        two_dimensional=square,
        hadamard=hadamard,
        random_sign=random_sign,
        stochastic=stochastic,
    )


class NVFP4Quantizer(ReducesMaximum, BlockScalingQuantizer):
    """Training in NVFP4 after arXiv:2509.25149.

    with_rht                the column direction is Hadamard transformed before it is quantized
    with_2d_quantization    16 x 16 elements share a scale, for weights: both directions hold the same values
    stochastic_rounding     for gradients; random numbers come from torch's generator of the tensor's device
    """

    TENSOR = NVFP4Tensor
    MULTIPLE = 16

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: torch.distributed.ProcessGroup | None = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ):
        for name, value in (
            ("with_amax_reduction", with_amax_reduction),
            ("with_rht", with_rht),
            ("with_post_rht_amax", with_post_rht_amax),
            ("with_2d_quantization", with_2d_quantization),
            ("stochastic_rounding", stochastic_rounding),
            ("row_scaled_nvfp4", row_scaled_nvfp4),
            ("nvfp4_use_4over6", nvfp4_use_4over6),
            ("with_random_sign_mask", with_random_sign_mask),
        ):
            switch(name, value)
        group_or_none("amax_reduction_group", amax_reduction_group)
        if row_scaled_nvfp4 or nvfp4_use_4over6:
            raise ValueError(
                f"row_scaled_nvfp4={row_scaled_nvfp4}, nvfp4_use_4over6={nvfp4_use_4over6}: neither variant is "
                "implemented; leave both False"
            )
        if nvfp4_e4m3_max != 448 or nvfp4_4over6_err_mode != "MAE":
            raise ValueError(
                f"nvfp4_e4m3_max={nvfp4_e4m3_max!r}, nvfp4_4over6_err_mode={nvfp4_4over6_err_mode!r} are settings of "
                'nvfp4_use_4over6, which is not implemented; leave them 448 and "MAE"'
            )
        if with_rht and not with_post_rht_amax:
            raise ValueError(
                "with_rht=True scales by the maximum after the transform; also set with_post_rht_amax=True"
            )
        if with_rht and with_2d_quantization:
            raise ValueError(
                "with_rht transforms one direction, with_2d_quantization needs both to be equal; choose one"
            )
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = element_number(fp4_dtype)
        if self.dtype is not DType.kFloat4E2M1:
            raise ValueError(f"fp4_dtype={fp4_dtype!r} is not FP4; give DType.kFloat4E2M1")
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self.with_rht, self.with_post_rht_amax = with_rht, with_post_rht_amax
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.with_random_sign_mask = with_random_sign_mask

    def spec(self, rowwise: bool, columnwise: bool) -> QuantizeSpec:
        options = (
            self.with_2d_quantization,
            self.with_rht,
            self.with_random_sign_mask,
            self.stochastic_rounding,
        )
        return _spec(rowwise, columnwise, *options)

    def convert_shape_for_fp4(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the bytes of values [..., K], two a byte: [..., K / 2]."""
        return (*shape[:-1], shape[-1] // 2)

    def constants(self) -> dict[str, Any]:
        return {
            "fp4_dtype": self.dtype,
            "square_tiles": self.with_2d_quantization,
            "transform_signs": self.column_signs,
        }

    @property
    def column_signs(self) -> bool | None:
        return self.with_random_sign_mask if self.with_rht else None

    def _quantized(self, matrix: Tensor, spec: QuantizeSpec) -> Quantized:
        amax = amax_t = None
        if self.with_amax_reduction:
            amax, amax_t = self._reduced_maxima(matrix, spec)
        random = _uniform(matrix, spec) if spec.stochastic else None
        return quantize(matrix, spec, amax=amax, amax_t=amax_t, random=random)

    def _reduced_maxima(self, matrix: Tensor, spec: QuantizeSpec) -> tuple[Tensor, Tensor]:
        """The group's maxima of the row and of the column direction, each float32 [1], in one reduction."""
        columns = matrix
        if spec.hadamard and spec.columnwise:
            columns = hadamard_transform(matrix.t().contiguous(), spec.random_sign)
        maxima = self.over_the_group(torch.cat((absolute_maximum(matrix), absolute_maximum(columns))))
        return maxima[:1], maxima[1:]

    def _get_compatible_recipe(self) -> type[recipes.Recipe]:
        return recipes.NVFP4BlockScaling

    def _configuration(self) -> Hashable:
        return (
            (self.with_amax_reduction, self.amax_reduction_group),
            (self.with_rht, self.with_random_sign_mask, self.with_2d_quantization, self.stochastic_rounding),
        )


def _uniform(matrix: Tensor, spec: QuantizeSpec) -> tuple[Tensor, Tensor]:
    """Uniform float32 in [0, 1) for the directions that are rounded: [M, K] and [K, M], else empty."""
    rows, depth = matrix.shape
    rounds_rows = spec.rowwise or spec.transposes
    rounds_columns = spec.columnwise and not spec.transposes

    def uniform(first: int, second: int, needed: bool) -> Tensor:
        shape = (first, second) if needed else (0, 0)
        return torch.rand(shape, dtype=torch.float32, device=matrix.device)

    return uniform(rows, depth, rounds_rows), uniform(depth, rows, rounds_columns)


def _make_nvfp4_tensor_in_reduce_ex(*values: Any) -> NVFP4Tensor:
    """An NVFP4Tensor from its pickle."""
    return from_values(NVFP4Tensor, _PICKLED, values)


PICKLED = (_make_nvfp4_tensor_in_reduce_ex,)
