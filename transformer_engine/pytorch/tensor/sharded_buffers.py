"""The buffers of a quantized tensor that a gather of its shards sends, under the original's method names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .storage.fsdp import GatheredPayload, gather_payload, join_payload


class ShardedBuffers:
    """Methods of a quantized tensor whose rows are sharded over ranks."""

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """Return the attributes of the buffers that `fsdp_extract_buffers` returns, in the same order.

        A direction that follows from the other one is not among them, nor is a scale of the whole tensor.

        Raises:
            RuntimeError: A buffer is not one of the attributes, but a copy of it.
        """
        storage: Any = self
        sent, payload = gather_payload(storage)
        views = storage.unpack()._asdict()
        tensors = {name: tensor for name, tensor in storage._named_tensors().items() if tensor is not None}
        fields: list[str] = []
        for part in payload.fields[: len(sent)]:
            left = {name: tensor for name, tensor in tensors.items() if name not in fields}
            fields.append(_name_of(part, views[part], left, type(self).__name__))
        return tuple(fields)

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor, ...], GatheredPayload]:
        """Return the buffers of this shard, with rows along dimension 0, and the metadata to read them again."""
        storage: Any = self
        return gather_payload(storage)

    def fsdp_assign_gathered(self, gathered: Sequence[Tensor], meta: GatheredPayload) -> None:
        """Replace this tensor's payload by the joined payload of all shards; this tensor has the shape of the whole.

        Args:
            gathered: The buffers of all shards, concatenated along dimension 0, in the order of `fsdp_extract_buffers`.
            meta: The metadata that `fsdp_extract_buffers` returned.

        Raises:
            ValueError: The joined payload has another shape than this tensor.
        """
        storage: Any = self
        whole = join_payload(gathered, meta, storage.dtype)
        if whole.shape != storage.shape:
            raise ValueError(
                f"the gathered buffers are those of a tensor of shape {tuple(whole.shape)}, this one is "
                f"{tuple(storage.shape)}; call fsdp_assign_gathered on a tensor of the whole shape"
            )
        for name, tensor in whole._named_tensors().items():
            setattr(storage, name, tensor)


def _name_of(part: str, view: Tensor, tensors: dict[str, Tensor], kind: str) -> str:
    """Return the name of the tensor that begins where a view of it does; several tensors may share one storage."""
    address = view.data_ptr()
    for name, tensor in tensors.items():
        if tensor.data_ptr() == address:
            return name
    raise RuntimeError(
        f"no attribute of this {kind} holds its {part} as they are sent; "
        f"make its tensors ({', '.join(tensors)}) contiguous"
    )
