"""Torch operations on quantized tensors: a table; every other operation dequantizes, runs and quantizes its results.

Operations that only move bytes keep the codes: detach, clone, copy_ between equal layouts, a nominal dtype or
device change, views and row slices that cut no scale block. Operations named `*_like` and `new_*` ask for
plain tensors (an optimizer's state), except `new_zeros`, which sharded data parallelism fills with codes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from math import prod
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ...common.numbers import with_article
from . import cut_views
from .checkpoint_reads import COLLECTED, READS, narrow_part
from .promotion import decoding_dtype, read_arguments, writes
from .row_writes import OUT_OF_DATE, ROWS_OF, remember_place, same_place, write, write_quantized
from .storage.fsdp import DerivedTensors, row_slice
from .storage.grouped_tensor_storage import GroupedTensorStorage
from .storage.quantized_tensor_storage import QuantizedTensorStorage

aten = torch.ops.aten
_Handler = Callable[..., Any]
_TABLE: dict[Any, _Handler] = {}


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run one operation that has a quantized tensor among its arguments."""
    handler = _TABLE.get(func)
    if handler is not None:
        result = handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return _dequantized(func, args, kwargs)


def _dequantized(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Dequantize the arguments, run the operation, and quantize the tensors that it wrote to."""
    if func.is_view and torch.is_inference_mode_enabled():
        # See _view_like; also, only tensors that are not inference tensors count their writes.
        with torch.inference_mode(False):
            return _dequantized(func, args, kwargs)
    if func.is_view and isinstance(args[0], QuantizedTensorStorage):
        memory = args[0].plain_memory() if isinstance(args[0], GroupedTensorStorage) else None
        if memory is not None:
            return func(memory, *args[1:], **kwargs)
        values = _values(args[0], None)
        return cut_views.cut_view(func(values, *args[1:], **kwargs), values, args[0])
    plain_args, plain_kwargs = read_arguments(func, args, kwargs, _values)
    result = func(*plain_args, **plain_kwargs)
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if not writes(argument):
            continue
        if position < len(args):
            written.append((args[position], plain_args[position]))
        elif argument.name in kwargs:
            written.append((kwargs[argument.name], plain_kwargs[argument.name]))
    originals: dict[int, QuantizedTensorStorage] = {}
    for target, values in written:
        targets = (
            zip(target, values, strict=True)
            if isinstance(target, list | tuple)
            else [(target, values)]
        )
        for original, value in targets:
            if isinstance(original, QuantizedTensorStorage):
                write(value, original)
                originals[id(value)] = original
    return tree_map(lambda leaf: originals.get(id(leaf), leaf), result) if originals else result


def _values(leaf: Any, dtype: torch.dtype | None) -> Any:
    """Values of a quantized tensor or its part in a dtype, None for the nominal one, rounded at most once."""
    if isinstance(leaf, QuantizedTensorStorage):
        return leaf.decode(leaf.dtype if dtype is None else decoding_dtype(dtype))
    return cut_views.read(leaf, dtype)


def like(tensor: Any, storage: QuantizedTensorStorage, shape: Sequence[int] | None = None) -> Any:
    """Return a tensor with the same class around a storage's payload."""
    result = type(tensor).from_storage(storage, shape=tensor.shape if shape is None else shape)
    if OUT_OF_DATE in vars(tensor):
        setattr(result, OUT_OF_DATE, True)
    return result


def _view_like(
    tensor: Any, storage: QuantizedTensorStorage, shape: Sequence[int] | None = None
) -> Any:
    """Return `like` for a view: in inference mode, it is an inference tensor only if the tensor is one."""
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        with torch.inference_mode(False):
            return like(tensor, storage, shape)
    return like(tensor, storage, shape)


def attributes(tensor: Any) -> dict[str, Any]:
    """Return the attributes that users have set on a tensor (a parameter's partition_dim, main_grad, ...)."""
    payload = {*tensor.TENSORS, *tensor.CONSTANTS, "_is_param", ROWS_OF, READS, COLLECTED}
    return {name: value for name, value in vars(tensor).items() if name not in payload}


def replace_contents(tensor: Any, source: Any) -> None:
    """Make tensor hold source's payload, shape, dtype and device; user attributes and requires_grad stay."""
    if (tensor.shape, tensor.dtype, tensor.device) != (source.shape, source.dtype, source.device):
        replacement = source.detach()
        requires_grad = tensor.requires_grad
        torch.Tensor.data.__set__(tensor, replacement)  # pyright: ignore[reportAttributeAccessIssue]
        tensor.requires_grad_(requires_grad)
    for name in (*tensor.TENSORS, *tensor.CONSTANTS):
        setattr(tensor, name, getattr(source, name))
    vars(tensor).pop(OUT_OF_DATE, None)
    if OUT_OF_DATE in vars(source):
        setattr(tensor, OUT_OF_DATE, True)


def _handles(*operations: Any) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        _TABLE.update(dict.fromkeys(operations, handler))
        return handler

    return register


@_handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(tensor: Any) -> Any:
    """Share the payload and copy user attributes: a module's conversion replaces a parameter by its detached alias."""
    return same_place(tensor, _with_attributes(tensor, _view_like(tensor, tensor.as_storage())))


def _with_attributes(tensor: Any, result: Any) -> Any:
    for name, value in attributes(tensor).items():
        if isinstance(value, MethodType) and value.__self__ is tensor:
            value = MethodType(value.__func__, result)
        setattr(result, name, value)
    return result


@_handles(aten.clone.default)
def _clone(tensor: Any, *, memory_format: torch.memory_format | None = None) -> Any:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return like(tensor, tensor.mapped(lambda t: t.clone(memory_format=torch.preserve_format)))


@_handles(aten._to_copy.default)
def _to_copy(
    tensor: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Any:
    """Change only the nominal dtype and the device; the codes, and attributes that users set, are kept."""
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    storage = tensor.mapped(lambda t: t.to(device=device, non_blocking=non_blocking, copy=True))
    if pin_memory:
        storage = storage.mapped(Tensor.pin_memory)
    if dtype is not None:
        if isinstance(storage, GroupedTensorStorage):
            storage.set_nominal_dtype(dtype)
        else:
            storage._dtype = dtype
    copy = _with_attributes(tensor, like(tensor, storage))
    vars(copy).pop(DerivedTensors.NAME, None)  # its memory is its own
    return copy


@_handles(aten.copy_.default)
def _copy_(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, QuantizedTensorStorage):
        return target.copy_(_values(source, target.dtype), non_blocking)
    if isinstance(source, QuantizedTensorStorage) and target.payload_is_like(source):
        write_quantized(source, target)
        return target
    source = _values(source, torch.float32)
    write(source.to(target.device, non_blocking=non_blocking).expand(target.shape), target)
    return target


@_handles(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view(tensor: Any, shape: Sequence[int], strides: Sequence[int] | None = None) -> Any:
    product = 1
    for n in shape:
        product *= n if n != -1 else 1
    shape = tuple(tensor.numel() // max(product, 1) if n == -1 else n for n in shape)
    storage = tensor.as_storage() if shape == tuple(tensor.shape) else tensor.with_shape(shape)
    return (
        NotImplemented
        if storage is None
        else same_place(tensor, _view_like(tensor, storage, shape))
    )


@_handles(aten.expand.default)
def _expand(tensor: Any, shape: Sequence[int], *, implicit: bool = False) -> Any:
    same = len(shape) == tensor.dim() and all(
        n in (-1, m) for n, m in zip(shape, tensor.shape, strict=True)
    )
    return _alias(tensor) if same else NotImplemented


@_handles(aten.slice.Tensor)
def _slice(
    tensor: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if READS in vars(tensor):
        return narrow_part(
            tensor, getattr(tensor, READS), (0,) * tensor.dim(), dim, start, end, step
        )
    if dim % max(tensor.dim(), 1) or step != 1 or tensor.dim() == 0:
        return NotImplemented
    start, end, _ = slice(start, end).indices(tensor.shape[0])
    return _rows(tensor, start, max(start, end))


@_handles(aten.split.Tensor)
def _split(tensor: Any, size: int, dim: int = 0) -> Any:
    length = tensor.shape[dim]
    pieces = -(-length // size) if size else 1
    return _split_with_sizes(tensor, [min(size, length - i * size) for i in range(pieces)], dim)


@_handles(aten.split_with_sizes.default)
def _split_with_sizes(tensor: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    """Return quantized pieces if all boundaries are between blocks, otherwise plain ones; a list never mixes both."""
    if dim % tensor.dim():
        return NotImplemented
    pieces, start = [], 0
    for size in sizes:
        pieces.append(_rows(tensor, start, start + size))
        start += size
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else pieces


def _rows(tensor: Any, start: int, stop: int) -> Any:
    if (start, stop) == (0, tensor.shape[0]):
        return _alias(tensor)
    storage = row_slice(tensor, start, stop)
    if storage is None:
        return NotImplemented
    part = _view_like(tensor, storage, (stop - start, *tensor.shape[1:]))
    return remember_place(part, tensor, start)


@_handles(aten.as_strided.default)
def _as_strided(
    tensor: Any, shape: Sequence[int], strides: Sequence[int], storage_offset: int = 0
) -> Any:
    """Return a view; quantized tensors support the identity and whole-row ranges."""
    if (
        tuple(strides) != tensor.stride()
        or not shape
        or tuple(shape[1:]) != tuple(tensor.shape[1:])
    ):
        return NotImplemented
    start, rest = divmod(storage_offset or 0, max(tensor.stride(0), 1))
    if rest:
        return NotImplemented
    stop = start + shape[0]
    if stop > tensor.shape[0]:
        # The rows behind a narrowed tensor are rows of the whole tensor.
        origin = vars(tensor).get(ROWS_OF)
        if origin is None or origin.whole.shape[1:] != tensor.shape[1:]:
            return NotImplemented
        tensor, start, stop = origin.whole, origin.start + start, origin.start + stop
        if stop > tensor.shape[0]:
            return NotImplemented
    return _rows(tensor, start, stop)


@_handles(aten.new_zeros.default)
def _new_zeros(
    tensor: Any,
    shape: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Any:
    """Return a quantized tensor with zero codes in the tensor's directions, if the format supports the shape.

    The result has the tensor's scale if one scale applies to all rows.

    A shard whose last rows end inside a block is a plain tensor: its codes would have other scales than the whole.
    """
    usages = tensor.get_usages()
    writer = tensor.writer()
    nominal: torch.dtype = dtype or tensor.dtype
    if not nominal.is_floating_point:
        return NotImplemented
    is_shard = (
        len(shape) > 1
        and tuple(shape[1:]) == tuple(tensor.shape[1:])
        and shape[0] < tensor.shape[0]
    )
    granularity = tensor.row_granularity()
    cuts_block = is_shard and prod(shape[:-1]) % granularity != 0
    if cuts_block or writer.unsupported_shape_reason(shape, **usages) is not None:
        if cuts_block:
            warnings.warn(
                f"a shard of {shape[0]} rows of {with_article(type(tensor))} {list(tensor.shape)} ends inside a block "
                f"of {granularity} rows, so it is stored and gathered in {nominal}; shard whole blocks",
                stacklevel=2,
            )
        return NotImplemented
    writer = writer.copy()
    writer.set_usage(**usages)
    storage = writer.empty(tuple(shape), nominal, device or tensor.device, bool(pin_memory))
    storage = storage.mapped(Tensor.zero_)
    for name, scale in tensor._tensors_by_name().items():
        # A shard without rows needs this scale too, to decode the gathered rows.
        if scale is not None and scale.dim() == 1 and scale.numel() == 1:
            getattr(storage, name).copy_(scale)
    zeros = like(tensor, storage, shape)
    # sharding fills its rows once, by the codes: the scale is theirs alone
    setattr(zeros, ROWS_OF, None)
    return zeros


def _run_on_plain(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    plain = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return func(plain, *args, **kwargs)


for _operation in (
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_ones.default,
):
    _TABLE[_operation] = functools.partial(_run_on_plain, _operation)
