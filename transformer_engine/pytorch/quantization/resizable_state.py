"""Extra states in state dicts: `ResizableState`, their bytes, and `CheckedLoading`, which rejects them before a change.

torch.distributed.checkpoint reads a checkpoint into the tensors of a state dict in place and rejects other sizes. A
module that never ran has no state yet, and the bytes of a state depend on the recipe. ResizableState implements the
library's sharded tensor methods so that it reads all saved bytes; otherwise it behaves as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common import env

_LONGEST = 2**62
EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
_IGNORED = torch.nn.Module.set_extra_state


class AnyLength(Sequence[int]):
    """A size that equals every size with equally many dimensions; torch.Size cannot be subclassed."""

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

    def size(self, dim: int | None = None) -> Any:
        return AnyLength(self.shape) if dim is None else _LONGEST

    def narrow(self, dim: int, start: Any, length: Any) -> Tensor:
        if start or dim:
            raise ValueError(
                f"bytes {start} to {start + length} of an extra state; it is read as a whole"
            )
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


def forgive_missing(missing_keys: list[str], prefix: str) -> None:
    """Accept a state dict without an extra state: another library or an earlier release saved it.

    With NVTE_STRICT_EXTRA_STATE=1, the key remains missing.
    """
    if prefix + EXTRA_STATE in missing_keys and not env.get("NVTE_STRICT_EXTRA_STATE"):
        missing_keys.remove(prefix + EXTRA_STATE)


class CheckedLoading(torch.nn.Module):
    """Module that rejects a whole state dict, before any change, if its own or a descendant's extra state is invalid.

    Descendants with a method `read_extra_state` are checked. If the model's root is another class, the check covers
    each `CheckedLoading` module separately.
    """

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        check_states(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        missing_keys = kwargs["missing_keys"] if "missing_keys" in kwargs else args[2]
        forgive_missing(missing_keys, prefix)


def check_states(root: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Raise ExtraStateError if a module below the root rejects its extra state; nothing is changed.

    Args:
        root: Module that is about to be loaded.
        state_dict: State dict that holds the module's entries.
        prefix: The module's entry prefix, empty or with a dot at its end.
    """
    for name, module in root.named_modules(remove_duplicate=False):
        read = getattr(module, "read_extra_state", None)
        if read is None or type(module).set_extra_state is _IGNORED:
            continue
        path = f"{prefix}{name}." if name else prefix
        for key in (EXTRA_STATE, *getattr(module, "earlier_extra_states", ())):
            if path + key in state_dict:
                read(state_dict[path + key])
                break
