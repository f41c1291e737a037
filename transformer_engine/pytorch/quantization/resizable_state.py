"""ResizableState: the uint8 bytes of an extra state, which torch.distributed.checkpoint may replace by longer ones.

That library reads a checkpoint into the tensors of a state dict in place and rejects other sizes. A module that never
ran has no state yet, and the bytes of a state depend on the recipe. This class implements the library's methods of
sharded tensors so that it reads all saved bytes; otherwise it behaves as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LONGEST = 2**62


class AnyLength(Sequence[int]):
    """A size that equals every size of as many dimensions; torch.Size cannot be subclassed."""

    def __init__(self, size: torch.Size):
        self._size = size

    def __getitem__(self, index: Any) -> Any:
        return self._size[index]

    def __len__(self) -> int:
        return len(self._size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self)

    def __hash__(self) -> int:
        return len(self)

    def __repr__(self) -> str:
        return repr(self._size)

    def numel(self) -> int:
        return self._size.numel()


class ResizableState(Tensor):
    """uint8 [n]; `narrow`, by which a reader requests the destination of its bytes, reallocates."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def of(state: Tensor) -> ResizableState:
        return state.as_subclass(ResizableState)

    def plain(self) -> Tensor:
        """Return the bytes as a plain tensor."""
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return AnyLength(self.shape) if dim is None else _LONGEST

    def narrow(self, dim: int, start: Any, length: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if start or dim:
            raise ValueError(f"bytes {start} to {start + length} of an extra state; it is read as a whole")
        self.data = torch.empty(length, dtype=torch.uint8, device="cpu")
        return self.plain()

    def __create_chunk_list__(self) -> list[Any]:
        """Request all saved bytes; if there are none, the present bytes are dropped."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")
        return [ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([_LONGEST]))]

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        from torch.distributed.checkpoint.planner_helpers import _create_write_items

        return _create_write_items(name, self.plain())

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the tensor to read into or to write from; only reads narrow it."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> ResizableState:
        return ResizableState.of(self.plain().clone())

    def __repr__(self, *, tensor_contents: Sequence[Any] | None = None) -> str:
        return repr(self.plain())
