"""Tensor statistics as sums, minima and maxima, which merge over micro-batches and ranks.

A measure reduces a tensor to a float64 vector on the tensor's device. Vectors from several tensors are merged field by
field (`merged`); the joint statistics follow from the merged vector on the host. The result equals the statistics of
the concatenated tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.primitives.operand import COLUMNWISE, ROWWISE
from transformer_engine.pytorch.primitives.quantize import dequantize
from transformer_engine.pytorch.tensor.quantized_tensor import get_storage
from transformer_engine.pytorch.tensor.storage.quantized_tensor_storage import plain_matrix

SUM, MIN, MAX, SQUARES = "sum", "min", "max", "squares"
_NEUTRAL = {SUM: 0.0, SQUARES: 0.0, MIN: math.inf, MAX: -math.inf}

# Fields for value statistics. `squares` are sums of squared deviations from the mean.
MOMENTS = {
    "count": SUM,
    "sum": SUM,
    "deviations": SQUARES,
    "min": MIN,
    "max": MAX,
    "l1": SUM,
    "l2": SUM,
    "nonzero_amin": MIN,
}
# Fields for quantization statistics.
ERRORS = {
    "count": SUM,
    "lost": SUM,
    "clipped": SUM,
    "scale_inv_min": MIN,
    "scale_inv_max": MAX,
    "error": SUM,
}


class BlockwiseDynamicRangeStat(NamedTuple):
    """The statistic `max_blockwise_dynamic_range`: the largest log2(amax) - log2(nonzero amin) in a block.

    Attributes:
        block_size: Number of consecutive elements per block, in each dimension.
        dims: 1 for row blocks, 2 for square matrix blocks.
        max_over_orientations: Take the maximum over the matrix and its transpose.
    """

    block_size: int = 32
    dims: int = 1
    max_over_orientations: bool = False

    def __str__(self) -> str:
        suffix = "_max_over_orientations" if self.max_over_orientations else ""
        return f"max_blockwise_dynamic_range_block_size_{self.block_size}_dims_{self.dims}{suffix}"


def compute_max_blockwise_dynamic_range(
    tensor: Tensor, stat_config: BlockwiseDynamicRangeStat
) -> Tensor:
    """Compute the largest dynamic range among the blocks of a tensor [.., K], float64 []; 0 if all elements are 0.

    The last dimension and, for two dimensions, the rows may end in a smaller block.
    """
    matrix = plain_matrix(tensor).abs().float()
    ranges = [_largest_range(matrix, stat_config)]
    if stat_config.max_over_orientations and stat_config.dims == 1:
        ranges.append(_largest_range(matrix.t(), stat_config))
    return torch.stack(ranges).max()


def _largest_range(matrix: Tensor, stat: BlockwiseDynamicRangeStat) -> Tensor:
    size, (rows, columns) = stat.block_size, matrix.shape
    below = -rows % size if stat.dims == 2 else 0
    padded = torch.nn.functional.pad(matrix, (0, -columns % size, 0, below))
    height = size if stat.dims == 2 else 1
    blocks = padded.reshape(padded.shape[0] // height, height, -1, size)
    largest = blocks.amax((1, 3)).double()
    smallest = blocks.where(blocks != 0, math.inf).amin((1, 3)).double()
    ranges = torch.where(largest > 0, largest.log2() - smallest.log2(), 0.0)
    return ranges.max() if ranges.numel() else ranges.new_zeros(())


class Fields(NamedTuple):
    """Names for a vector's fields, and how each merges."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, fields: dict[str, str]) -> Fields:
        return cls(tuple(fields), tuple(fields.values()))

    def neutral(self) -> Tensor:
        """Build the vector for zero elements."""
        return torch.tensor(
            [_NEUTRAL[kind] for kind in self.kinds], dtype=torch.float64, device="cpu"
        )

    def merged(self, vectors: Tensor) -> Tensor:
        """Merge the vectors into the vector for all tensors together.

        Args:
            vectors: One row per tensor [n, number of fields].
        """
        columns = []
        for i, kind in enumerate(self.kinds):
            column = vectors[:, i]
            if kind == SQUARES:
                counts, sums = (vectors[:, self.names.index(name)] for name in ("count", "sum"))
                means = sums / counts.clamp(min=1.0)
                mean = sums.sum() / counts.sum().clamp(min=1.0)
                columns.append(column.sum() + (counts * (means - mean).square()).sum())
            elif kind == SUM:
                columns.append(column.sum())
            else:
                columns.append(column.amin() if kind == MIN else column.amax())
        return torch.stack(columns)


def moments(tensor: Tensor, blockwise: Sequence[BlockwiseDynamicRangeStat] = ()) -> Tensor:
    """Compute the fields `MOMENTS` of a tensor, and one field for each blockwise statistic, as float64."""
    values = plain_matrix(tensor)
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    total = values.sum(dtype=torch.float64)
    mean = total / values.numel()
    magnitudes = values.abs()
    fields = [
        torch.full_like(total, values.numel()),
        total,
        (values - mean).square().sum(dtype=torch.float64),
        values.amin().double(),
        values.amax().double(),
        magnitudes.sum(dtype=torch.float64),
        magnitudes.double().square().sum(),
        magnitudes.where(magnitudes != 0, math.inf).amin().double(),
    ]
    return torch.stack(
        [*fields, *(compute_max_blockwise_dynamic_range(values, stat) for stat in blockwise)]
    )


def errors(tensor: Tensor, quantized: Any, columnwise: bool, largest: float | None) -> Tensor:
    """Compute the fields `ERRORS` of a quantization.

    Args:
        tensor: The values [.., K].
        quantized: The quantized tensor, with codes in this direction.
        columnwise: Read the column-wise codes.
        largest: The largest magnitude of the code format, to count clipped elements; None to leave them out.
    """
    operand = get_storage(quantized).contract(COLUMNWISE if columnwise else ROWWISE)
    values, scale = plain_matrix(tensor).float(), operand.scale
    values = values.t() if columnwise else values
    decoded = dequantize(operand._replace(dtype=torch.float32))
    assert scale is not None
    scale = torch.exp2(scale.float() - 127.0) if scale.dtype == torch.uint8 else scale.float()
    zero = torch.zeros((), dtype=torch.float64, device=values.device)
    clipped = zero
    if largest is not None:
        clipped = (
            ((operand.codes.float().abs() == largest) & (values.abs() > decoded.abs()))
            .sum()
            .double()
        )
    fields = [
        torch.full_like(zero, values.numel()),
        (torch.count_nonzero(values) - torch.count_nonzero(decoded)).double(),
        clipped,
        scale.amin().double(),
        scale.amax().double(),
        (values - decoded).square().sum(dtype=torch.float64),
    ]
    return torch.stack(fields)


def _dynamic_range(fields: dict[str, float]) -> float:
    amax, amin = max(abs(fields["min"]), abs(fields["max"])), fields["nonzero_amin"]
    return math.log2(amax) - math.log2(amin) if 0.0 < amax < math.inf and amin < math.inf else 0.0


def _std(fields: dict[str, float]) -> float:
    return (
        math.sqrt(fields["deviations"] / (fields["count"] - 1)) if fields["count"] > 1 else math.nan
    )


# Statistics by their names in configuration files, from merged fields.
OF_VALUES: dict[str, Callable[[dict[str, float]], float]] = {
    "min": lambda fields: fields["min"],
    "max": lambda fields: fields["max"],
    "mean": lambda fields: fields["sum"] / fields["count"],
    "std": _std,
    "l1_norm": lambda fields: fields["l1"],
    "l2_norm": lambda fields: math.sqrt(fields["l2"]),
    "cur_amax": lambda fields: max(abs(fields["min"]), abs(fields["max"])),
    "dynamic_range": _dynamic_range,
}
OF_ERRORS: dict[str, Callable[[dict[str, float]], float]] = {
    "underflows%": lambda fields: 100.0 * fields["lost"] / fields["count"],
    "overflows%": lambda fields: 100.0 * fields["clipped"] / fields["count"],
    "scale_inv_min": lambda fields: fields["scale_inv_min"],
    "scale_inv_max": lambda fields: fields["scale_inv_max"],
    "mse": lambda fields: fields["error"] / fields["count"],
}
