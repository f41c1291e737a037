"""Base class for block-scaled quantizers: codes, scales = quantize(x [M, K], spec), packed into their storage."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ...common.formats import round_up
from ..constants import DType
from ..fast.symbols import Symbol
from ..primitives.operand import Operand
from ..primitives.quantize import Quantized, QuantizeSpec, quantize
from ..runtime.device import current_hardware
from .elements import empty_quantized
from .padded_groups import TILE, PaddedGroups, transposed_codes, transposed_scales
from .quantized_tensor import QuantizedTensor
from .quantizer import Operands, Quantizer
from .storage.block_scaled import BlockScaledStorage, padded
from .storage.quantized_tensor_storage import QuantizedTensorStorage, matrix_shape, plain_matrix

T = TypeVar("T", bound=QuantizedTensor)
_PLAIN = (Tensor, torch.nn.Parameter, Symbol)
DIRECTIONS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def tensor_fields(tensor: QuantizedTensor, names: Sequence[str]) -> tuple[Any, ...]:
    """Return the tensor's fields, with its nominal dtype and shape."""
    return tuple(
        getattr(tensor, name if name in ("dtype", "shape") else f"_{name}") for name in names
    )


def from_values(kind: type[T], names: Sequence[str], values: Sequence[Any]) -> T:
    """Return an object with `tensor_fields(another, names)`; fields that an older pickle lacks get their defaults."""
    fields = dict(zip(names, values, strict=False))
    return kind(fields.pop("shape"), fields.pop("dtype"), **fields)


class BlockScalingQuantizer(Quantizer):
    """Quantizer without state. Quantizers with equal settings are equal.

    Attributes:
        TENSOR: Quantized tensor class.
        MULTIPLE: Divisor of the last dimension and, column-wise, of the other dimensions' product.
        VECTORS: Whether tensors of fewer than two dimensions are supported, as a matrix of one row.
    """

    MULTIPLE: ClassVar[int]
    VECTORS: ClassVar[bool] = False
    transposes_scales: bool = False  # row-wise scales [blocks, rows] instead of [rows, blocks]

    dtype: DType

    def spec(self, rowwise: bool, columnwise: bool) -> QuantizeSpec:
        """Settings for the quantize operation."""
        raise NotImplementedError

    def constants(self) -> dict[str, Any]:
        """Return the storage's constructor keywords that this quantizer determines."""
        raise NotImplementedError

    def _quantized(self, matrix: Tensor, spec: QuantizeSpec) -> Quantized:
        return quantize(matrix, spec)

    def encode(
        self, tensor: Tensor, rowwise: bool, columnwise: bool, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensorStorage:
        reason = self.unsupported_shape_reason(tensor.shape, rowwise, columnwise)
        if reason is not None:
            raise ValueError(
                f"{type(self).__name__} cannot quantize shape {tuple(tensor.shape)}: {reason}"
            )
        spec = self.spec(rowwise, columnwise)
        quantized = self._quantized(plain_matrix(tensor), _tiled(spec) if self._swizzles else spec)
        return self._packed(quantized, tensor.shape, tensor.dtype, tiled=self._swizzles)

    def operands(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        if type(self).encode is not BlockScalingQuantizer.encode:
            return super().operands(matrix, rowwise, columnwise)
        spec = self.spec(rowwise, columnwise)
        return self._operands(matrix, _tiled(spec) if self._swizzles else spec)

    @property
    def makes_tiles(self) -> bool:
        """Whether `tiled_operands` is supported: the format has one-byte scales, and `encode` is this class's."""
        return (
            type(self).encode is BlockScalingQuantizer.encode
            and self.spec(True, False).format.swizzled
        )

    @property
    def _swizzles(self) -> bool:
        """Whether results have scales in matrix-instruction order."""
        return self.optimize_for_gemm and self.makes_tiles

    def product_operands(
        self, matrix: Tensor, rowwise: bool, columnwise: bool, split: bool
    ) -> Operands:
        """Return `operands`, with scales in matrix-instruction order where the GPU multiplies the format.

        Args:
            matrix: Values [M, K].
            rowwise: The row direction is read.
            columnwise: The column direction is read.
            split: Rows are gathered from other ranks, or split among them, which scales in that order do not allow.
        """
        if not split and type(matrix) in _PLAIN and matrix.is_cuda and self.makes_tiles:
            needs = self.spec(True, False).format.block_products
            if needs is not None and current_hardware().has(needs):
                return self.tiled_operands(matrix, rowwise, columnwise)
        return self.operands(matrix, rowwise, columnwise)

    def tiled_operands(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        """Return `operands` with scales in matrix-instruction order, which no other code can split or join."""
        return self._operands(matrix, _tiled(self.spec(rowwise, columnwise)))

    def _operands(self, matrix: Tensor, spec: QuantizeSpec) -> Operands:
        """Quantize a matrix [M, K]; codes and scales are as from `quantize`, without padding."""
        reason = self.unsupported_shape_reason(matrix.shape, spec.rowwise, spec.columnwise)
        if reason is not None:
            raise ValueError(
                f"{type(self).__name__} cannot quantize shape {tuple(matrix.shape)}: {reason}"
            )
        codes, scale, codes_t, scale_t, amax, amax_t = self._quantized(plain_matrix(matrix), spec)
        form, form_t = spec.operand_format, spec.columnwise_operand_format
        return Operands(
            None if codes is None else Operand(codes, scale, form, amax, matrix.dtype),
            None if codes_t is None else Operand(codes_t, scale_t, form_t, amax_t, matrix.dtype),
        )

    def _packed(
        self, quantized: Quantized, shape: Sequence[int], dtype: torch.dtype, *, tiled: bool = False
    ) -> QuantizedTensorStorage:
        constants = self.constants()
        if self._swizzles:
            constants |= {"with_gemm_swizzled_scales": True, "tiled": tiled}
        return self.TENSOR.STORAGE.pack(quantized, shape, quantizer=self, dtype=dtype, **constants)

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None,
        pin_memory: bool,
    ) -> QuantizedTensorStorage:
        reason = self.unsupported_shape_reason(shape, self.rowwise_usage, self.columnwise_usage)
        if reason is not None:
            raise ValueError(f"{type(self).__name__} cannot hold shape {tuple(shape)}: {reason}")
        spec = self.spec(self.rowwise_usage, self.columnwise_usage)
        storage = self._packed(empty_quantized(spec, *matrix_shape(shape), device), shape, dtype)
        return storage.mapped(Tensor.pin_memory) if pin_memory else storage

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the column-wise values for a tensor [..., K]: [K, ...], or [..., K]."""
        storage = self.TENSOR.STORAGE
        assert issubclass(storage, BlockScaledStorage)
        return (*shape[-1:], *shape[:-1]) if storage.COLUMNS_TRANSPOSED else tuple(shape)

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
        """Return the padded shape of one direction's scales; raise ValueError for an unsupported shape."""
        reason = self.unsupported_shape_reason(shape, not columnwise, columnwise)
        if reason is not None:
            raise ValueError(f"{type(self).__name__} cannot hold shape {tuple(shape)}: {reason}")
        spec = self.spec(not columnwise, columnwise)
        storage: Any = self._packed(
            empty_quantized(spec, *matrix_shape(shape), "meta"), shape, torch.float32
        )
        return tuple(
            (storage._columnwise_scale_inv if columnwise else storage._rowwise_scale_inv).shape
        )

    def shard_granularity(self, columnwise: bool) -> int | None:
        spec = self.spec(True, columnwise)
        block = spec.format.block
        # A subclass may quantize differently. Row-scaled formats' maxima differ from the shards' maxima.
        if (
            type(self).encode is not BlockScalingQuantizer.encode
            or block is None
            or spec.format.row_scaled
        ):
            return None
        return block[1] if columnwise or spec.two_dimensional else block[0]

    def groups_unsupported_reason(self) -> str | None:
        if type(self).encode is not BlockScalingQuantizer.encode:
            return f"{type(self).__name__} has its own encode"
        if self._swizzles:
            return "optimize_for_gemm=True swizzles the scales of each matrix"
        return None

    def encode_groups(self, x: Tensor, groups: PaddedGroups) -> dict[str, Tensor]:
        spec = self.spec(self.rowwise_usage, self.columnwise_usage)
        codes, scale, codes_t, scale_t, _, _ = quantize(groups.padded(x), spec)
        storage, buffers = self.TENSOR.STORAGE, {}
        assert issubclass(storage, BlockScaledStorage)
        if codes is not None and scale is not None:
            buffers["rowwise_data"] = codes.view(torch.uint8).index_select(0, groups.padded_row())
            by_row = (
                groups.transposed_row_scales(scale)
                if self.transposes_scales
                else padded(scale, 1, 4)
            )
            buffers["scale_inv"] = by_row
        if codes_t is not None and scale_t is not None:
            codes_t = codes_t.view(torch.uint8)
            if not storage.COLUMNS_TRANSPOSED:
                buffers["columnwise_data"] = codes_t.t().index_select(0, groups.padded_row())
                buffers["columnwise_scale_inv"] = padded(scale_t.t(), 1, TILE)
                return buffers
            buffers["columnwise_data"] = transposed_codes(codes_t, groups)
            by_column = self.transposes_scales
            buffers["columnwise_scale_inv"] = (
                padded(scale_t.t(), 1, 4) if by_column else transposed_scales(scale_t, groups, TILE)
            )
        return buffers

    def unsupported_shape_reason(
        self, shape: Sequence[int], rowwise: bool, columnwise: bool
    ) -> str | None:
        if self.VECTORS and not len(shape):
            return None
        if len(shape) < 2 and not self.VECTORS:
            return f"it has {len(shape)} dimensions, blocks need at least 2; view it as a matrix"
        if shape[-1] % self.MULTIPLE:
            return f"the last dimension {_advice(shape[-1], self.MULTIPLE)}"
        if columnwise and prod(shape[:-1]) % self.MULTIPLE:
            return (
                f"the product of the leading dimensions {_advice(prod(shape[:-1]), self.MULTIPLE)}"
            )
        return None


@functools.cache
def _tiled(spec: QuantizeSpec) -> QuantizeSpec:
    return replace(spec, tiled=True)


def _advice(value: int, multiple: int) -> str:
    return f"{value} is not a multiple of {multiple}; pad it to {round_up(value, multiple)}"
