"""Rows of a quantized tensor [M, ...] cut and joined as bytes: slices for shards, and the gather of a parameter.

torch's fully_shard frees a gathered parameter by resizing the storages of its tensors to zero, and writes the
same storages again before the backward, with their version counters kept: what a forward saved as a view of
them is what the backward reads. So whatever is derived from gathered bytes (a transpose, padded scales, the
scale of the whole tensor) lives in storages that fully_shard knows too, and a later gather writes into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ....common.formats import ceil_div
from ...primitives.operand import ROWWISE
from ...primitives.quantize import Quantized
from .quantized_tensor_storage import QuantizedTensorStorage


def row_slice(
    storage: QuantizedTensorStorage, start: int, stop: int
) -> QuantizedTensorStorage | None:
    """Return storage[start:stop] along dimension 0, with shared codes; None if that would split a block."""
    shape = storage.shape
    if len(shape) < 2:
        return None
    inner = prod(shape[1:-1])
    rows, first, last = shape[0] * inner, start * inner, stop * inner
    granularity = storage.row_granularity()
    if first % granularity or (last % granularity and last != rows):
        return None
    return storage.storage_class().pack(
        _slice_storage(storage, rows, first, last),
        (stop - start, *shape[1:]),
        **storage.constants(),
    )


def row_views(storage: QuantizedTensorStorage, start: int, stop: int) -> Quantized:
    """View the codes and scales of storage[start:stop], if `row_slice` supports it."""
    shape = storage.shape
    inner = prod(shape[1:-1])
    return _slice_storage(storage, shape[0] * inner, start * inner, stop * inner)


def _slice_storage(storage: QuantizedTensorStorage, rows: int, first: int, last: int) -> Quantized:
    unpacked = storage.unpack()
    return Quantized(
        codes=_run(unpacked.codes, 0, rows, first, last),
        scale=_run(unpacked.scale, 0, rows, first, last),
        codes_t=_run(unpacked.codes_t, 1, rows, first, last),
        scale_t=_run(unpacked.scale_t, 1, rows, first, last),
        amax=_run(unpacked.amax, 0, rows, first, last),
        amax_t=unpacked.amax_t,
    )


def _run(part: Tensor | None, dim: int, rows: int, first: int, last: int) -> Tensor | None:
    """Return rows first:last of a matrix whose dimension `dim` covers `rows` values; one scale for all rows is kept."""
    if part is None or part.dim() < 2 or rows == 0:
        return part
    values = -(-rows // part.shape[dim])
    run = slice(first // values, -(-last // values))
    return part[run] if dim == 0 else part[:, run]


@dataclass(frozen=True)
class GatheredPayload:
    """Metadata for gathered bytes: their `Quantized` fields, in order, and the tensors that are not gathered.

    Attributes:
        rows: Rows of the whole matrix, after which the gathered rows are padding; None if no shard is padded.
    """

    storage_class: type[QuantizedTensorStorage]
    constants: dict[str, Any]
    inner_shape: tuple[int, ...]
    fields: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    whole: dict[str, Tensor]
    packing: int
    columnwise: bool
    rows: int | None = None

    def holding(self, tensors: Sequence[Tensor]) -> GatheredPayload:
        """Return the payload with these tensors, after the first field's, outside the gathered bytes."""
        present = {
            name: tensor.view(kind).t() if name.endswith("_t") else tensor.view(kind)
            for name, kind, tensor in zip(self.fields[1:], self.dtypes[1:], tensors, strict=True)
        }
        return replace(
            self, fields=self.fields[:1], dtypes=self.dtypes[:1], whole=self.whole | present
        )


class DerivedTensors(list[Tensor]):
    """The tensors of a gathered parameter whose storages are not the gathered bytes themselves.

    fully_shard holds this list: its tensors are freed and allocated with the parameter. A parameter and its aliases
    share one list; copies have none.
    """

    NAME = "_derived_tensors"  # attribute on a gathered parameter

    def __init__(self, tensors: Iterable[Tensor] = ()):
        super().__init__()
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        if not any(entry is tensor for entry in self):
            self.append(tensor)

    def forget(self, tensor: Tensor) -> None:
        self[:] = [entry for entry in self if entry is not tensor]

    def follow(self, before: dict[str, Tensor | None], after: dict[str, Tensor | None]) -> None:
        """Remove the tensors that the parameter dropped between two moments, and add its new tensors."""
        for name, old in before.items():
            new = after[name]
            if new is None and old is not None:
                self.forget(old)
            elif new is not None and old is None:
                self.add(new)


def gather_payload(storage: QuantizedTensorStorage) -> tuple[tuple[Tensor, ...], GatheredPayload]:
    """Return uint8 and float32 matrices with rows along dimension 0, and metadata with whole-tensor scales."""
    usages = storage.get_usages()
    if storage.transposable and usages["rowwise"]:
        storage = storage.drop(columnwise=True)  # recomputed after the gather, not sent
    parts = storage.unpack()._asdict()
    fields, tensors, dtypes, unsharded = [], [], [], {}
    for name, part in parts.items():
        if part is None:
            continue
        if part.dim() < 2:
            unsharded[name] = part
            continue
        part = part.t() if name.endswith("_t") else part
        fields.append(name)
        dtypes.append(part.dtype)
        part = part.contiguous()
        tensors.append(part.view(torch.uint8) if part.element_size() == 1 else part)
    payload = GatheredPayload(
        storage.storage_class(),
        storage.constants(),
        tuple(storage.shape[1:]),
        tuple(fields),
        tuple(dtypes),
        unsharded,
        storage.format.packing,
        usages["columnwise"],
    )
    return tuple(tensors), payload


def sent_shard(
    storage: QuantizedTensorStorage, full_shape: Sequence[int], ranks: int | None
) -> tuple[tuple[Tensor, ...], GatheredPayload]:
    """Return the tensors of a shard that `fully_shard` gathers, and their metadata; see `gather_payload`.

    Codes with one scale are padded with zeros to the same row count on all ranks, if the rank count
    does not divide the rows of the whole tensor.

    Args:
        storage: The shard.
        full_shape: Shape of the whole tensor.
        ranks: Shard count; None if they are not gathered.
    """
    tensors, payload = gather_payload(storage)
    if ranks == 1:  # torch then copies only the first tensor
        return tensors[:1], payload.holding(tensors[1:])
    if (
        ranks is None
        or full_shape[0] % ranks == 0
        or len(full_shape) > 2
        or storage.format.block is not None
    ):
        return tensors, payload
    padded = []
    for tensor in tensors:
        sent = tensor.new_zeros(ceil_div(full_shape[0], ranks), *tensor.shape[1:])
        sent[: tensor.shape[0]] = tensor
        padded.append(sent)
    return tuple(padded), replace(payload, rows=full_shape[0])


def join_payload(
    tensors: Sequence[Tensor],
    payload: GatheredPayload,
    dtype: torch.dtype,
    columnwise: bool | None = None,
) -> QuantizedTensorStorage:
    """Return the storage for the gathered rows; columnwise: derive column-wise data (None: as in the shards)."""
    parts: dict[str, Tensor] = {name: part.clone() for name, part in payload.whole.items()}
    for name, kind, tensor in zip(payload.fields, payload.dtypes, tensors, strict=True):
        tensor = tensor.view(kind)[: payload.rows]
        parts[name] = tensor.t().contiguous() if name.endswith("_t") else tensor
    codes = parts["codes"] if "codes" in parts else parts["codes_t"].t()
    inner = prod(payload.inner_shape[:-1])
    rows = codes.shape[0] if "codes" in parts else codes.shape[0] * payload.packing
    shape = (rows // max(inner, 1), *payload.inner_shape)
    constants = payload.constants | {"dtype": dtype}
    storage = payload.storage_class.pack(Quantized(**parts), shape, **constants)
    if payload.columnwise if columnwise is None else columnwise:
        storage.update_usage(columnwise_usage=True)
    return storage


def list_derived(storage: QuantizedTensorStorage, gathered: Sequence[Tensor]) -> DerivedTensors:
    """Return the tensors of a storage that are not views of the gathered bytes, each in separate memory."""
    bytes_of = {tensor.untyped_storage().data_ptr() for tensor in gathered}
    derived = DerivedTensors()
    for name, tensor in storage._tensors_by_name().items():
        if tensor is None or tensor.untyped_storage().data_ptr() in bytes_of:
            continue
        if tensor.untyped_storage().size() != tensor.numel() * tensor.itemsize:
            tensor = tensor.clone()
            setattr(storage, name, tensor)
        derived.add(tensor)
    return derived


def rewrite_codes(out: Any, gathered: Sequence[Tensor], payload: GatheredPayload) -> bool:
    """Write the scale and the column-wise codes of a parameter whose row-wise codes are the gathered bytes.

    Returns:
        Whether the parameter has one scale and the gathered bytes are its codes; if not, nothing is written.
    """
    scale = payload.whole.get("scale")
    if (
        payload.fields != ("codes",)
        or scale is None
        or out._scale_inv.data_ptr() == scale.data_ptr()
    ):
        return False
    codes = gathered[0].view(torch.uint8)
    if codes.data_ptr() != out._data.data_ptr() or codes.dim() != 2:
        return False
    written = (out._scale_inv, *[getattr(out, name) for name in out.COLUMNWISE])
    counted = tuple(tensor for tensor in written if not tensor.is_inference())
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(counted):
        out._scale_inv.copy_(scale)
        out.write_columns(codes[: payload.rows])
    return True


def write_gathered(
    out: Any, storage: QuantizedTensorStorage, derived: DerivedTensors, rewrites_columns: bool
) -> None:
    """Make out's tensors hold storage's bytes again, unseen by autograd, which has saved views of them.

    A direction that out lacks is taken from storage, whose tensors `derived` are not views of gathered bytes.

    Args:
        out: The gathered parameter.
        storage: Codes and scales from the gathered bytes.
        derived: Tensors of storage.
        rewrites_columns: storage lacks column-wise codes, which are transposed into those of out.
    """
    known: DerivedTensors = vars(out)[DerivedTensors.NAME]
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, source in storage._tensors_by_name().items():
        if rewrites_columns and name in storage.COLUMNWISE:
            continue
        target = getattr(out, name)
        if target is None and source is not None:
            setattr(out, name, source)
            if any(tensor is source for tensor in derived):
                known.add(source)
        elif target is not None and source is None:
            known.forget(target)
            setattr(out, name, None)
        elif target is not None and source is not None and target.data_ptr() != source.data_ptr():
            pairs.append((target, source))
    written = [target for target, _ in pairs]
    if rewrites_columns:
        written += [getattr(out, name) for name in storage.COLUMNWISE]
    counted = tuple(target for target in written if not target.is_inference())
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(counted):
        for target, source in pairs:
            target.copy_(source)
        if rewrites_columns:
            out.write_columns(storage.contract(ROWWISE).codes.view(torch.uint8))


class ShardedBuffers:
    """Methods for a quantized tensor whose rows are sharded over ranks."""

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """Return the attributes for the buffers that `fsdp_extract_buffers` returns, in the same order.

        A direction that follows from the other one is not among them, nor is a whole-tensor scale.

        Raises:
            RuntimeError: A buffer is not one of the attributes, but a copy of it.
        """
        storage: Any = self
        sent, payload = gather_payload(storage)
        views = storage.unpack()._asdict()
        tensors = {
            name: tensor
            for name, tensor in storage._tensors_by_name().items()
            if tensor is not None
        }
        fields: list[str] = []
        for part in payload.fields[: len(sent)]:
            # The tensor that begins where a view of it does; several tensors may share one storage.
            left = {name: tensor for name, tensor in tensors.items() if name not in fields}
            address = views[part].data_ptr()
            buffers = next(
                (name for name, tensor in left.items() if tensor.data_ptr() == address), None
            )
            if buffers is None:
                raise RuntimeError(
                    f"no attribute of this {type(self).__name__} holds its {part} in the form that is sent; "
                    f"make its tensors ({', '.join(left)}) contiguous"
                )
            fields.append(buffers)
        return tuple(fields)

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor, ...], GatheredPayload]:
        """Return the buffers of this shard, with rows along dimension 0, and the metadata to read them again."""
        storage: Any = self
        return gather_payload(storage)

    def fsdp_assign_gathered(self, gathered: Sequence[Tensor], meta: GatheredPayload) -> None:
        """Replace this tensor's payload by the joined payload of all shards; this tensor has the whole shape.

        Args:
            gathered: The buffers of all shards, concatenated along dimension 0, ordered as by `fsdp_extract_buffers`.
            meta: The metadata that `fsdp_extract_buffers` returned.

        Raises:
            ValueError: The joined payload has another shape than this tensor.
        """
        storage: Any = self
        full = join_payload(gathered, meta, storage.dtype)
        if full.shape != storage.shape:
            raise ValueError(
                f"the gathered buffers are those of a tensor of shape {tuple(full.shape)}, this one is "
                f"{tuple(storage.shape)}; call fsdp_assign_gathered on a tensor of the whole shape"
            )
        for name, tensor in full._tensors_by_name().items():
            setattr(storage, name, tensor)
