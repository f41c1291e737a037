"""QuantizedTensorStorage: the payload of a quantized tensor, value [..., K] = codes x scales, in one or two directions.

Contracting the last dimension reads row-wise data; contracting the rows reads column-wise data.
A storage is not a torch.Tensor: autograd never sees it. All leading dimensions together count as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ....common.formats import TensorFormat
from ....common.numbers import with_article
from ...primitives.operand import COLUMNWISE, ROWWISE, Operand
from ...primitives.quantize import Quantized
from ...primitives.scale_order import row_major
from ...primitives.transpose import transposed_operand
from ...runtime.checks import values_dtype
from ..custom_operand import contracted, list_attributes

__all__ = ["QuantizedTensorStorage"]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, K) for a tensor [..., K] with flattened leading dimensions."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) else (1, 1)


def plain_values(x: Any) -> Any:
    """Return the values of a quantized tensor, and any other value itself. Kernels read values from memory."""
    return x.dequantize() if isinstance(x, QuantizedTensorStorage) else x


def plain_matrix(tensor: Tensor) -> Tensor:
    """Return values [..., K] as a plain tensor [rows, K]."""
    tensor = plain_values(tensor)
    return tensor if tensor.dim() == 2 else tensor.reshape(matrix_shape(tensor.shape))


class Rebuild:
    """Callable that rebuilds a storage from tensors, with the class and constants from `flatten`.

    Not a dataclass: torch 2.11 cannot trace a call to a frozen dataclass that was created in the same graph.
    """

    def __init__(
        self, storage_class: type[QuantizedTensorStorage], constants: tuple[tuple[str, Any], ...]
    ):
        self.storage_class = storage_class
        self.constants = constants

    def __call__(self, tensors: Sequence[Tensor | None]) -> QuantizedTensorStorage:
        fields = dict(zip(self.storage_class.TENSORS.values(), tensors, strict=True))
        return self.storage_class(**fields, **dict(self.constants))

    def __eq__(self, other: object) -> bool:
        """Return whether two layouts give bytes the same meaning, regardless of quantizer and nominal dtype."""
        if not isinstance(other, Rebuild):
            return NotImplemented
        ours, theirs = (
            (
                rebuild.storage_class,
                [c for c in rebuild.constants if c[0] not in ("quantizer", "dtype")],
            )
            for rebuild in (self, other)
        )
        return ours == theirs

    def __hash__(self) -> int:
        # torch 2.11 hashes an object before its attributes exist.
        return hash(getattr(self, "storage_class", None))


class Writer(Protocol):
    """The interface of a storage to its quantizer; `Quantizer` implements it."""

    internal: bool

    def quantize(
        self,
        tensor: Tensor,
        *,
        out: QuantizedTensorStorage | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return a new quantized tensor, or a bare storage if `internal` is set."""
        ...

    def update_quantized(
        self, src: Tensor, dst: QuantizedTensorStorage, *, noop_flag: Tensor | None = None
    ) -> Any:
        """Quantize src into dst's buffers."""
        ...

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None,
        pin_memory: bool,
    ) -> QuantizedTensorStorage:
        """Return an uninitialized storage."""
        ...

    def unsupported_shape_reason(
        self, shape: Sequence[int], rowwise: bool, columnwise: bool
    ) -> str | None:
        """Return the reason why a shape is unsupported."""
        ...

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Select directions."""
        ...

    def copy(self) -> Writer:
        """Return a copy whose usages are independent."""
        ...

    def with_reduction_group(self, group: torch.distributed.ProcessGroup) -> Writer:
        """Return the quantizer for a shard whose tensor is sharded over a group."""
        ...


class QuantizedTensorStorage:
    """Codes and scales of one tensor. Subclasses declare their fields, and this class manages them.

    An abstract class without abc's metaclass, which is incompatible with torch.Tensor's.

    Attributes:
        TENSORS: {attribute: constructor keyword} for all tensors, which may be None.
        CONSTANTS: {attribute: constructor keyword} for all other fields.
        ROWWISE: Tensor attributes for row-wise data alone, with the codes first.
        COLUMNWISE: Tensor attributes for column-wise data alone, with the codes first.
    """

    TENSORS: ClassVar[dict[str, str]]
    CONSTANTS: ClassVar[dict[str, str]]
    ROWWISE: ClassVar[tuple[str, ...]]
    COLUMNWISE: ClassVar[tuple[str, ...]]

    format: ClassVar[TensorFormat]
    _quantizer: Writer | None
    _dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Value shape."""
        raise NotImplementedError

    @property
    def column_signs(self) -> bool | None:
        """Hadamard transform of the column-wise codes: with (True) or without random signs; None: no transform."""
        return None

    def contract(self, direction: str) -> Operand:
        """Return row-wise data as an operand [rows, K] for ROWWISE, or column-wise data as [K, rows] for COLUMNWISE.

        A class without this method is multiplied by its quantizer's `qgemm`, or by its values.
        """
        return contracted(self, direction, getattr(self, "_quantizer", None))

    @classmethod
    def pack(
        cls, quantized: Quantized, shape: Sequence[int], **constants: Any
    ) -> QuantizedTensorStorage:
        """Store codes and scales of matrices, K last and unpadded, in the layout of this class's public fields."""
        raise NotImplementedError

    def get_usages(self) -> dict[str, bool]:
        """Return the present directions: {"rowwise": bool, "columnwise": bool}."""
        rowwise, columnwise = (
            getattr(self, names[0]) is not None for names in (self.ROWWISE, self.COLUMNWISE)
        )
        return {"rowwise": rowwise, "columnwise": columnwise}

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the values [..., K] in dtype, computed in float32."""
        raise NotImplementedError

    def with_shape(self, shape: Sequence[int]) -> QuantizedTensorStorage | None:
        """Return the same codes with another shape; None if scales or directions do not allow it."""
        raise NotImplementedError

    def view(self, shape: int | Sequence[int], *extents: int) -> QuantizedTensorStorage:
        """Return the same codes with another shape, in which one extent may be -1.

        Args:
            shape: The shape, or its first extent.
            extents: The other extents.

        Raises:
            RuntimeError: Scales or directions do not allow the shape.
        """
        extents = tuple(shape) if isinstance(shape, Sequence) else (shape, *extents)
        dims = torch.empty(self.shape, device="meta").view(extents).shape
        result = self.with_shape(dims)
        if result is None:
            raise RuntimeError(
                f"{type(self).__name__} of shape {tuple(self.shape)} has no view of shape {tuple(dims)}, whose blocks "
                "would be others; dequantize() it first"
            )
        return result

    def unpack(self) -> Quantized:
        """Invert `pack`, as views, with scales in rows; maxima per row are a column [M, 1]."""
        usages = self.get_usages()
        rowwise = row_major(self.contract(ROWWISE)) if usages["rowwise"] else Operand(None)  # pyright: ignore[reportArgumentType]
        columnwise = row_major(self.contract(COLUMNWISE)) if usages["columnwise"] else Operand(None)  # pyright: ignore[reportArgumentType]
        per_row = rowwise.format is not None and rowwise.format.row_scaled
        maxima = rowwise.amax.view(-1, 1) if per_row and rowwise.amax is not None else rowwise.amax
        return Quantized(*rowwise[:2], *columnwise[:2], maxima, columnwise.amax)

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Create or drop directions in place; None leaves a direction unchanged."""
        usages = self.get_usages()
        rowwise = usages["rowwise"] if rowwise_usage is None else rowwise_usage
        columnwise = usages["columnwise"] if columnwise_usage is None else columnwise_usage
        if not (rowwise or columnwise):
            raise RuntimeError(
                f"{type(self).__name__} would keep neither row-wise nor column-wise data; keep at least one direction"
            )
        if rowwise and not usages["rowwise"]:
            self._mirror("row-wise", "rowwise")
        if columnwise and not usages["columnwise"]:
            self._mirror("column-wise", "columnwise")
        for name in self.ROWWISE * (not rowwise) + self.COLUMNWISE * (not columnwise):
            setattr(self, name, None)

    @property
    def transposable(self) -> bool:
        """Whether each direction is exactly the transpose of the other."""
        raise NotImplementedError

    def rewrites_columns(self) -> bool:
        """Whether `write_columns` can write this storage's column-wise codes from row-wise codes."""
        return False

    def write_columns(self, codes: Tensor) -> None:
        """Write the existing column-wise codes from row-wise codes [M, K]; the scale is unchanged."""
        raise NotImplementedError

    def _mirror(self, direction: str, usage: str) -> None:
        """Create the missing direction by transposing the other one."""
        if not self.transposable:
            raise self._cannot_create(direction, usage)
        existing = row_major(self.contract(COLUMNWISE if usage == "rowwise" else ROWWISE))
        mirrored = transposed_operand(existing)
        first, second = (mirrored, existing) if usage == "rowwise" else (existing, mirrored)
        quantized = Quantized(
            first.codes, first.scale, second.codes, second.scale, first.amax, second.amax
        )
        packed = self.storage_class().pack(quantized, self.shape, **self.constants())
        for name in self.ROWWISE if usage == "rowwise" else self.COLUMNWISE:
            setattr(self, name, getattr(packed, name))

    def _cannot_create(self, direction: str, usage: str) -> RuntimeError:
        return RuntimeError(
            f"{type(self).__name__} cannot make {direction} data from its codes, because each direction has its own "
            f"scales; quantize the high-precision tensor again after quantizer.set_usage({usage}=True)"
        )

    def drop(self, *, rowwise: bool = False, columnwise: bool = False) -> QuantizedTensorStorage:
        """Return a new storage without the given directions, which shares the rest."""
        gone = self.ROWWISE * rowwise + self.COLUMNWISE * columnwise
        tensors, rebuild = QuantizedTensorStorage.flatten(self)
        return rebuild(
            [None if name in gone else t for name, t in zip(self.TENSORS, tensors, strict=True)]
        )

    def _missing(self, direction: str) -> RuntimeError:
        data = "row-wise" if direction == ROWWISE else "column-wise"
        return RuntimeError(
            f"{type(self).__name__} of shape {tuple(self.shape)} has no {data} data, which a product reads; quantize "
            f"with {direction}=True, or call update_usage({direction}_usage=True) first"
        )

    def flatten(self) -> tuple[tuple[Tensor | None, ...], Rebuild]:
        """Return (tensors, rebuild) with rebuild(tensors) equal to this storage, which is not changed."""
        constants = tuple(self.constants().items())
        return tuple(getattr(self, name) for name in self.TENSORS), Rebuild(
            self.storage_class(), constants
        )

    def constants(self) -> dict[str, Any]:
        """Return all fields except the tensors, as constructor keywords."""
        return {keyword: getattr(self, name) for name, keyword in self.CONSTANTS.items()}

    @classmethod
    def storage_class(cls) -> type[QuantizedTensorStorage]:
        """Return the class that holds this payload outside autograd."""
        return cls

    def as_storage(self) -> QuantizedTensorStorage:
        """Return this payload without a tensor."""
        return self

    def mapped(self, change: Callable[[Tensor], Tensor]) -> QuantizedTensorStorage:
        """Return a new storage like this one with every tensor changed."""
        tensors, rebuild = QuantizedTensorStorage.flatten(self)
        return rebuild([None if tensor is None else change(tensor) for tensor in tensors])

    def prepare_for_saving(self) -> tuple[list[Tensor | None], QuantizedTensorStorage]:
        """Return the tensors and become empty, until `restore_from_saved` restores them."""
        names = list_attributes(self)
        tensors = [getattr(self, name) for name in names]
        for name in names:
            setattr(self, name, None)
        return tensors, self

    def restore_from_saved(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Restore tensors from `prepare_for_saving`; return the remaining ones, which belong to other storages."""
        names = list_attributes(self)
        for name, tensor in zip(names, tensors[: len(names)], strict=True):
            setattr(self, name, tensor)
        return list(tensors[len(names) :])

    def clear(self) -> None:
        """Free the payload: every tensor is replaced by an empty one."""
        for name, tensor in self._tensors_by_name().items():
            if tensor is not None:
                setattr(self, name, tensor.new_empty(0))

    def get_metadata(self) -> dict[str, Any]:
        """Return the payload as constructor keywords."""
        return {
            keyword: getattr(self, name)
            for name, keyword in (self.TENSORS | self.CONSTANTS).items()
        }

    def get_data_tensors(
        self, rowwise_data: bool = True, columnwise_data: bool = True
    ) -> Tensor | tuple[Tensor | None, ...] | None:
        """Return the code tensors: one if one direction is requested, otherwise (row-wise, column-wise)."""
        every = tuple(self.TENSORS)  # tensors that serve both directions belong to neither
        rowwise, columnwise = self.ROWWISE or every, self.COLUMNWISE or every
        tensor_names = [rowwise[0]] * rowwise_data + [columnwise[0]] * columnwise_data
        tensors = tuple(getattr(self, name) for name in tensor_names)
        return tensors[0] if len(tensors) == 1 else tensors

    def payload_is_like(self, other: QuantizedTensorStorage) -> bool:
        """Return whether other's bytes can be copied over this payload: same class, directions and shapes."""
        if self.storage_class() is not other.storage_class():
            return False
        for name in self.TENSORS:
            own_tensor, other_tensor = getattr(self, name), getattr(other, name)
            if (own_tensor is None) != (other_tensor is None) or (
                own_tensor is not None and own_tensor.shape != other_tensor.shape
            ):
                return False
        return self.byte_layout() == other.byte_layout()

    def byte_layout(self) -> tuple[Any, ...]:
        """Return the constants that define the meaning of the bytes, without quantizer and nominal dtype."""
        return tuple(
            getattr(self, name) for name in self.CONSTANTS if name not in ("_quantizer", "_dtype")
        )

    def row_granularity(self) -> int:
        """Return the row multiple at which slices do not split scale blocks in any present direction."""
        block = self.format.block
        if block is None:
            return 1
        return block[1] if self.get_usages()["columnwise"] else block[0]

    def copy_from_storage(
        self, src: QuantizedTensorStorage, *, noop_flag: Tensor | None = None
    ) -> None:
        """Overwrite this payload with the bytes of src, unless the flag on the device is set."""
        if not isinstance(src, QuantizedTensorStorage):
            kinds = with_article(type(src)), with_article(self.storage_class())
            raise TypeError(f"src is {kinds[0]}; give {kinds[1]}, or call quantize_")
        if not self.payload_is_like(src):
            raise ValueError(
                f"cannot copy {type(src).__name__} of shape {tuple(src.shape)} with {src.get_usages()} over "
                f"{type(self).__name__} of shape {tuple(self.shape)} with {self.get_usages()}; "
                "give both the same format, shape and usages"
            )
        for name in self.TENSORS:
            target, source = getattr(self, name), getattr(src, name)
            if target is not None:
                target.copy_(
                    source if noop_flag is None else torch.where(noop_flag != 0, target, source)
                )

    def join_claims(self, source: QuantizedTensorStorage | None) -> None:
        """Drop claims about scales that the source of copied parts lacks; None: compute them from the scales."""

    def quantize_(
        self, tensor: Tensor, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensorStorage:
        """Quantize a tensor into this payload, in its present directions."""
        if isinstance(tensor, QuantizedTensorStorage):
            tensor = tensor.decode(self.dtype)
        self.writer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def writer(self) -> Writer:
        """Return the quantizer that writes this payload: the one that created it, or the format's default."""
        return self._default_quantizer() if self._quantizer is None else self._quantizer

    _get_quantizer = writer  # NVIDIA's name

    def _default_quantizer(self) -> Writer:
        raise RuntimeError(
            f"this {type(self).__name__} has no quantizer; give it one, or write through quantizer.update_quantized"
        )

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values in dtype, by default the nominal dtype."""
        if dtype is not None:
            values_dtype("dtype", dtype)
        return self.decode(self.dtype if dtype is None else dtype)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """The nominal dtype."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._first_tensor().device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def _first_tensor(self) -> Tensor:
        for tensor in self._tensors_by_name().values():
            if tensor is not None:
                return tensor
        raise RuntimeError(
            f"{type(self).__name__} holds no data; call restore_from_saved before using it"
        )

    def __repr__(self) -> str:
        shapes = {
            name: None if t is None else (*t.shape,) for name, t in self._tensors_by_name().items()
        }
        fields = ", ".join(f"{name}={shape}" for name, shape in shapes.items())
        return f"{type(self).__name__}({fields}, dtype={self._dtype})"

    def _tensors_by_name(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in self.TENSORS}
