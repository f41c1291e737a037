"""Dispatch of aten operations on quantized tensors.

Operations in the table work on the codes. All others dequantize their arguments, run, and quantize the arguments that
they wrote; their results are plain tensors.

Operations that only move bytes keep the codes: detach, clone, copy_ between equal layouts, a nominal dtype or
device change, views, and row slices that cut no scale block. Operations named `*_like` and `new_*` return plain
tensors, because optimizers allocate state with them. `new_zeros` returns a quantized tensor, because FSDP copies codes
into it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from math import prod
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ...common.numbers import with_article
from . import cut_views
from .checkpoint_reads import COLLECTED_SHARDS_ATTR, READ_TARGET_ATTR, narrow_part
from .promotion import decoding_dtype, read_arguments, writes
from .row_writes import (
    ROW_ORIGIN_ATTR,
    STALE_COLUMNS_ATTR,
    copy_row_origin,
    set_row_origin,
    write,
    write_quantized,
)
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
    return _run_dequantized(func, args, kwargs)


def _run_dequantized(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Dequantize the arguments, run the operation, and quantize the tensors that it wrote to."""
    if func.is_view and torch.is_inference_mode_enabled():
        # A view made in inference mode is an inference tensor, which has no version counter; see _view_like.
        with torch.inference_mode(False):
            return _run_dequantized(func, args, kwargs)
    if func.is_view and isinstance(args[0], QuantizedTensorStorage):
        # The memory of a grouped tensor with unquantized members.
        memory = args[0].plain_memory() if isinstance(args[0], GroupedTensorStorage) else None
        if memory is not None:
            return func(memory, *args[1:], **kwargs)
        values = _decode(args[0], None)
        return cut_views.cut_view(func(values, *args[1:], **kwargs), values, args[0])
    plain_args, plain_kwargs = read_arguments(func, args, kwargs, _decode)
    result = func(*plain_args, **plain_kwargs)
    quantized_by_id: dict[int, QuantizedTensorStorage] = {}
    for argument, values in _written_arguments(func, args, kwargs, plain_args, plain_kwargs):
        if isinstance(argument, QuantizedTensorStorage):
            write(values, argument)
            quantized_by_id[id(values)] = argument
    if not quantized_by_id:
        return result
    # In-place and out= operations return their own argument.
    return tree_map(lambda leaf: quantized_by_id.get(id(leaf), leaf), result)


def _written_arguments(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    plain_args: Sequence[Any],
    plain_kwargs: dict[str, Any],
) -> Iterator[tuple[Any, Any]]:
    """Yield (argument, its plain tensor) for each tensor that the operation writes, including tensors in lists."""
    for position, argument in enumerate(func._schema.arguments):
        if not writes(argument):
            continue
        if position < len(args):
            pair = args[position], plain_args[position]
        elif argument.name in kwargs:
            pair = kwargs[argument.name], plain_kwargs[argument.name]
        else:
            continue
        if isinstance(pair[0], list | tuple):
            yield from zip(*pair, strict=True)
        else:
            yield pair


def _decode(leaf: Any, dtype: torch.dtype | None) -> Any:
    """Decode a quantized tensor or cut view to dtype (None: its nominal dtype) with at most one rounding.

    Other values are returned unchanged.
    """
    if isinstance(leaf, QuantizedTensorStorage):
        return leaf.decode(leaf.dtype if dtype is None else decoding_dtype(dtype))
    return cut_views.read(leaf, dtype)


def wrap_storage(
    tensor: Any, storage: QuantizedTensorStorage, shape: Sequence[int] | None = None
) -> Any:
    """Return a tensor of the same class with the payload of `storage`."""
    result = type(tensor).from_storage(storage, shape=tensor.shape if shape is None else shape)
    if STALE_COLUMNS_ATTR in vars(tensor):
        setattr(result, STALE_COLUMNS_ATTR, True)
    return result


def _view_like(
    tensor: Any, storage: QuantizedTensorStorage, shape: Sequence[int] | None = None
) -> Any:
    """Wrap the storage of a view. In inference mode, the view is an inference tensor only if its base is."""
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        with torch.inference_mode(False):
            return wrap_storage(tensor, storage, shape)
    return wrap_storage(tensor, storage, shape)


def user_attributes(tensor: Any) -> dict[str, Any]:
    """Return the attributes that users have set on a tensor (a parameter's partition_dim, main_grad, ...)."""
    internal = {
        *tensor.TENSORS,
        *tensor.CONSTANTS,
        "_is_param",
        ROW_ORIGIN_ATTR,
        READ_TARGET_ATTR,
        COLLECTED_SHARDS_ATTR,
    }
    return {name: value for name, value in vars(tensor).items() if name not in internal}


def replace_contents(tensor: Any, source: Any) -> None:
    """Replace the payload, shape, dtype and device of `tensor` by those of `source`.

    User attributes and requires_grad are unchanged.
    """
    if (tensor.shape, tensor.dtype, tensor.device) != (source.shape, source.dtype, source.device):
        replacement = source.detach()
        requires_grad = tensor.requires_grad
        # `tensor.data = ..` would call the property of QuantizedTensor, which calls this function.
        torch.Tensor.data.__set__(tensor, replacement)  # pyright: ignore[reportAttributeAccessIssue]
        tensor.requires_grad_(requires_grad)
    for name in (*tensor.TENSORS, *tensor.CONSTANTS):
        setattr(tensor, name, getattr(source, name))
    vars(tensor).pop(STALE_COLUMNS_ATTR, None)
    if STALE_COLUMNS_ATTR in vars(source):
        setattr(tensor, STALE_COLUMNS_ATTR, True)


def _handles(*operations: Any) -> Callable[[_Handler], _Handler]:
    """Enter a handler into the table; handlers take all arguments of the aten schema, also those without effect."""

    def register(handler: _Handler) -> _Handler:
        _TABLE.update(dict.fromkeys(operations, handler))
        return handler

    return register


@_handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(tensor: Any) -> Any:
    """Share the payload and copy user attributes.

    `nn.Module.to()` replaces parameters by `param.detach()`, whose attributes must survive.
    """
    view = _view_like(tensor, tensor.as_storage())
    _copy_attributes(tensor, view)
    return copy_row_origin(tensor, view)


def _copy_attributes(source: Any, target: Any) -> None:
    """Copy the attributes that users have set; methods bound to the source are bound to the target."""
    for name, value in user_attributes(source).items():
        if isinstance(value, MethodType) and value.__self__ is source:
            value = MethodType(value.__func__, target)
        setattr(target, name, value)


@_handles(aten.clone.default)
def _clone(tensor: Any, *, memory_format: torch.memory_format | None = None) -> Any:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return wrap_storage(
        tensor, tensor.mapped(lambda t: t.clone(memory_format=torch.preserve_format))
    )


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
    """Change only the nominal dtype and the device; the codes and user attributes are copied."""
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
    copy = wrap_storage(tensor, storage)
    _copy_attributes(tensor, copy)
    # A copy is not backed by the gathered buffers of FSDP.
    vars(copy).pop(DerivedTensors.NAME, None)
    return copy


@_handles(aten.copy_.default)
def _copy_(target: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copy codes if both tensors have the same layout, otherwise quantize values; a plain target is decoded into."""
    if not isinstance(target, QuantizedTensorStorage):
        return target.copy_(_decode(source, target.dtype), non_blocking)
    if isinstance(source, QuantizedTensorStorage) and target.payload_is_like(source):
        write_quantized(source, target)
        return target
    source = _decode(source, torch.float32)
    write(source.to(target.device, non_blocking=non_blocking).expand(target.shape), target)
    return target


@_handles(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view(tensor: Any, shape: Sequence[int], strides: Sequence[int] | None = None) -> Any:
    product = 1
    for n in shape:
        product *= n if n != -1 else 1
    shape = tuple(tensor.numel() // max(product, 1) if n == -1 else n for n in shape)
    storage = tensor.as_storage() if shape == tuple(tensor.shape) else tensor.with_shape(shape)
    if storage is None:
        return NotImplemented
    return copy_row_origin(tensor, _view_like(tensor, storage, shape))


@_handles(aten.expand.default)
def _expand(tensor: Any, shape: Sequence[int], *, implicit: bool = False) -> Any:
    if len(shape) != tensor.dim():
        return NotImplemented
    is_same_shape = all(n in (-1, m) for n, m in zip(shape, tensor.shape, strict=True))
    return _alias(tensor) if is_same_shape else NotImplemented


def _is_first_dim(tensor: Any, dim: int) -> bool:
    return dim in (0, -tensor.dim()) and tensor.dim() > 0


@_handles(aten.slice.Tensor)
def _slice(
    tensor: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if READ_TARGET_ATTR in vars(tensor):
        return narrow_part(
            tensor, getattr(tensor, READ_TARGET_ATTR), (0,) * tensor.dim(), dim, start, end, step
        )
    if not _is_first_dim(tensor, dim) or step != 1:
        return NotImplemented
    start, end, _ = slice(start, end).indices(tensor.shape[0])
    return _row_view(tensor, start, max(start, end))


@_handles(aten.split.Tensor)
def _split(tensor: Any, size: int, dim: int = 0) -> Any:
    length = tensor.shape[dim]
    pieces = -(-length // size) if size else 1
    return _split_with_sizes(tensor, [min(size, length - i * size) for i in range(pieces)], dim)


@_handles(aten.split_with_sizes.default)
def _split_with_sizes(tensor: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    """Return quantized pieces if all boundaries are between blocks, otherwise plain ones; a list never mixes both."""
    if not _is_first_dim(tensor, dim):
        return NotImplemented
    pieces, start = [], 0
    for size in sizes:
        pieces.append(_row_view(tensor, start, start + size))
        start += size
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else pieces


def _row_view(tensor: Any, start: int, stop: int) -> Any:
    """Return rows [start:stop] as a quantized view, or NotImplemented if they cut a block."""
    if (start, stop) == (0, tensor.shape[0]):
        return _alias(tensor)
    storage = row_slice(tensor, start, stop)
    if storage is None:
        return NotImplemented
    part = _view_like(tensor, storage, (stop - start, *tensor.shape[1:]))
    return set_row_origin(part, tensor, start)


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
        # The range may extend past a row slice into its base tensor.
        origin = vars(tensor).get(ROW_ORIGIN_ATTR)
        if origin is None or origin.base.shape[1:] != tensor.shape[1:]:
            return NotImplemented
        tensor, start, stop = origin.base, origin.start + start, origin.start + stop
        if stop > tensor.shape[0]:
            return NotImplemented
    return _row_view(tensor, start, stop)


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

    A shard that ends inside a block is a plain tensor, because its last block would be scaled without the rows of the
    next shard.
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
    if cuts_block:
        warnings.warn(
            f"a shard of {shape[0]} rows of {with_article(type(tensor))} {list(tensor.shape)} ends inside a block "
            f"of {granularity} rows, so it is stored and gathered in {nominal}; shard whole blocks",
            stacklevel=2,
        )
        return NotImplemented
    if writer.unsupported_shape_reason(shape, **usages) is not None:
        return NotImplemented
    writer = writer.copy()
    writer.set_usage(**usages)
    storage = writer.empty(tuple(shape), nominal, device or tensor.device, bool(pin_memory))
    storage = storage.mapped(Tensor.zero_)
    for name, scale in tensor._tensors_by_name().items():
        # A shard without rows needs this scale too, to decode the gathered rows.
        if scale is not None and scale.dim() == 1 and scale.numel() == 1:
            getattr(storage, name).copy_(scale)
    zeros = wrap_storage(tensor, storage, shape)
    # FSDP writes the codes of every row itself, so slices need no link to this tensor.
    setattr(zeros, ROW_ORIGIN_ATTR, None)
    return zeros


def _run_on_plain(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that reads only metadata: the argument is an expanded scalar with the shape."""
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
