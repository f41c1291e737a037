"""LogTensorStats: value statistics for a layer's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvdlfw_inspect.registry import api_method
from torch import Tensor

from transformer_engine.debug.features import configured_stats, next_enabled_iter
from transformer_engine.debug.features.api import TEConfigAPIMapper, feature
from transformer_engine.debug.features.utils.stats_buffer import STATS_BUFFERS, Statistic
from transformer_engine.debug.features.utils.stats_computation import (
    MAX,
    MOMENTS,
    OF_VALUES,
    BlockwiseDynamicRangeStat,
    Fields,
    moments,
)

_BLOCKWISE = "max_blockwise_dynamic_range"
_BOTH_ORIENTATIONS = ("activation", "weight", "gradient")


@feature
class LogTensorStats(TEConfigAPIMapper):
    """Logs statistics of unquantized tensors, one value per step, over all its micro-batches.

    Statistics are computed on the device; `debug_api.step()` reduces them over the reduction group and waits for them.

    Args:
        stats: "min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax" (the largest magnitude), "dynamic_range"
            (log2 of the largest magnitude over the smallest nonzero one), or the mapping `{max_blockwise_dynamic_range:
            {block_size: 32, dims: 1}}`. For activation, weight and gradient, row blocks are also taken from the
            transpose, and the maximum is logged.
        tensors: "activation", "weight", "gradient", "output", "dgrad", "wgrad".
        tensors_struct: One mapping per tensor, with individual settings, instead of `tensors`.
        freq: Log steps that are multiples of this number; 1 by default.
        start_step: First step; 0 by default.
        end_step: Last step; none by default.
        start_end_list: Pairs (first step, last step), instead of start_step and end_step.

    Example:
        ```yaml
        statistics:
          enabled: True
          layers:
            layer_types: [linear]
          transformer_engine:
            LogTensorStats:
              enabled: True
              tensors: [activation, gradient]
              stats: [min, max, std]
              freq: 10
        ```
    """

    @api_method
    def inspect_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Whether the step is logged, and the next such step."""
        fields, statistics = _layout(configured_stats(config), tensor_name)
        enabled, following = next_enabled_iter(config, iteration)
        if enabled:
            STATS_BUFFERS.add("values", layer_name, tensor_name, iteration, fields, statistics)
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
        """Add a tensor's statistics to the step's statistics."""
        if tensor.numel() and STATS_BUFFERS.wants("values", layer_name, tensor_name):
            vector = moments(tensor, _blockwise(config["stats"], tensor_name))
            STATS_BUFFERS.feed("values", layer_name, tensor_name, vector, tp_group, tp_size)


def _blockwise(stats: Sequence[Any], tensor_name: str) -> list[BlockwiseDynamicRangeStat]:
    """Blockwise statistics in a configuration."""
    block_stats = []
    for stat in stats:
        if stat == _BLOCKWISE or (isinstance(stat, dict) and _BLOCKWISE in stat):
            settings = (stat[_BLOCKWISE] if isinstance(stat, dict) else None) or {}
            unknown = sorted(set(settings) - {"block_size", "dims"})
            if unknown:
                raise AssertionError(
                    f"{_BLOCKWISE} has no settings {unknown}; give block_size and dims"
                )
            size, dims = settings.get("block_size", 32), settings.get("dims", 1)
            if not isinstance(size, int) or size <= 0:
                raise AssertionError(f"{_BLOCKWISE}: block_size={size!r}; give a positive number")
            if dims not in (1, 2):
                raise AssertionError(
                    f"{_BLOCKWISE}: dims={dims!r}; choose 1 (of a row) or 2 (square)"
                )
            block_stats.append(
                BlockwiseDynamicRangeStat(size, dims, tensor_name in _BOTH_ORIENTATIONS)
            )
    return block_stats


def _layout(stats: Sequence[Any], tensor_name: str) -> tuple[Fields, dict[str, Statistic]]:
    """Fields and statistics for a configuration; AssertionError for an unknown statistic."""
    blockwise = [str(stat) for stat in _blockwise(stats, tensor_name)]
    for stat in stats:
        supported = (
            stat in (*OF_VALUES, _BLOCKWISE)
            if isinstance(stat, str)
            else list(stat) == [_BLOCKWISE]
        )
        if not supported:
            names = ", ".join([*OF_VALUES, _BLOCKWISE])
            raise AssertionError(f"the statistic {stat!r} is unknown; choose from {names}")
    named: dict[str, Statistic] = {
        stat: OF_VALUES[stat] for stat in stats if isinstance(stat, str) and stat in OF_VALUES
    }
    named |= {name: (lambda fields, name=name: fields[name]) for name in blockwise}
    return Fields.of(MOMENTS | dict.fromkeys(blockwise, MAX)), named
