"""DumpTensors: layer tensors in files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from nvdlfw_inspect.logging import get_logger
from nvdlfw_inspect.registry import api_method
from torch import Tensor

from transformer_engine.debug.features import next_enabled_iter
from transformer_engine.debug.features.api import TEConfigAPIMapper, feature


def dump_path(layer_name: str, tensor_name: str, iteration: int) -> Path:
    """Path of a tensor's file: tensor_dumps/rank_R/iter_NNNNNN/<layer>_<tensor>.pt in the log files' folder.

    Characters other than letters, digits, "-" and "_" become "_".
    """
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if initialized else 0
    name = re.sub(r"[^\w-]", "_", f"{layer_name}_{tensor_name}", flags=re.ASCII)
    folder = (
        Path(get_logger().root_log_dir) / "tensor_dumps" / f"rank_{rank}" / f"iter_{iteration:06d}"
    )
    return folder / f"{name}.pt"


@feature
class DumpTensors(TEConfigAPIMapper):
    """Writes tensors to files, which `torch.load` reads, also with `weights_only=True`.

    A file has a dict: "high_precision" is the tensor as a matrix [M, K], "quantized" and "quantized_columnwise" the
    quantized tensors with the codes in the two directions, if the layer makes them. A further micro-batch in the same
    step replaces the file.

    Args:
        high_precision_tensor: Write the unquantized tensor; True by default.
        quantized_tensor: Write the quantized tensors; True by default.
        tensors: "activation", "weight", "gradient", "output", "dgrad", "wgrad", or `tensors_struct`.
        freq: Write in steps that are multiples of this number; 1 by default.
        start_step: First step; 0 by default.
        end_step: Last step; none by default.
        start_end_list: Pairs (first step, last step), instead of start_step and end_step.
    """

    @api_method
    def inspect_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Whether tensors are written in the step, and the next such step."""
        return next_enabled_iter(config, iteration)

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
        """Write the file."""
        content: dict[str, Any] = {}
        if config.get("high_precision_tensor", True):
            content["high_precision"] = tensor.detach().clone()
        if config.get("quantized_tensor", True):
            if rowwise_quantized_tensor is not None:
                content["quantized"] = rowwise_quantized_tensor
            if (
                columnwise_quantized_tensor is not None
                and columnwise_quantized_tensor is not rowwise_quantized_tensor
            ):
                content["quantized_columnwise"] = columnwise_quantized_tensor
        if content:
            path = dump_path(layer_name, tensor_name, iteration)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, path)
