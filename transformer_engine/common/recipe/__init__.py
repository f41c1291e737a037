"""Recipes: dataclasses that say which tensors are quantized to which format, and where their scales come from.

Recipes compare by value and pickle in NVIDIA's format. `MMParams` and `QParams` are frozen. Recipe fields may be
assigned; the value is converted and checked as in the constructor, and derived fields follow their switch.

Fields accept the forms that pydantic converts, because configurations often come from YAML files and command lines:
`margin="1"`, `reduce_amax="true"`, `fp8_format=(448, 57344)`, `fp8_gemm_fprop={"use_split_accumulator": True}`.

Environment variables give defaults and are read once, when this module is imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from ..checks import exponent
from .field_checks import (
    check_minimum,
    convert_fields,
    default_value,
    require,
    require_fp8,
    require_kind,
)
from .living import (
    assign,
    enroll,
    is_unchanged,
    recipe_class,
    recipe_described_as,
    recipe_description,
    recipe_revision,
)
from .parts import CONVERTERS, Format, MMParams, QParams
from .parts import _FormatHelper as _FormatHelper  # the values in Format, by their pickle names

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]


class Recipe:
    """Base class for all recipes. Each predicate, such as `mxfp8()`, is true for one family and its subclasses."""

    fp8_format: Format

    def __setattr__(self, name: str, value: Any) -> None:
        if "_description" in self.__dict__:  # the constructor has run
            assign(self, name, value)
        else:
            super().__setattr__(name, value)

    def __post_init__(self) -> None:
        self._convert()
        self._check()
        self._derive()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a pickle, also from NVIDIA's engine, whose recipes lack the derived fields and may lack later fields."""
        self.__dict__.update(state)
        self._convert()
        self._derive()
        enroll(self)

    def _convert(self) -> None:
        convert_fields(self, CONVERTERS)

    def _derive(self) -> None:
        """Set the derived fields that are not set yet."""
        for name, value in self._derived_fields().items():
            if not hasattr(self, name):  # else a subclass has fixed it as a class attribute
                setattr(self, name, value)

    def _check(self) -> None:
        """Raise TypeError or ValueError for fields that contradict each other."""

    def _derived_fields(self) -> dict[str, QParams]:
        """Fields that follow from the switches."""
        return {}

    def __repr__(self) -> str:
        """Format as `recipe_type=DelayedScaling, margin=0, ..`: NVIDIA's repr first, then every other field."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # pyright: ignore[reportArgumentType]
        first = {
            name: values.pop(name)
            for name in ("margin", "fp4_format", "fp8_format")
            if name in values
        }
        if "fp4_format" not in first and "fp8_format" in first:
            first["format"] = first.pop("fp8_format")
        representations = [
            f"{name}={value.name if isinstance(value, Format) else value}"
            for name, value in first.items()
        ]
        representations += [f"{name}={value!r}" for name, value in values.items()]
        return ", ".join([f"recipe_type={type(self).__name__}", *representations])

    def nvfp4(self) -> bool:
        return isinstance(self, NVFP4BlockScaling)

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        return isinstance(self, (DelayedScaling, Float8CurrentScaling))

    def float8_block_scaling(self) -> bool:
        return isinstance(self, Float8BlockScaling)

    def custom(self) -> bool:
        return isinstance(self, CustomRecipe)


_SCOPES = ("none", "weights", "activations", "all")
_FP8_QUANT = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
_FP4_QUANT = ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad")


def reject_recipe_as_enabled(enabled: Any) -> None:
    """Raise TypeError if the first argument of a context manager, a bool, is a recipe."""
    if isinstance(enabled, Recipe):
        raise TypeError(
            f"enabled={type(enabled).__name__}(..) is a recipe, and the first argument is a bool; pass the recipe as a "
            "keyword, recipe=..."
        )


@recipe_class
@dataclass(repr=False)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor from an amax history: scale = (fp8_max / amax) / 2^margin.

    Args:
        margin: Powers of two between the scaled maximum and the largest code.
        fp8_format: Format.HYBRID (E4M3 forward, E5M2 backward) or Format.E4M3.
        amax_history_len: Number of steps in the history.
        amax_compute_algo: "max", "most_recent" or callable(history [len, n]) -> amax [n].
        scaling_factor_compute_algo: Callable(amax, old_scale, fp8_max, recipe) -> scale.
        reduce_amax: Take the maximum over `autocast`'s amax_reduction_group.
        fp8_dpa: Quantize inside `DotProductAttention`.
        fp8_mha: Also keep the tensors between attention and its projections in FP8.
        backward_override: None for a quantized backward pass, "high_precision" for the unquantized operands, or
            "dequantized" for the operands' dequantized codes. `DelayedScaling` accepts only None.

    Raises:
        ValueError: A field is outside its range.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = default_value("NVTE_BACKWARD_OVERRIDE")

    def _check(self) -> None:
        require_fp8(self, (Format.E4M3, Format.HYBRID))
        require(
            self, "backward_override", (None,), "use another recipe or unset NVTE_BACKWARD_OVERRIDE"
        )
        exponent("DelayedScaling: margin", self.margin)
        check_minimum(self, "amax_history_len", 0)
        if not callable(self.amax_compute_algo):
            require(
                self,
                "amax_compute_algo",
                ("max", "most_recent"),
                "or pass a callable(history) -> amax",
            )
        if self.scaling_factor_compute_algo is not None and not callable(
            self.scaling_factor_compute_algo
        ):
            raise ValueError(
                f"DelayedScaling: scaling_factor_compute_algo={self.scaling_factor_compute_algo!r}; it must "
                "be None or callable(amax, old_scale, fp8_max, recipe) -> scale"
            )


@recipe_class
@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor from the tensor itself: scale = fp8_max / max|x|.

    Args:
        use_power_2_scales: Round scales down to powers of two.
        fp8_gemm_fprop: Parameters for products in the forward pass.
        fp8_gemm_dgrad: Parameters for products that compute input gradients.
        fp8_gemm_wgrad: Parameters for products that compute weight gradients.

    The other arguments are as in `DelayedScaling`. The `QParams` fields fp8_quant_fwd_inp, fp8_quant_fwd_weight and
    fp8_quant_bwd_grad follow from use_power_2_scales and can be assigned.
    """

    use_power_2_scales: bool = bool(default_value("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"))
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = default_value("NVTE_BACKWARD_OVERRIDE")
    fp8_quant_fwd_inp: QParams = field(init=False)
    fp8_quant_fwd_weight: QParams = field(init=False)
    fp8_quant_bwd_grad: QParams = field(init=False)

    def _check(self) -> None:
        require_fp8(self, (Format.E4M3, Format.HYBRID))
        require_kind(self, MMParams, "fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
        require_kind(self, QParams, *_FP8_QUANT)

    def _derived_fields(self) -> dict[str, QParams]:
        return dict.fromkeys(_FP8_QUANT, QParams(power_2_scale=self.use_power_2_scales))


@recipe_class
@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    """FP8 with one scale per block with 1 x 128 or 128 x 128 values.

    Args:
        use_f32_scales: Use float32 scales instead of powers of two.
        fp8_format: Format.E4M3 or Format.HYBRID.
        x_block_scaling_dim: 1 for 1 x 128 input blocks, 2 for 128 x 128.
        w_block_scaling_dim: The same for weights.
        grad_block_scaling_dim: The same for gradients. At most one of the three is 2.

    Products always use split accumulation, and fp8_dpa and fp8_mha must be False. The other arguments are as in
    `Float8CurrentScaling`.
    """

    use_f32_scales: bool = bool(default_value("NVTE_FP8_BLOCK_SCALING_FP32_SCALES"))
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = default_value("NVTE_BACKWARD_OVERRIDE")
    fp8_quant_fwd_inp: QParams = field(init=False)
    fp8_quant_fwd_weight: QParams = field(init=False)
    fp8_quant_bwd_grad: QParams = field(init=False)

    def _check(self) -> None:
        require_fp8(self, (Format.E4M3, Format.HYBRID))
        dimensions = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        for name in dimensions:
            require(self, name, (1, 2))
        two_dimensional = [name for name in dimensions if getattr(self, name) == 2]
        if len(two_dimensional) > 1:
            raise ValueError(
                f"Float8BlockScaling: {' and '.join(two_dimensional)} are 2; a matrix product takes at most "
                "one operand with 128 x 128 blocks; set all but one to 1"
            )
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            require(
                self, name, (MMParams(use_split_accumulator=True),), "block scales need split sums"
            )
        require(self, "fp8_dpa", (False,), "attention takes DelayedScaling or Float8CurrentScaling")
        require(self, "fp8_mha", (False,), "attention takes DelayedScaling or Float8CurrentScaling")
        require_kind(self, QParams, *_FP8_QUANT)

    def _derived_fields(self) -> dict[str, QParams]:
        return dict.fromkeys(_FP8_QUANT, QParams(power_2_scale=not self.use_f32_scales))


@recipe_class
@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """MXFP8: FP8 with one power-of-two scale (E8M0) per 32 consecutive values along the contracted axis.

    Args:
        margin: No effect, since scales follow from the blocks; a value other than 0 warns.
        fp8_format: Format.E4M3 or Format.HYBRID.
        enable_2d_quantization: Share weight scales over 32 x 32 values, equal in both directions.

    The other arguments are as in `DelayedScaling`.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = default_value("NVTE_BACKWARD_OVERRIDE")
    enable_2d_quantization: bool = False

    def _check(self) -> None:
        require_fp8(self, (Format.E4M3, Format.HYBRID))
        if self.margin:
            warnings.warn(
                f"MXFP8BlockScaling: margin={self.margin} has no effect, as scales follow from each block's maximum; "
                "leave it 0, or use DelayedScaling, which takes a margin",
                UserWarning,
                stacklevel=5,
            )


@recipe_class
@dataclass(repr=False)
class NVFP4BlockScaling(Recipe):
    """NVFP4: E2M1 values with one E4M3 scale per 16 values, and one float32 scale per tensor.

    Args:
        disable_rht: Do not apply the random Hadamard transform to the inputs and gradients in weight gradients.
        disable_stochastic_rounding: Round gradients to nearest.
        disable_2d_quantization: Share weight scales over 16 instead of 16 x 16 values.
        row_scaled_activation: One float32 scale per activation row.
        nvfp4_4over6: Tensors whose blocks choose between maxima 4 and 6: "none", "weights", "activations" or "all".
        nvfp4_4over6_e4m3_use_256: Tensors whose largest block scale is 256 instead of 448; same choices.
        nvfp4_4over6_err_mode: Error that decides between 4 and 6: "MAE" or "MSE".
        fp4_format: Format.E2M1.
        fp8_format: Format.E4M3, the format of the block scales.

    The other arguments are as in `DelayedScaling`. The `QParams` fields fp4_quant_fwd_inp, fp4_quant_fwd_weight and
    fp4_quant_bwd_grad follow from the first three fields and can be assigned.
    """

    disable_rht: bool = bool(default_value("NVTE_NVFP4_DISABLE_RHT"))
    disable_stochastic_rounding: bool = bool(
        default_value("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    )
    disable_2d_quantization: bool = bool(default_value("NVTE_NVFP4_DISABLE_2D_QUANTIZATION"))
    row_scaled_activation: bool = bool(default_value("NVTE_NVFP4_ROW_SCALED_ACTIVATION"))
    nvfp4_4over6: str = str(default_value("NVTE_NVFP4_4OVER6"))
    nvfp4_4over6_e4m3_use_256: str = str(default_value("NVTE_NVFP4_4OVER6_E4M3_USE_256"))
    nvfp4_4over6_err_mode: str = str(default_value("NVTE_NVFP4_4OVER6_ERR_MODE"))
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = default_value("NVTE_BACKWARD_OVERRIDE")
    fp4_quant_fwd_inp: QParams = field(init=False)
    fp4_quant_fwd_weight: QParams = field(init=False)
    fp4_quant_bwd_grad: QParams = field(init=False)

    def _check(self) -> None:
        require(self, "fp4_format", (Format.E2M1,))
        require(self, "fp8_format", (Format.E4M3,), "it is the format of the block scales")
        require(self, "nvfp4_4over6", _SCOPES)
        require(self, "nvfp4_4over6_e4m3_use_256", _SCOPES)
        require(self, "nvfp4_4over6_err_mode", ("MAE", "MSE"))
        require(self, "backward_override", (None, "high_precision", "dequantized"))
        require_kind(self, QParams, *_FP4_QUANT)

    def _derived_fields(self) -> dict[str, QParams]:
        transform, draws = not self.disable_rht, not self.disable_stochastic_rounding
        values = (
            QParams(random_hadamard_transform=transform),
            QParams(fp4_2d_quantization=not self.disable_2d_quantization),
            QParams(random_hadamard_transform=transform, stochastic_rounding=draws),
        )
        return dict(zip(_FP4_QUANT, values, strict=True))


@recipe_class
@dataclass(repr=False)
class CustomRecipe(Recipe):
    """A recipe whose quantizers come from a factory.

    Args:
        qfactory: qfactory(role) -> quantizer, called once for each quantizer in a module. The role is a str
            ("linear_input", "linear_weight", "linear_output", "linear_grad_output" or "linear_grad_input") with the
            fields module_type, tensor_type and name, or None. It returns a quantizer, a DelayedScalingRequest, or None
            to keep the tensor in high precision.
        fp8_format: Any format; the factory chooses the formats.
        quantization_alignment: Row count that the padding of grouped inputs rounds up to.

    The other arguments are as in `DelayedScaling`.
    """

    qfactory: Callable[..., Any] | None = None
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = default_value("NVTE_BACKWARD_OVERRIDE")
    quantization_alignment: int = 128

    def _check(self) -> None:
        if not callable(self.qfactory):
            raise ValueError(
                f"CustomRecipe: qfactory={self.qfactory!r}; pass a callable(role) -> quantizer"
            )
        check_minimum(self, "quantization_alignment", 1)
        require_fp8(self, tuple(Format))  # the factory chooses the elements
