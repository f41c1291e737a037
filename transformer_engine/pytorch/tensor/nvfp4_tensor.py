"""NVFP4: codes [..., K] = e2m1(x / (s x g)), an E4M3 scale s per 16 elements, a float32 scale g per tensor or row."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common import env
from ...common import recipe as recipes
from ...common.formats import E2M1, NVFP4_FORMATS
from ...common.numbers import to_bool
from ...common.quantize_spec import FAST_ERRORS
from ..constants import DType
from ..primitives.quantize import Quantized, QuantizeSpec, hadamard_transform, pack_fp4, quantize
from ..primitives.quantize.encodings import row_maxima
from ..primitives.quantize.formats.nvfp4 import encode as encode_rows
from ..primitives.quantize.formats.nvfp4 import hadamard_maximum
from ..primitives.quantize.maximum import maximum
from ..runtime.checks import group_or_none
from ..runtime.launching import uniform
from .block_scaling import DIRECTIONS, BlockScalingQuantizer, from_values, tensor_fields
from .current_scaling import ReducesMaximum, all_reduce_maxima
from .elements import element_number
from .padded_groups import (
    TILE,
    PaddedGroups,
    index_groups,
    maxima_of_groups,
    transposed_codes,
    transposed_scales,
)
from .quantized_tensor import QuantizedTensor
from .quantizer import Quantizer
from .storage.block_scaled import padded
from .storage.nvfp4_tensor_storage import NVFP4TensorStorage

__all__ = ["NVFP4Quantizer", "NVFP4Tensor", "NVFP4TensorStorage"]


_PICKLED = (
    *DIRECTIONS,
    *("amax_rowwise", "amax_columnwise", "fp4_dtype"),
    *("dtype", "shape", "quantizer", "square_tiles", "transform_signs"),
    *("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max", "with_gemm_swizzled_scales"),
)
_LARGEST_SCALES = (448, 256)
_REMEDIES = {
    "with_rht": "set with_rht=False (of the recipe: disable_rht=True, or NVTE_NVFP4_DISABLE_RHT=1)",
    "with_2d_quantization": "set with_2d_quantization=False, which is for weights",
    "stochastic_rounding": "set stochastic_rounding=False, which is for gradients",
    "with_amax_reduction": "set with_amax_reduction=False, as every row has its own maximum",
}


class NVFP4Tensor(QuantizedTensor, NVFP4TensorStorage):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """Packed FP4 codes with two scale levels. The other arguments are as in `QuantizedTensor`."""

    STORAGE = NVFP4TensorStorage

    def _default_quantizer(self) -> Quantizer:
        transforms = self._transform_signs is not None
        return NVFP4Quantizer(
            self._fp4_dtype,
            with_rht=transforms,
            with_post_rht_amax=transforms,
            with_2d_quantization=self._square_tiles,
            with_random_sign_mask=self._transform_signs is not False,
            row_scaled_nvfp4=self._row_scaled_nvfp4,
            nvfp4_use_4over6=self._nvfp4_use_4over6,
            nvfp4_e4m3_max=self._nvfp4_e4m3_max,
            rowwise=self._rowwise_data is not None,
            columnwise=self._columnwise_data is not None,
        )

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        return _make_nvfp4_tensor_in_reduce_ex, tensor_fields(self, _PICKLED)


@functools.cache
def _spec(
    rowwise: bool,
    columnwise: bool,
    row_scaled: bool,
    largest_scale: int,
    square: bool,
    hadamard: bool,
    random_sign: bool,
    stochastic: bool,
    four_over_six: str,
) -> QuantizeSpec:
    return QuantizeSpec(
        NVFP4_FORMATS[row_scaled, largest_scale],
        E2M1,
        rowwise,
        columnwise,
        two_dimensional=square,
        hadamard=hadamard,
        random_sign=random_sign,
        stochastic=stochastic,
        four_over_six=four_over_six,
    )


class NVFP4Quantizer(ReducesMaximum, BlockScalingQuantizer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Quantizer for training in NVFP4 after arXiv:2509.25149.

    Args:
        fp4_dtype: Code element; E2M1 is the only one.
        rowwise: Make the row-wise direction.
        columnwise: Make the column-wise direction.
        with_amax_reduction: Take maxima over `amax_reduction_group`. With `row_scaled_nvfp4` no reduction is possible.
        amax_reduction_group: Process group for that reduction.
        with_rht: Hadamard transform the column direction before it is quantized.
        with_post_rht_amax: Scale the transformed direction by its own maximum; `with_rht` requires it.
        with_2d_quantization: Share a scale among 16 x 16 elements, so that both directions hold the same values.
        stochastic_rounding: Round stochastically, for gradients; random numbers come from torch's generator.
        row_scaled_nvfp4: Scale every row by its own maximum in the row-wise direction. The column-wise direction has
            one maximum per tensor.
        nvfp4_use_4over6: Map each block's maximum to 4 instead of 6 where that makes the smaller error.
        nvfp4_e4m3_max: Largest block scale, 448 or 256. With 448, the scale that maps a block's maximum to 4 saturates
            in the blocks with the largest values.
        nvfp4_4over6_err_mode: "MAE" (sum of absolute errors) or "MSE" (sum of squared errors), by which 4over6 chooses.
            With NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1 errors are measured relative to the second-level scale.
        with_random_sign_mask: Apply the fixed sign vector of the Hadamard transform.

    Raises:
        ValueError: The settings exclude each other; the message names them.
    """

    TENSOR = NVFP4Tensor
    RECIPE = recipes.NVFP4BlockScaling
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
        with_amax_reduction = to_bool("with_amax_reduction", with_amax_reduction)
        with_rht = to_bool("with_rht", with_rht)
        with_post_rht_amax = to_bool("with_post_rht_amax", with_post_rht_amax)
        with_2d_quantization = to_bool("with_2d_quantization", with_2d_quantization)
        stochastic_rounding = to_bool("stochastic_rounding", stochastic_rounding)
        row_scaled_nvfp4 = to_bool("row_scaled_nvfp4", row_scaled_nvfp4)
        nvfp4_use_4over6 = to_bool("nvfp4_use_4over6", nvfp4_use_4over6)
        with_random_sign_mask = to_bool("with_random_sign_mask", with_random_sign_mask)
        group_or_none("amax_reduction_group", amax_reduction_group)
        for name, value, allowed in (
            ("nvfp4_e4m3_max", nvfp4_e4m3_max, _LARGEST_SCALES),
            ("nvfp4_4over6_err_mode", nvfp4_4over6_err_mode, tuple(FAST_ERRORS)),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}; choose {allowed[0]!r} or {allowed[1]!r}")
        if with_rht and not with_post_rht_amax:
            raise ValueError(
                "with_rht=True scales by the maximum after the transform; also set with_post_rht_amax=True"
            )
        if with_rht and with_2d_quantization:
            raise ValueError(
                "with_rht transforms one direction, with_2d_quantization needs both to be equal; choose one"
            )
        excluded = {
            "with_rht": with_rht,
            "with_2d_quantization": with_2d_quantization and row_scaled_nvfp4,
            "stochastic_rounding": stochastic_rounding,
            "with_amax_reduction": with_amax_reduction and row_scaled_nvfp4,
        }
        for variant, enabled in (
            ("row_scaled_nvfp4", row_scaled_nvfp4),
            ("nvfp4_use_4over6", nvfp4_use_4over6),
        ):
            for setting in (name for name, given in excluded.items() if enabled and given):
                raise ValueError(f"{variant}=True excludes {setting}=True; {_REMEDIES[setting]}")
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = element_number(fp4_dtype)
        if self.dtype is not DType.kFloat4E2M1:
            raise ValueError(f"fp4_dtype={fp4_dtype!r} is not FP4; give DType.kFloat4E2M1")
        self.with_amax_reduction, self.amax_reduction_group = (
            with_amax_reduction,
            amax_reduction_group,
        )
        self.with_rht, self.with_post_rht_amax = with_rht, with_post_rht_amax
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.with_random_sign_mask = with_random_sign_mask
        self.row_scaled_nvfp4 = row_scaled_nvfp4
        self.nvfp4_use_4over6 = nvfp4_use_4over6
        self.nvfp4_e4m3_max = int(nvfp4_e4m3_max)
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode

    def spec(self, rowwise: bool, columnwise: bool) -> QuantizeSpec:
        error = self.nvfp4_4over6_err_mode if self.nvfp4_use_4over6 else ""
        if error and env.flag("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH"):
            error = FAST_ERRORS[error]
        return _spec(
            rowwise,
            columnwise,
            self.row_scaled_nvfp4,
            self.nvfp4_e4m3_max,
            self.with_2d_quantization,
            self.with_rht,
            self.with_random_sign_mask,
            self.stochastic_rounding,
            error,
        )

    def is_quantizable(self, inp: Tensor) -> bool:
        # As in NVIDIA's engine: callers such as a gather then quantize the whole tensor.
        return not self.row_scaled_nvfp4 and super().is_quantizable(inp)

    def convert_shape_for_fp4(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the byte shape for values [..., K], two per byte: [..., K / 2]."""
        return (*shape[:-1], shape[-1] // 2)

    def constants(self) -> dict[str, Any]:
        return {
            "fp4_dtype": self.dtype,
            "square_tiles": self.with_2d_quantization,
            "transform_signs": self.column_signs,
            "row_scaled_nvfp4": self.row_scaled_nvfp4,
            "nvfp4_use_4over6": self.nvfp4_use_4over6,
            "nvfp4_e4m3_max": self.nvfp4_e4m3_max,
        }

    @property
    def column_signs(self) -> bool | None:
        return self.with_random_sign_mask if self.with_rht else None

    def _quantized(self, matrix: Tensor, spec: QuantizeSpec) -> Quantized:
        amax = amax_t = None
        if self.with_amax_reduction:
            # Maxima over the group, each float32 [1], in one collective. Its element count depends on settings that
            # the ranks share, not on the directions: a rank may need only one where another rank needs both.
            if spec.format.row_scaled:
                amax_t = self.reduce_amax(maximum(matrix))  # per-row maxima stay local to the rank
            elif self.with_rht:
                amax, amax_t = self._all_reduce_directions(matrix, spec)
            else:
                amax = amax_t = self.reduce_amax(maximum(matrix))
        random = None
        if spec.stochastic:
            # Uniform in [0, 1), [M, K] and [K, M] for the directions that are rounded; empty for the others.
            rows, depth = matrix.shape
            of_rows = (rows, depth) if spec.rowwise or spec.transposes else (0, 0)
            of_columns = (depth, rows) if spec.columnwise and not spec.transposes else (0, 0)
            random = uniform(of_rows, matrix), uniform(of_columns, matrix)
        return quantize(matrix, spec, amax=amax, amax_t=amax_t, random=random)

    def _all_reduce_directions(self, matrix: Tensor, spec: QuantizeSpec) -> tuple[Any, Any]:
        """Return the maxima over the group, of the values and of the transformed columns.

        A rank without the column-wise direction adds no column maximum; its second result is not used.
        """
        maxima = [maximum(matrix)]
        if spec.columnwise:
            maxima.append(hadamard_maximum(matrix, spec.random_sign))
        reduced = all_reduce_maxima(maxima, self.amax_reduction_group, 2)
        return reduced[0], reduced[1] if spec.columnwise else None

    def groups_unsupported_reason(self) -> str | None:
        for name in ("with_2d_quantization", "row_scaled_nvfp4", "with_amax_reduction"):
            if getattr(self, name):
                return f"{name}=True needs the rows of a group together"
        return super().groups_unsupported_reason()

    def encode_groups(self, x: Tensor, groups: PaddedGroups) -> dict[str, Tensor]:
        # Both directions are 16-value rows, each with the maximum of its group.
        x = groups.padded(x)
        group, _ = groups.padded_groups()
        amax = maxima_of_groups(row_maxima(x), groups, group)
        buffers: dict[str, Tensor] = {}
        if self.rowwise_usage:
            codes, scale = self._rows_with_maxima(x, index_groups(amax, group))
            buffers["rowwise_data"] = codes.index_select(0, groups.padded_row())
            buffers["scale_inv"] = padded(scale.view(torch.uint8), 1, 4)
            buffers["amax"] = amax
        if self.columnwise_usage:
            x_t = x.t().contiguous()
            depth = x_t.shape[0]
            if self.with_rht:
                x_t = hadamard_transform(x_t, self.with_random_sign_mask)
                amax = maxima_of_groups(row_maxima(x_t.t().contiguous()), groups, group)
            of_blocks = index_groups(amax, group[::16]).repeat(depth)
            codes_t, scale_t = self._rows_with_maxima(x_t.view(-1, 16), of_blocks)
            scale_t = padded(scale_t.view(torch.uint8).reshape(depth, -1), TILE, 1)
            buffers["columnwise_data"] = transposed_codes(
                codes_t.reshape(depth, -1), groups, packing=2
            )
            buffers["columnwise_scale_inv"] = transposed_scales(scale_t, groups, 16)
            buffers["columnwise_amax"] = amax
        return buffers

    def _rows_with_maxima(self, x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Packed codes [R, K / 2] and block scales [R, K / 16] for rows with these maxima [R]."""
        spec = self.spec(True, False)
        if self.stochastic_rounding:
            uniform = torch.rand(x.shape, dtype=torch.float32, device=x.device)
            codes, scale = encode_rows(x, spec, spec.format, amax, uniform)
            return pack_fp4(codes), scale
        rows = _spec(
            True, False, True, self.nvfp4_e4m3_max, False, False, False, False, spec.four_over_six
        )
        codes, scale, *_ = quantize(x, rows, amax=amax)
        assert codes is not None and scale is not None
        return codes, scale

    def compile_key(self) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        if type(self) is not NVFP4Quantizer:
            return None
        return (self._configuration(), self.optimize_for_gemm, self.spec(True, True)), ()

    def _configuration(self) -> Hashable:
        return (
            (self.with_amax_reduction, self.amax_reduction_group),
            (
                self.with_rht,
                self.with_random_sign_mask,
                self.with_2d_quantization,
                self.stochastic_rounding,
            ),
            (
                self.row_scaled_nvfp4,
                self.nvfp4_use_4over6,
                self.nvfp4_e4m3_max,
                self.nvfp4_4over6_err_mode,
            ),
        )


def _make_nvfp4_tensor_in_reduce_ex(*values: Any) -> NVFP4Tensor:
    """Return an NVFP4Tensor from its pickle."""
    return from_values(NVFP4Tensor, _PICKLED, values)


PICKLED = (_make_nvfp4_tensor_in_reduce_ex,)
