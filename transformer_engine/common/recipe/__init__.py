"""Recipes: dataclasses that say which tensors are quantized to which format, and where their scales come from.

Recipes compare by value and pickle in the original's format. `MMParams` and `QParams` are frozen. The fields of recipes
may be assigned; the value is converted and checked as in the constructor, and derived fields follow their switch.

Fields accept the forms that pydantic converts, because configurations often come from YAML files and command lines:
`margin="1"`, `reduce_amax="true"`, `fp8_format=(448, 57344)`, `fp8_gemm_fprop={"use_split_accumulator": True}`.

Environment variables give defaults and are read once, when this module is imported.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ..checks import exponent, number
from ..numbers import parse_bool, parse_float, parse_int
from .field_checks import (
    at_least,
    convert_fields,
    default_of,
    instance_of_fields,
    member_of_value,
    require,
    require_fp8,
    require_kind,
)
from .living import (
    assign,
    description_of,
    enroll,
    recipe_class,
    recipe_described_as,
    revision_of,
    still_says,
)

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


class _FormatHelper(NamedTuple):
    """Largest finite magnitudes in the forward and in the backward pass."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Element formats; HYBRID is E4M3 in the forward pass and E5M2 in the backward pass."""

    E2M1 = _FormatHelper(max_fwd=6, max_bwd=6)
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=E4M3.max_fwd, max_bwd=E5M2.max_bwd)

    def __repr__(self) -> str:
        return f"Format.{self.name}"


@dataclass(frozen=True, repr=False)
class MMParams:
    """use_split_accumulator: add partial sums of a matrix product in full float32 precision."""

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        convert_fields(self, _CONVERTERS)

    def __repr__(self) -> str:
        return _describe(self)


@dataclass(frozen=True, repr=False)
class QParams:
    """How one kind of tensor is quantized; amax_epsilon is a floor under the absolute maximum."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        convert_fields(self, _CONVERTERS)
        number("QParams: amax_epsilon", self.amax_epsilon)

    def __repr__(self) -> str:
        return _describe(self)


_CONVERTERS = {  # by the type that a field declares
    "int": parse_int,
    "float": parse_float,
    "bool": parse_bool,
    "Format": member_of_value(Format),
    "MMParams": instance_of_fields(MMParams),
}


def _describe(record: Any) -> str:
    """Name(field=value, ...), written out because torch.compile cannot trace the generated repr."""
    values = [f"{f.name}={getattr(record, f.name)!r}" for f in fields(record)]
    return f"{type(record).__name__}({', '.join(values)})"


class Recipe:
    """The base of all recipes, with one predicate per family, which is true for subclasses too."""

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
        """Load a pickle, also of the original, whose recipes lack the derived fields and may lack later fields."""
        self.__dict__.update(state)
        self._convert()
        self._derive()
        enroll(self)

    def _convert(self) -> None:
        convert_fields(self, _CONVERTERS)

    def _derive(self) -> None:
        """Set the derived fields that are not set yet."""
        for name, value in self._derived().items():
            if not hasattr(self, name):  # else a subclass has fixed it as a class attribute
                setattr(self, name, value)

    def _check(self) -> None:
        """TypeError or ValueError for fields that do not go together."""

    def _derived(self) -> dict[str, QParams]:
        """The fields that follow from the switches, as these have them."""
        return {}

    def __repr__(self) -> str:
        """Return `recipe_type=DelayedScaling, margin=0, ..`: the original's repr first, then every other field."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # pyright: ignore[reportArgumentType]
        first = {name: values.pop(name) for name in ("margin", "fp4_format", "fp8_format") if name in values}
        if "fp4_format" not in first and "fp8_format" in first:
            first["format"] = first.pop("fp8_format")
        shown = [
            f"{name}={value.name if isinstance(value, Format) else value}" for name, value in first.items()
        ]
        shown += [f"{name}={value!r}" for name, value in values.items()]
        return ", ".join([f"recipe_type={type(self).__name__}", *shown])

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


@recipe_class
@dataclass(repr=False)
class DelayedScaling(Recipe):
    """scale = (fp8_max / amax) / 2^margin, where amax comes from the history of earlier steps.

    amax_compute_algo           "max", "most_recent" or callable(history [len, n]) -> amax [n]
    scaling_factor_compute_algo callable(amax, old_scale, fp8_max, recipe) -> scale
    reduce_amax                 take the maximum over amax_reduction_group of autocast
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = default_of("NVTE_BACKWARD_OVERRIDE")

    def _check(self) -> None:
        require_fp8(self, (Format.E4M3, Format.HYBRID))
        require(self, "backward_override", (None,), "use another recipe or unset NVTE_BACKWARD_OVERRIDE")
        exponent("DelayedScaling: margin", self.margin)
        at_least(self, "amax_history_len", 0)
        if not callable(self.amax_compute_algo):
            require(self, "amax_compute_algo", ("max", "most_recent"), "or pass a callable(history) -> amax")
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise ValueError(
                f"DelayedScaling: scaling_factor_compute_algo={self.scaling_factor_compute_algo!r}; it must "
                "be None or callable(amax, old_scale, fp8_max, recipe) -> scale"
            )


@recipe_class
@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """scale = fp8_max / max|x|, measured on the tensor itself, floored to a power of two when asked.

    The derived fields fp8_quant_* follow use_power_2_scales; assign to treat one kind of tensor apart.
    """

    use_power_2_scales: bool = bool(default_of("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"))
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = default_of("NVTE_BACKWARD_OVERRIDE")
    fp8_quant_fwd_inp: QParams = field(init=False)
    fp8_quant_fwd_weight: QParams = field(init=False)
    fp8_quant_bwd_grad: QParams = field(init=False)

    def _check(self) -> None:
        require_fp8(self, (Format.E4M3, Format.HYBRID))
        require_kind(self, MMParams, "fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
        require_kind(self, QParams, *_FP8_QUANT)

    def _derived(self) -> dict[str, QParams]:
        return dict.fromkeys(_FP8_QUANT, QParams(power_2_scale=self.use_power_2_scales))


@recipe_class
@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    """One scale for 1 x 128 (dimension 1) or 128 x 128 (dimension 2) elements, a power of two by default.

    No matrix product may have two operands of dimension 2, and partial sums are always split.
    """

    use_f32_scales: bool = bool(default_of("NVTE_FP8_BLOCK_SCALING_FP32_SCALES"))
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = default_of("NVTE_BACKWARD_OVERRIDE")
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
            require(self, name, (MMParams(use_split_accumulator=True),), "block scales need split sums")
        require(self, "fp8_dpa", (False,), "attention takes DelayedScaling or Float8CurrentScaling")
        require(self, "fp8_mha", (False,), "attention takes DelayedScaling or Float8CurrentScaling")
        require_kind(self, QParams, *_FP8_QUANT)

    def _derived(self) -> dict[str, QParams]:
        return dict.fromkeys(_FP8_QUANT, QParams(power_2_scale=not self.use_f32_scales))


@recipe_class
@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale (E8M0) for 32 consecutive elements of the contracted axis.

    margin                  without effect, and with a warning where it is not 0: scales follow from blocks alone
    enable_2d_quantization  weights share a scale over 32 x 32 elements, equal in both directions
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = default_of("NVTE_BACKWARD_OVERRIDE")
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
    """E2M1 elements; an E4M3 scale for 16 of them, and one float32 scale for the tensor.

    Activations and gradients pass a random Hadamard transform before weight gradients, gradients are rounded
    stochastically, weights share scales over 16 x 16 elements; each can be switched off.
    """

    disable_rht: bool = bool(default_of("NVTE_NVFP4_DISABLE_RHT"))
    disable_stochastic_rounding: bool = bool(default_of("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"))
    disable_2d_quantization: bool = bool(default_of("NVTE_NVFP4_DISABLE_2D_QUANTIZATION"))
    row_scaled_activation: bool = bool(default_of("NVTE_NVFP4_ROW_SCALED_ACTIVATION"))
    nvfp4_4over6: str = str(default_of("NVTE_NVFP4_4OVER6"))
    nvfp4_4over6_e4m3_use_256: str = str(default_of("NVTE_NVFP4_4OVER6_E4M3_USE_256"))
    nvfp4_4over6_err_mode: str = str(default_of("NVTE_NVFP4_4OVER6_ERR_MODE"))
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = default_of("NVTE_BACKWARD_OVERRIDE")
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

    def _derived(self) -> dict[str, QParams]:
        transform, draws = not self.disable_rht, not self.disable_stochastic_rounding
        made = (
            QParams(random_hadamard_transform=transform),
            QParams(fp4_2d_quantization=not self.disable_2d_quantization),
            QParams(random_hadamard_transform=transform, stochastic_rounding=draws),
        )
        return dict(zip(_FP4_QUANT, made, strict=True))


@recipe_class
@dataclass(repr=False)
class CustomRecipe(Recipe):
    """qfactory(role) -> quantizer, called once for every quantizer slot of a module.

    The role is a str ("linear_input", "linear_weight", "linear_output", "linear_grad_output" or
    "linear_grad_input") with the fields module_type, tensor_type and name; None where a module says so.
    It returns a quantizer, a DelayedScalingRequest, or None to keep the tensor in high precision.
    quantization_alignment: rows that padding of grouped inputs rounds up to.
    """

    qfactory: Callable[..., Any] | None = None
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    quantization_alignment: int = 128
    backward_override: str | None = default_of("NVTE_BACKWARD_OVERRIDE")

    def _check(self) -> None:
        if not callable(self.qfactory):
            raise ValueError(f"CustomRecipe: qfactory={self.qfactory!r}; pass a callable(role) -> quantizer")
        at_least(self, "quantization_alignment", 1)
        require_fp8(self, tuple(Format))  # the factory chooses the elements
