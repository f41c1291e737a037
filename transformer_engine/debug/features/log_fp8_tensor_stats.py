"""LogFp8TensorStats and LogNvfp4TensorStats: quantization error statistics for a layer's operands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from nvdlfw_inspect.registry import api_method
from torch import Tensor

from transformer_engine.common.warning import warn_once
from transformer_engine.debug.features import configured_stats, next_enabled_iter
from transformer_engine.debug.features.api import TEConfigAPIMapper, feature
from transformer_engine.debug.features.utils.stats_buffer import STATS_BUFFERS, Statistic
from transformer_engine.debug.features.utils.stats_computation import (
    ERRORS,
    OF_ERRORS,
    Fields,
    errors,
)
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

DELAYED = "fp8_delayed_scaling"
QUANTIZERS: dict[str, Any] = {
    DELAYED: Float8Quantizer,
    "fp8_current_scaling": Float8CurrentScalingQuantizer,
    "mxfp8": MXFP8Quantizer,
    "fp8_block_scaling": Float8BlockQuantizer,
    "nvfp4": NVFP4Quantizer,
}
_LARGEST = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}
_NAME = re.compile(
    rf"((?P<recipe>{'|'.join(QUANTIZERS)})_)?(?P<statistic>{'|'.join(OF_ERRORS)})(?P<columnwise>_columnwise)?"
)


class QuantizationStat(NamedTuple):
    """A configured statistic: `[recipe_]statistic[_columnwise]`.

    Attributes:
        recipe: The recipe by which a copy of the tensor is quantized; "" for the layer's quantized tensor.
        statistic: A key in `OF_ERRORS`.
        columnwise: The statistic covers the column-wise codes.
    """

    recipe: str
    statistic: str
    columnwise: bool

    @property
    def vector(self) -> tuple[str, bool]:
        """The recipe and direction, whose statistics share a vector."""
        return self.recipe, self.columnwise


def _read(
    stats: Sequence[str], statistics: tuple[str, ...], recipes: tuple[str, ...]
) -> dict[str, QuantizationStat]:
    """Parse {name: statistic} from a configuration.

    Raises:
        ValueError: A statistic is unknown, or its recipe does not have it.
    """
    requested = {}
    for name in stats:
        match = _NAME.fullmatch(name)
        if (
            match is None
            or match["statistic"] not in statistics
            or (match["recipe"] or "") not in ("", *recipes)
        ):
            raise ValueError(
                f"the statistic {name!r} is unknown; choose {', '.join(statistics)}, with one of the prefixes "
                f"{', '.join(f'{recipe}_' for recipe in recipes)} or none, and with the suffix _columnwise or none"
            )
        stat = QuantizationStat(
            match["recipe"] or "", match["statistic"], match["columnwise"] is not None
        )
        if stat.statistic == "overflows%" and stat.recipe not in ("", DELAYED):
            raise ValueError(
                f"the statistic {name!r} does not exist: only delayed scaling has overflows, because the other "
                "recipes scale by the maximum of the tensor itself"
            )
        requested[name] = stat
    return requested


@feature
class LogFp8TensorStats(TEConfigAPIMapper):
    """Logs statistics of operand quantization to FP8, one value per step, over all micro-batches.

    | statistic | value |
    | --- | --- |
    | `underflows%` | share of elements that are not 0 and become 0, in percent |
    | `overflows%` | share of elements that exceed the largest code, in percent; delayed scaling only |
    | `scale_inv_min`, `scale_inv_max` | the smallest and the largest factor of the codes |
    | `mse` | mean of the squared quantization errors |

    A statistic for the layer's recipe has no prefix. A prefix names a recipe by which a copy of the tensor is
    quantized: `mxfp8_mse`. The suffix `_columnwise` selects the column-wise codes.

    Args:
        stats: The statistics. Prefixes are "fp8_delayed_scaling_" (if it is the layer's recipe), "mxfp8_",
            "fp8_current_scaling_" and "fp8_block_scaling_".
        tensors: "activation", "weight", "gradient".
        tensors_struct: One mapping per tensor, with individual settings, instead of `tensors`.
        freq: Log steps that are multiples of this number; 1 by default.
        start_step: First step; 0 by default.
        end_step: Last step; none by default.
        start_end_list: Pairs (first step, last step), instead of start_step and end_step.
    """

    statistics = tuple(OF_ERRORS)
    recipes = tuple(name for name in QUANTIZERS if name != "nvfp4")

    @api_method
    def inspect_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Whether the step is logged, and the next such step."""
        stats = _read(configured_stats(config), self.statistics, self.recipes)
        enabled, following = next_enabled_iter(config, iteration)
        if enabled:
            for recipe, columnwise in dict.fromkeys(stat.vector for stat in stats.values()):
                named: dict[str, Statistic] = {
                    name: OF_ERRORS[stat.statistic]
                    for name, stat in stats.items()
                    if stat.vector == (recipe, columnwise)
                }
                key = self._key(recipe, columnwise)
                STATS_BUFFERS.add(key, layer_name, tensor_name, iteration, Fields.of(ERRORS), named)
        return enabled, following

    @api_method
    def inspect_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        tensor_name: str,
        iteration: int,
        tp_group: Any,
        tensor: Tensor,
        rowwise_quantized_tensor: Any = None,
        columnwise_quantized_tensor: Any = None,
        quantizer: Any = None,
        tp_size: int = 1,
    ) -> None:
        """Add a tensor's statistics to the step's statistics; a tensor that is not quantized is left out."""
        stats = _read(config["stats"], self.statistics, self.recipes)
        current_recipe = next(
            (name for name, kind in QUANTIZERS.items() if isinstance(quantizer, kind)), ""
        )
        if quantizer is None:
            _warn_of_nothing(type(self).__name__)
            return
        self._check(stats, current_recipe)
        copies: dict[str, Any] = {}
        for recipe, columnwise in dict.fromkeys(stat.vector for stat in stats.values()):
            key = self._key(recipe, columnwise)
            if not tensor.numel() or not STATS_BUFFERS.wants(key, layer_name, tensor_name):
                continue
            quantized = columnwise_quantized_tensor if columnwise else rowwise_quantized_tensor
            if recipe not in ("", current_recipe):
                if recipe not in copies:
                    copies[recipe] = _quantized(recipe, quantizer, tensor, tensor_name)
                quantized = copies[recipe]
            if quantized is None:
                _warn_of_nothing(type(self).__name__)
                continue
            largest = (
                _LARGEST.get(quantizer.dtype)
                if current_recipe == DELAYED and recipe in ("", current_recipe)
                else None
            )
            vector = errors(tensor, quantized, columnwise, largest)
            STATS_BUFFERS.feed(key, layer_name, tensor_name, vector, tp_group, tp_size)

    def _key(self, recipe: str, columnwise: bool) -> str:
        return f"{type(self).__name__} {recipe} {columnwise}"

    def _check(self, stats: dict[str, QuantizationStat], current_recipe: str) -> None:
        """Raise ValueError for a statistic that the layer's recipe does not have."""
        for name, stat in stats.items():
            if stat.recipe == "" and current_recipe not in self.recipes:
                other = "LogFp8TensorStats" if current_recipe != "nvfp4" else "LogNvfp4TensorStats"
                raise ValueError(
                    f"the statistic {name!r} is of {' or '.join(self.recipes)}, the layer's recipe is "
                    f"{current_recipe or 'a custom recipe'}; use {other} or a prefix"
                )
            if stat.recipe == DELAYED != current_recipe:
                raise ValueError(
                    f"the statistic {name!r} needs the history of delayed scaling, the layer's recipe is "
                    f"{current_recipe or 'a custom recipe'}; choose another prefix"
                )
            if stat.statistic == "overflows%" and current_recipe != DELAYED:
                raise ValueError(
                    f"the statistic {name!r} exists for delayed scaling only, the layer's recipe is "
                    f"{current_recipe}; remove it"
                )


@feature
class LogNvfp4TensorStats(LogFp8TensorStats):
    """Logs statistics of operand quantization to NVFP4, one value per step, over all micro-batches.

    Args:
        stats: "underflows%" and "mse"; see `LogFp8TensorStats`.
        tensors: "activation", "weight", "gradient".
        tensors_struct: One mapping per tensor, with individual settings, instead of `tensors`.
        freq: Log steps that are multiples of this number; 1 by default.
        start_step: First step; 0 by default.
        end_step: Last step; none by default.
        start_end_list: Pairs (first step, last step), instead of start_step and end_step.
    """

    statistics = ("underflows%", "mse")
    recipes = ("nvfp4",)

    @api_method
    def inspect_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Whether the step is logged, and the next such step."""
        return super().inspect_tensor_enabled(config, layer_name, tensor_name, iteration)


def _quantized(recipe: str, quantizer: Any, tensor: Tensor, tensor_name: str) -> Any:
    """Quantize a copy of a tensor by a recipe to the element format of the layer's quantizer."""
    dtype = quantizer.dtype if quantizer.dtype in _LARGEST else DType.kFloat8E4M3
    settings = {}
    if recipe == "fp8_block_scaling":
        settings = {"block_scaling_dim": 2 if tensor_name == "weight" else 1}
    return QUANTIZERS[recipe](dtype, rowwise=True, columnwise=True, **settings)(tensor)


def _warn_of_nothing(name: str) -> None:
    warn_once(
        f"debug {name}",
        f"{name} leaves out tensors that are not quantized; remove their layers from its configuration",
    )
