"""Write quantized weights [M, K] from flat shards of their high-precision masters, with the full weight's scales.

Each rank of a group owns a run of a weight's elements. Maxima are reduced over the group in one collective,
so that every rank holds all scales, and the codes of its run; the caller gathers the codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...common.formats import FLOAT8
from ..primitives.quantize import Quantized, QuantizeSpec, absolute_maximum, quantize, tiles
from .block_scaling import BlockScalingQuantizer
from .elements import find_element
from .float8_tensor import Float8Quantizer
from .storage.float8_tensor_storage import Float8TensorStorage
from .storage.hybrid_tensor_storage import HybridQuantizedTensorStorage
from .storage.identity_tensor_storage import IdentityTensorStorage
from .storage.quantized_tensor_storage import QuantizedTensorStorage, matrix_shape


@dataclass(frozen=True)
class Shard:
    """Elements start .. start + len(values) in a flattened weight.

    Attributes:
        weight: The quantized weight, or one direction of a hybrid weight.
        values: The high-precision values of the run.
        start: First element of the run.
        targets: Buffers for the row-wise and column-wise codes; None for codes that are written into the weight.
    """

    weight: QuantizedTensorStorage
    values: Tensor
    start: int
    targets: tuple[Tensor | None, Tensor | None]

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


def write_shards(shards: Sequence[Shard], group: Any) -> None:
    """Quantize every shard into its weight, with maxima over the whole group (None: over this process)."""
    writers = [_writer(shard) for shard in shards]
    maxima = [amax for writer in writers for amax in writer.maxima()]
    if group is not None and maxima:
        # All in one collective.
        flat = torch.cat([amax.flatten() for amax in maxima])
        torch.distributed.all_reduce(flat, op=torch.distributed.ReduceOp.MAX, group=group)
        parts = flat.split([amax.numel() for amax in maxima])
        maxima = [part.view(amax.shape) for part, amax in zip(parts, maxima, strict=True)]
    reduced = iter(maxima)
    for writer in writers:
        writer.write(reduced)


def _writer(shard: Shard) -> _Copied | _TensorScaled | _BlockScaled | _Hybrid:
    weight = shard.weight
    if isinstance(weight, HybridQuantizedTensorStorage):
        return _Hybrid(shard)
    if isinstance(weight, IdentityTensorStorage):
        return _Copied(shard)
    if isinstance(weight, Float8TensorStorage):
        return _TensorScaled(shard, weight.writer())
    quantizer = weight.writer()
    if isinstance(quantizer, BlockScalingQuantizer):
        return _BlockScaled(shard, quantizer)
    raise TypeError(
        f"{type(weight).__name__} has no master weights; give FP8 or block-scaled weights"
    )


class _Hybrid:
    """Two directions in two formats, each written like a separate weight."""

    def __init__(self, shard: Shard):
        weight: Any = shard.weight
        quantizer: Any = weight.writer()
        if quantizer.columnwise_source != "original":
            raise NotImplementedError(
                f"master weights of columnwise_source={quantizer.columnwise_source!r} are unsupported, because the "
                'column-wise scales follow from row-wise codes of all ranks; use columnwise_source="original"'
            )
        rowwise, columnwise = shard.targets
        parts = (
            (weight.rowwise_storage, (rowwise, None)),
            (weight.columnwise_storage, (None, columnwise)),
        )
        self.writers: list[Any] = [
            _writer(replace(shard, weight=part, targets=targets))
            for part, targets in parts
            if part is not None
        ]

    def maxima(self) -> list[Tensor]:
        return [amax for writer in self.writers for amax in writer.maxima()]

    def write(self, maxima: Iterator[Tensor]) -> None:
        for writer in self.writers:
            writer.write(maxima)


@dataclass(frozen=True)
class _Copied:
    """No codes: the values are copied."""

    shard: Shard

    def maxima(self) -> list[Tensor]:
        return []

    def write(self, maxima: Iterator[Tensor]) -> None:
        shard = self.shard
        target = next((target for target in shard.targets if target is not None), None)
        weight: Any = shard.weight
        run = weight._data.view(-1)[shard.start : shard.stop] if target is None else target.view(-1)
        run.copy_(shard.values)


@dataclass(frozen=True)
class _TensorScaled:
    """One scale per weight: the shard alone is cast."""

    shard: Shard
    quantizer: Any

    def maxima(self) -> list[Tensor]:
        return [absolute_maximum(self.shard.values)]

    def write(self, maxima: Iterator[Tensor]) -> None:
        weight: Any = self.shard.weight
        quantizer, amax = self.quantizer, next(maxima)
        delayed = isinstance(quantizer, Float8Quantizer)
        spec = QuantizeSpec(
            FLOAT8,
            find_element(weight._fp8_dtype),
            power_of_two=not delayed and quantizer.force_pow_2_scales,
            epsilon=0.0 if delayed else quantizer.amax_epsilon,
        )
        scale = quantizer.scale.reshape(1) if delayed else None
        quantized = quantize(self.shard.values.view(1, -1), spec, multiplier=scale, amax=amax)
        assert quantized.codes is not None
        if delayed:
            quantizer.record(amax)
        if weight._data is not None:
            _write_run(quantized.codes, self.shard, 0, weight._data)
        else:  # the column direction of a hybrid weight: the transpose [K, M] alone
            rows, depth = matrix_shape(weight.shape)
            _write_run(quantized.codes, self.shard, 1, weight._transpose.view(depth, rows).t())
        weight._scale_inv.copy_(quantized.scale)


class _BlockScaled:
    """Quantize with one scale per block.

    Elements of other ranks are filled with their block's maximum, so that a block which a shard boundary
    divides has the same scale on every rank. Their codes are not written."""

    def __init__(self, shard: Shard, quantizer: BlockScalingQuantizer):
        weight: Any = shard.weight
        self.shard = shard
        usages = weight.get_usages()
        self.axes = (False,) if weight.transposable and usages["rowwise"] else (False, True)
        if not (
            usages["rowwise"] and usages["columnwise"]
        ):  # a hybrid weight's part, or a dropped direction
            self.axes = (False,) if usages["rowwise"] else (True,)
        self.spec = quantizer.spec(True, False)
        if True in self.axes and weight.COLUMNS_TRANSPOSED:
            raise ValueError(
                f"{type(weight).__name__} with one-dimensional blocks cannot be written from shards, because its "
                "column-wise codes are transposed; quantize weights in two-dimensional blocks"
            )
        if shard.start % self.spec.format.packing or shard.stop % self.spec.format.packing:
            raise ValueError(
                f"a shard of elements {shard.start}:{shard.stop} cuts a byte of {self.spec.format.packing} codes; "
                "align shards to bytes"
            )
        self.rows, self.depth = matrix_shape(weight.shape)
        if self.spec.four_over_six and (shard.start > 0 or shard.stop < self.rows * self.depth):
            raise ValueError(
                f"a shard of elements {shard.start}:{shard.stop} of a weight with 4over6 cannot be quantized alone, "
                "because 4over6 compares the errors of whole blocks; quantize whole weights, or set the recipe's "
                '4over6 to "activations" or "none"'
            )
        positions = torch.arange(self.rows * self.depth, device=shard.values.device)
        self.owned = ((positions >= shard.start) & (positions < shard.stop)).view(
            self.rows, self.depth
        )
        matrix = shard.values.new_zeros(self.rows * self.depth)
        matrix[shard.start : shard.stop] = shard.values
        self.matrix = matrix.view(self.rows, self.depth)

    def _cut(self, transposed: bool) -> Tensor:
        assert self.spec.tile is not None
        return tiles.cut(self.matrix.t() if transposed else self.matrix, self.spec.tile)

    def maxima(self) -> list[Tensor]:
        return [tiles.tile_amax(self._cut(transposed)) for transposed in self.axes]

    def write(self, maxima: Iterator[Tensor]) -> None:
        weight: Any = self.shard.weight
        packing = self.spec.format.packing
        for transposed in self.axes:
            amax = next(maxima)
            # Elements of other ranks have their block's maximum.
            matrix, owned = (
                (self.matrix.t(), self.owned.t()) if transposed else (self.matrix, self.owned)
            )
            maximum = tiles.spread(amax).expand(self._cut(transposed).shape)
            filled = tiles.join(maximum, (matrix.shape[0], matrix.shape[1])).to(matrix.dtype)
            part = quantize(torch.where(owned, matrix, filled), self.spec)
            assert part.codes is not None
            if transposed:
                part = Quantized(codes_t=part.codes, scale_t=part.scale)
            packed: Any = weight.storage_class().pack(part, weight.shape, **weight.constants())
            prefix = "_columnwise" if transposed else "_rowwise"
            start, stop = self.shard.start // packing, self.shard.stop // packing
            run = getattr(packed, f"{prefix}_data").reshape(-1)[start:stop]
            _write_run(run, self.shard, int(transposed), getattr(weight, f"{prefix}_data"), packing)
            getattr(weight, f"{prefix}_scale_inv").copy_(getattr(packed, f"{prefix}_scale_inv"))
            if part.amax is not None:
                weight._amax_rowwise.copy_(part.amax)


def _write_run(codes: Tensor, shard: Shard, direction: int, data: Tensor, packing: int = 1) -> None:
    """Copy a shard's codes into its target, or into their place in the weight's codes."""
    codes = codes.reshape(-1).view(torch.uint8)
    target = shard.targets[direction]
    if target is not None:
        target.view(-1).copy_(codes)
        return
    # A view, except for column-wise MXFP8 codes, which are stored transposed.
    flat = data.reshape(-1)
    flat[shard.start // packing : shard.stop // packing].copy_(codes)
    if flat.data_ptr() != data.data_ptr():
        data.copy_(flat.view(data.shape))
