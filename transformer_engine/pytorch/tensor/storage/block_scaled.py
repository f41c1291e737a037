"""Base class for block-scaled storages: codes and scales for each direction, value = code x block scale.

Row-wise codes have the values' shape [..., K]; packed codes have fewer bytes along K. Column-wise codes have
the transposed shape [K, ...] or the values' shape, and are always K-last in memory. The format's class
determines which, and the scale padding. All other properties come from the format's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....common.formats import TILED_FORMATS, TensorFormat, ceil_div, round_up
from ...constants import DType
from ...primitives.operand import COLUMNWISE, ROWWISE, Operand
from ...primitives.quantize import Quantized, dequantize, torch_dtype
from ...primitives.scale_order import check_tiles, swizzled
from ..elements import element_number, find_element
from .quantized_tensor_storage import QuantizedTensorStorage, Writer, matrix_shape


def padded(scale: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    """Return scale [r, c] padded with zeros to multiples of both; the scale itself if no padding is needed."""
    rows, columns = scale.shape
    if rows % row_multiple or columns % column_multiple:
        more_rows = round_up(rows, row_multiple) - rows
        more_columns = round_up(columns, column_multiple) - columns
        return torch.nn.functional.pad(scale, (0, more_columns, 0, more_rows))
    return scale


def _bytes(codes: Tensor) -> Tensor:
    return codes if codes.dtype is torch.uint8 else codes.view(torch.uint8)


def _detach_base(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor on the same memory, not marked as a view: sharded optimizers reject views as buffers."""
    if tensor is None or torch.compiler.is_compiling() or tensor._base is None:
        return tensor
    # one operation; an empty tensor and `set_` take six times as long on the host
    return tensor.data


class BlockScaledStorage(QuantizedTensorStorage):
    """Two independent directions, each with codes and scales. A subclass only needs a format.

    Attributes:
        ELEMENT: Attribute name that identifies the codes' element type.
        PACKING: Codes per byte.
        COLUMNS_TRANSPOSED: Whether column-wise codes have the transposed shape; otherwise they have the values' shape.
        SCALE_PADDING: Multiples to which scales [rows, blocks] are padded.
    """

    TENSORS = {
        "_rowwise_data": "rowwise_data",
        "_rowwise_scale_inv": "rowwise_scale_inv",
        "_columnwise_data": "columnwise_data",
        "_columnwise_scale_inv": "columnwise_scale_inv",
    }
    ROWWISE = ("_rowwise_data", "_rowwise_scale_inv")
    COLUMNWISE = ("_columnwise_data", "_columnwise_scale_inv")
    CONSTANTS = {"_fp8_dtype": "fp8_dtype", "_quantizer": "quantizer", "_dtype": "dtype"}
    ELEMENT: ClassVar[str] = "_fp8_dtype"
    PACKING: ClassVar[int] = 1
    COLUMNS_TRANSPOSED: ClassVar[bool] = True
    SCALE_PADDING: ClassVar[tuple[int, int]] = (128, 4)

    _rowwise_data: Tensor | None
    _rowwise_scale_inv: Tensor | None
    _columnwise_data: Tensor | None
    _columnwise_scale_inv: Tensor | None
    _fp8_dtype: DType
    _with_gemm_swizzled_scales: bool = False
    # The maxima from which a second scale level is computed, for formats that have one.
    _amax_rowwise: Tensor | None = None
    _amax_columnwise: Tensor | None = None

    def __init__(
        self,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: DType,
        quantizer: Writer | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ):
        rowwise, columnwise = (
            (rowwise_data, rowwise_scale_inv),
            (columnwise_data, columnwise_scale_inv),
        )
        self._hold(rowwise, columnwise, fp8_dtype, quantizer, dtype)

    def _hold(
        self,
        rowwise: tuple[Tensor | None, Tensor | None],
        columnwise: tuple[Tensor | None, Tensor | None],
        element: DType,
        quantizer: Writer | None,
        dtype: torch.dtype,
    ) -> None:
        """Store (codes, scales) for both directions, and the settings that every block-scaled storage has."""
        self._rowwise_data, self._rowwise_scale_inv = rowwise
        self._columnwise_data, self._columnwise_scale_inv = columnwise
        setattr(self, self.ELEMENT, element if type(element) is DType else element_number(element))
        self._quantizer = quantizer
        self._dtype = dtype

    @property
    def shape(self) -> torch.Size:
        packing, codes = self.PACKING, self._rowwise_data
        if codes is None:
            codes = self._first_tensor()
            if self.COLUMNS_TRANSPOSED and packing == 1:
                return torch.Size((*codes.shape[1:], *codes.shape[:1]))
            if self.COLUMNS_TRANSPOSED:
                return torch.Size((*codes.shape[1:-1], packing * codes.shape[-1], codes.shape[0]))
        return (
            codes.shape
            if packing == 1
            else torch.Size((*codes.shape[:-1], packing * codes.shape[-1]))
        )

    @classmethod
    def _rowwise_shape(cls, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the row-wise code shape for values [..., K]."""
        return tuple(shape) if cls.PACKING == 1 else (*shape[:-1], shape[-1] // cls.PACKING)

    @classmethod
    def _columnwise_shape(cls, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the column-wise code shape, with leading dimensions if whole bytes fill the last one."""
        if not cls.COLUMNS_TRANSPOSED:
            return tuple(shape)
        if cls.PACKING == 1:
            return (*shape[-1:], *shape[:-1])
        if len(shape) > 1 and shape[-2] % cls.PACKING == 0:
            return (shape[-1], *shape[:-2], shape[-2] // cls.PACKING)
        rows, depth = matrix_shape(shape)
        return (depth, rows // cls.PACKING)

    @property
    def transposable(self) -> bool:
        block = self.format.block
        return block is not None and block[0] == block[1]

    def contract(self, direction: str) -> Operand:
        codes = self._rowwise_data if direction == ROWWISE else self._columnwise_data
        scale = self._rowwise_scale_inv if direction == ROWWISE else self._columnwise_scale_inv
        if codes is None or scale is None:
            raise self._missing(direction)
        form, in_tiles = self._direction_format(direction), self._with_gemm_swizzled_scales
        rows, depth = matrix_shape(self.shape)
        if direction == ROWWISE:
            codes = codes.reshape(rows, depth // self.PACKING)
        elif self.COLUMNS_TRANSPOSED:
            rows, depth = depth, rows
            codes = codes.reshape(rows, depth // self.PACKING)
        else:
            # Tiles of the transpose are in memory of the transposed shape.
            scale = scale.reshape(scale.shape[::-1]) if in_tiles else scale.t()
            codes = codes.reshape(rows, depth).t()
            rows, depth = depth, rows
        assert form.block is not None
        if in_tiles:
            form, scale = TILED_FORMATS[form], self._drop_padding(scale, *scale.shape)
        else:
            scale = self._drop_padding(
                scale, ceil_div(rows, form.block[0]), ceil_div(depth, form.block[1])
            )
        element = torch_dtype(find_element(getattr(self, self.ELEMENT)))
        if codes.dtype is not element:
            codes = codes.view(element)
        amax = self._amax_rowwise if direction == ROWWISE else self._amax_columnwise
        return Operand(codes, scale, form, amax, self._dtype)

    def _direction_format(self, direction: str) -> TensorFormat:
        """Return one direction's operand format."""
        return self.format

    def _drop_padding(self, scale: Tensor, rows: int, columns: int) -> Tensor:
        """Return the scales [rows, columns] from a `_padded` result."""
        return scale[:rows, :columns]

    @classmethod
    def _padded(cls, scale: Tensor, constants: dict[str, Any]) -> Tensor:
        """Return scales in their stored layout."""
        return padded(scale, *cls.SCALE_PADDING)

    def trim_rowwise_scales(self) -> None:
        """Remove padding rows from the row-wise scales, the layout that permuted tokens use."""
        scale = self._rowwise_scale_inv
        if scale is not None:
            self._rowwise_scale_inv = scale[: matrix_shape(self.shape)[0]].contiguous()

    @classmethod
    def pack(
        cls, quantized: Quantized, shape: Sequence[int], *, tiled: bool = False, **constants: Any
    ) -> BlockScaledStorage:
        """Store codes and scales of matrices; see `QuantizedTensorStorage.pack`.

        Args:
            quantized: Codes, K last and unpadded, and scales, in row order unless `tiled`.
            shape: Value shape.
            tiled: Scales are in swizzled order, as `with_gemm_swizzled_scales` among the constants stores them.
            constants: Other constructor keywords.
        """
        in_tiles = constants.get("with_gemm_swizzled_scales", False)
        codes, scale, codes_t, scale_t = quantized[:4]
        if in_tiles and not tiled:
            scale, scale_t = (None if x is None else swizzled(x) for x in (scale, scale_t))
        transpose = None
        if codes is not None and scale is not None:
            codes, scale = _bytes(codes), cls._padded(scale, constants)
        if codes_t is not None and scale_t is not None:
            transpose, scale_t = _bytes(codes_t), cls._padded(scale_t, constants)
            if not cls.COLUMNS_TRANSPOSED:
                transpose = transpose.t()
                scale_t = scale_t.reshape(scale_t.shape[::-1]) if in_tiles else scale_t.t()
        if len(shape) != 2:  # the codes of a matrix have their shape
            codes = None if codes is None else codes.view(cls._rowwise_shape(shape))
            transpose = (
                None if transpose is None else transpose.reshape(cls._columnwise_shape(shape))
            )
        return cls(
            rowwise_data=_detach_base(codes),
            rowwise_scale_inv=_detach_base(scale),
            columnwise_data=_detach_base(transpose),
            columnwise_scale_inv=_detach_base(scale_t),
            **constants,
        )

    def _set_swizzled(self, swizzled: bool) -> None:
        """Record whether scales are in matrix-instruction order.

        Raises:
            ValueError: Swizzled scales do not fill whole tiles.
        """
        self._with_gemm_swizzled_scales = swizzled
        if swizzled:
            columns = self._columnwise_scale_inv
            if columns is not None and not self.COLUMNS_TRANSPOSED:
                columns = columns.t()
            check_tiles(self._rowwise_scale_inv, columns)

    def order_scales(self, swizzled: bool) -> BlockScaledStorage:
        """Return this payload with swizzled scales, or with scales in row order."""
        if self._with_gemm_swizzled_scales == swizzled:
            return self
        constants = {**self.constants(), "with_gemm_swizzled_scales": swizzled}
        return self.storage_class().pack(self.unpack(), self.shape, **constants)  # pyright: ignore

    def swizzle_(self) -> None:
        """Put one-byte scales in matrix-instruction order, in new memory; float32 scales stay."""
        if self.format.swizzled and not self._with_gemm_swizzled_scales:
            swizzled = self.order_scales(True)
            self._rowwise_scale_inv, self._columnwise_scale_inv = (
                swizzled._rowwise_scale_inv,
                swizzled._columnwise_scale_inv,
            )
            self._with_gemm_swizzled_scales = True

    def copy_from_storage(
        self, src: QuantizedTensorStorage, *, noop_flag: Tensor | None = None
    ) -> None:
        if isinstance(src, BlockScaledStorage):
            src = src.order_scales(self._with_gemm_swizzled_scales)
        super().copy_from_storage(src, noop_flag=noop_flag)

    def with_shape(self, shape: Sequence[int]) -> QuantizedTensorStorage | None:
        if tuple(shape[-1:]) != tuple(self.shape[-1:]):
            return None
        fields = {keyword: getattr(self, name) for name, keyword in self.TENSORS.items()}
        rowwise, columnwise = self._rowwise_data, self._columnwise_data
        if rowwise is not None:
            fields["rowwise_data"] = rowwise.view(self._rowwise_shape(shape))
        if columnwise is not None:
            fields["columnwise_data"] = columnwise.reshape(self._columnwise_shape(shape))
        return self.storage_class()(**fields, **self.constants())

    def decode(self, dtype: torch.dtype) -> Tensor:
        if self._rowwise_data is not None:
            return dequantize(self.contract(ROWWISE)._replace(dtype=dtype)).view(self.shape)
        values_t = dequantize(self.contract(COLUMNWISE)._replace(dtype=dtype))
        return self._undo_transform(values_t).t().contiguous().view(self.shape)

    def _undo_transform(self, values_t: Tensor) -> Tensor:
        """Invert the transform applied to the column direction before quantization; this class has none."""
        return values_t
