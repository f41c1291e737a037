"""STATS_BUFFERS: the statistics of a step, collected until `debug_api.step()` writes them.

Buffers are created between steps, on every rank that has the layer. Therefore all ranks in a reduction group have the
same buffers in the same order, even if a rank does not call a layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.debug.features.utils.stats_computation import Fields
from transformer_engine.debug.pytorch.debug_state import TEDebugState

Statistic = Callable[[dict[str, float]], float]


class StatsBuffer:
    """Statistics for one tensor in one step.

    Attributes:
        layer_name: Layer name.
        tensor_name: Tensor name.
        iteration: The step.
        fields: The fields of the vector.
        statistics: {name: its value from the fields}.
        vector: The merged fields of the step's tensors; None before the first.
        tp_group: The layer's tensor-parallel group, if it is sharded.
        tp_size: Number of ranks in the group.
    """

    def __init__(
        self,
        layer_name: str,
        tensor_name: str,
        iteration: int,
        fields: Fields,
        statistics: dict[str, Statistic],
    ):
        self.layer_name, self.tensor_name, self.iteration = layer_name, tensor_name, iteration
        self.fields, self.statistics = fields, statistics
        self.vector: Tensor | None = None
        self.tp_group: Any = None
        self.tp_size = 1

    def feed(self, vector: Tensor, tp_group: Any, tp_size: int) -> None:
        """Merge the fields of a further tensor. A weight is the same in all micro-batches, and fed once per step."""
        self.tp_group, self.tp_size = tp_group, tp_size
        if self.vector is None:
            self.vector = vector
        elif self.tensor_name != "weight":
            self.vector = self.fields.merged(
                torch.stack([self.vector, vector.to(self.vector.device)])
            )

    def group(self) -> tuple[bool, Any]:
        """Whether the statistics are reduced over ranks, and over which group; None for all ranks."""
        import nvdlfw_inspect.api as debug_api

        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return False, None
        if self.tensor_name != "weight":
            return True, debug_api.get_tensor_reduction_group()
        sharded = self.tp_size > 1 and self.tp_group is not None
        return sharded and TEDebugState.weight_tensor_tp_group_reduce, self.tp_group

    def log(self, vector: Tensor) -> None:
        """Write statistics from merged fields; nothing if no rank has fed an element."""
        from nvdlfw_inspect.logging import MetricLogger

        fields = dict(zip(self.fields.names, vector.tolist(), strict=True))
        if fields["count"] == 0.0:
            return
        for name, statistic in self.statistics.items():
            full = f"{self.layer_name}_{self.tensor_name}_{name}"
            MetricLogger.log_scalar(full, statistic(fields), self.iteration)


class StatsBuffers:
    """The buffers of a step by feature, layer and tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[tuple[str, str, str], StatsBuffer] = {}

    def add(
        self,
        feature: str,
        layer_name: str,
        tensor_name: str,
        iteration: int,
        fields: Fields,
        statistics: dict[str, Statistic],
    ) -> None:
        """Make the buffer of a tensor for a step; keep it if it exists."""
        key = (feature, layer_name, tensor_name)
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None or (buffer.iteration, buffer.fields.names) != (
                iteration,
                fields.names,
            ):
                self._buffers[key] = StatsBuffer(
                    layer_name, tensor_name, iteration, fields, statistics
                )

    def wants(self, feature: str, layer_name: str, tensor_name: str) -> bool:
        """Whether a tensor is to be fed: a weight is fed once per step."""
        buffer = self._buffers.get((feature, layer_name, tensor_name))
        return buffer is not None and (buffer.vector is None or tensor_name != "weight")

    def feed(
        self,
        feature: str,
        layer_name: str,
        tensor_name: str,
        vector: Tensor,
        tp_group: Any,
        tp_size: int,
    ) -> None:
        """Add the fields of a tensor to its buffer."""
        with self._lock:
            self._buffers[feature, layer_name, tensor_name].feed(vector.detach(), tp_group, tp_size)

    def log_stats(self) -> None:
        """Reduce the buffers over their groups, write their statistics, and remove them."""
        with self._lock:
            buffers = list(self._buffers.values())
            self._buffers.clear()
        groups: dict[int, tuple[Any, list[StatsBuffer]]] = {}
        alone: list[StatsBuffer] = []
        for buffer in buffers:
            reduces, group = buffer.group()
            if reduces:
                groups.setdefault(id(group), (group, []))[1].append(buffer)
            else:
                alone.append(buffer)
        reduced = {id(buffer): buffer.vector for buffer in alone if buffer.vector is not None}
        for group, members in groups.values():
            reduced |= _reduce_over_ranks(group, members)
        for buffer in buffers:
            if id(buffer) in reduced:
                buffer.log(reduced[id(buffer)])

    def reset(self) -> None:
        """Remove all buffers without writing them."""
        with self._lock:
            self._buffers.clear()


def _reduce_over_ranks(group: Any, buffers: list[StatsBuffer]) -> dict[int, Tensor]:
    """Merge {buffer id: fields} over all ranks of a group, by one collective."""
    vectors = [
        buffer.fields.neutral() if buffer.vector is None else buffer.vector.cpu()
        for buffer in buffers
    ]
    sizes = [vector.numel() for vector in vectors]
    on_gpu = torch.distributed.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    sent = torch.cat(vectors).to(device)
    received = [torch.empty_like(sent) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(received, sent, group=group)
    parts = torch.stack(received).cpu().split(sizes, dim=1)
    return {
        id(buffer): buffer.fields.merged(part) for buffer, part in zip(buffers, parts, strict=True)
    }


STATS_BUFFERS = StatsBuffers()
