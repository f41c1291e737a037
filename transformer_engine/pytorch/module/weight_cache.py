"""WeightCache: weights as quantized for the first microbatch of a step, in memory that later steps write again.

A CUDA graph that a caller captures over later microbatches reads this memory in every replay. The first
microbatch of the next step therefore writes its codes into the same tensors. It takes new tensors only while
a pending backward pass holds the old ones; a weight that a graph reads is then rejected instead.

Nothing observes writes to the parameter: after an optimizer step the cache has codes of the old values until
a call with is_first_microbatch=True. Loading a state dict and another recipe clear the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functions.scale_update import is_backward_pass
from ..offload.marks import mark_cached
from ..primitives.grouped_quantize import GroupedQuantized
from ..runtime.autograd import is_first_run
from ..runtime.capture import is_capturing

_use_count: Any = torch._C._storage_Use_Count


def weight_parts(
    weight: Any,
) -> tuple[tuple[Tensor | None, ...], Callable[[Sequence[Tensor | None]], Any]]:
    """Tensors in a quantized weight, or in a grouped layer's weights, and the function that rebuilds it from them."""
    if isinstance(weight, GroupedQuantized):
        return weight, GroupedQuantized._make
    return weight.flatten()


def has_columns(weight: Any) -> bool:
    """Return whether a quantized weight has its column direction."""
    if isinstance(weight, GroupedQuantized):
        return weight.codes_t is not None
    return weight.get_usages()["columnwise"]


def _memory(tensor: Tensor) -> int:
    """Return a number that tensors on the same memory share; dry-run tensors have no address."""
    return tensor.untyped_storage()._cdata


def _uses(parts: Sequence[Tensor | None]) -> tuple[tuple[int, int], ...]:
    """Count the C++ references to each tensor and to its memory, which saved tensors and saved views increase."""
    tensors: list[Any] = [part for part in parts if part is not None]
    return tuple([(tensor._use_count(), _use_count(_memory(tensor))) for tensor in tensors])


class _CachedWeight(NamedTuple):
    """A cached weight.

    Attributes:
        weight: The quantized weight.
        parts: Its tensors.
        uses: `_uses` for the tensors while no backward pass has saved them.
        owned: Whether each tensor has separate memory, instead of the parameter's.
    """

    weight: Any
    parts: tuple[Tensor | None, ...]
    uses: tuple[tuple[int, int], ...]
    owned: tuple[bool, ...]

    @property
    def is_pending(self) -> bool:
        """Whether a backward pass that has not run, or that retains its graph, will read the tensors."""
        return any(
            now > before
            for counts, unsaved in zip(_uses(self.parts), self.uses, strict=True)
            for now, before in zip(counts, unsaved, strict=True)
        )

    def shares_memory(self, other: _CachedWeight) -> bool:
        """Whether another entry has the same tensors."""
        return len(self.parts) == len(other.parts) and all(
            mine is theirs for mine, theirs in zip(self.parts, other.parts, strict=True)
        )

    def has_form(self, parts: Sequence[Tensor | None]) -> bool:
        """Whether the tensors can be copied into the tensors of this entry, which may lack a direction."""
        return len(parts) == len(self.parts) and all(
            old is None
            or (
                new is not None
                and (old.shape, old.stride(), old.dtype, old.device)
                == (new.shape, new.stride(), new.dtype, new.device)
            )
            for old, new in zip(self.parts, parts, strict=True)
        )


class WeightCache(dict[str, Any]):
    """{name: weight as quantized for the first microbatch of a step}.

    A caller may write to the cache as to any dict; a replaced or deleted weight frees its memory. Memory that a
    captured graph reads is not freed, and later steps write to it again.
    """

    def __init__(self, weights: Any = ()) -> None:
        super().__init__(weights)
        self._entries: dict[str, _CachedWeight] = {}
        self._captured: dict[str, list[_CachedWeight]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def __setitem__(self, name: str, weight: Any) -> None:
        self._entries.pop(name, None)
        super().__setitem__(name, weight)

    def __delitem__(self, name: str) -> None:
        self._entries.pop(name, None)
        super().__delitem__(name)

    def update(self, *weights: Any, **named: Any) -> None:
        for name, weight in dict(*weights, **named).items():
            self[name] = weight

    def clear(self) -> None:
        super().clear()
        self._entries.clear()

    def pop(self, name: str, *default: Any) -> Any:
        self._entries.pop(name, None)
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        name, weight = super().popitem()
        self._entries.pop(name, None)
        return name, weight

    def find(self, name: str, columnwise: bool) -> Any:
        """Return a cached weight, or None if it is missing or lacks the requested column direction."""
        weight = self.get(name)
        if weight is None or (columnwise and not has_columns(weight)):
            return None
        entry = self._entries.get(name)
        if entry is not None and entry.weight is weight:
            self._keep_if_captured(name, entry)
        return weight

    def get_or_quantize(
        self,
        name: str,
        parameters: Sequence[Tensor],
        quantize: Callable[[bool], Any],
        columnwise: bool,
        first: bool,
    ) -> Any:
        """Quantized weight for a call: the cached weight, or a new one in the first microbatch of a step.

        Args:
            name: Weight name.
            parameters: The parameters that are quantized.
            quantize: quantize(columnwise) -> the quantized weight.
            columnwise: The call needs the column direction.
            first: The call belongs to the first microbatch.

        Raises:
            RuntimeError: A captured graph reads memory that a pending backward pass holds.
        """
        columnwise = columnwise or is_first_run()
        cached = self.find(name, columnwise)
        if cached is not None and not first:
            return cached
        if first and is_backward_pass():
            # The second run of a checkpoint needs the codes from its first run, and the cache may have newer ones.
            return compute_to_keep(lambda: quantize(columnwise))
        return self._renew_weight(name, parameters, quantize, columnwise)

    def _renew_weight(
        self,
        name: str,
        parameters: Sequence[Tensor],
        quantize: Callable[[bool], Any],
        columnwise: bool,
    ) -> Any:
        """Quantize the current values, in the memory of the cached weight if no backward pass reads it."""
        free = self._free_entries(name)
        before = self.get(name)
        columnwise = columnwise or (before is not None and has_columns(before))
        weight = compute_to_keep(lambda: quantize(columnwise))
        parts, rebuild = weight_parts(weight)
        memory = [_memory(parameter) for parameter in parameters]
        owned = tuple([part is not None and _memory(part) not in memory for part in parts])
        fitting = next((entry for entry in free if entry.has_form(parts)), None)
        if fitting is not None:
            parts = _write_entry(fitting, parts, owned)
            weight = rebuild(parts)
        mark_cached(parts)
        self[name] = weight
        self._entries[name] = entry = _CachedWeight(weight, tuple(parts), _uses(parts), owned)
        self._keep_if_captured(name, entry)
        return weight

    def _free_entries(self, name: str) -> list[_CachedWeight]:
        """Entries whose memory no pending backward pass reads: the cached weight, then weights in captured graphs.

        Raises:
            RuntimeError: A captured graph reads memory that a pending backward pass holds.
        """
        captured = self._captured.get(name, [])
        if any(entry.is_pending for entry in captured):
            raise RuntimeError(
                f"is_first_microbatch=True cannot update the cached {name}, which a captured CUDA graph reads: a "
                "backward pass that has not run needs its present values; run it or drop its outputs first, or capture "
                "under torch.no_grad()"
            )
        entry = self._entries.get(name)
        if entry is None or self.get(name) is not entry.weight or entry.is_pending:
            return captured
        return [entry, *captured]

    def _keep_if_captured(self, name: str, entry: _CachedWeight) -> None:
        """Keep a weight's memory alive for replays if a graph that reads it is being captured."""
        first = next((part for part in entry.parts if part is not None), None)
        if first is not None and is_capturing(first.device):
            entries = self._captured.setdefault(name, [])
            # A renewed weight is another entry on the same memory, and captures may be repeated without end.
            if not any(other.shares_memory(entry) for other in entries):
                entries.append(entry)


def _write_entry(
    entry: _CachedWeight, parts: Sequence[Tensor | None], owned: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Copy new tensors into the tensors of an entry, and return the tensors of the renewed weight."""
    result: list[Tensor | None] = []
    with torch.no_grad():
        for old, new, was_owned, is_owned in zip(
            entry.parts, parts, entry.owned, owned, strict=True
        ):
            if old is None or new is None or not (was_owned and is_owned):
                result.append(new)
                continue
            old.copy_(new)
            result.append(old)
    return tuple(result)


def compute_to_keep(make: Callable[[], Any]) -> Any:
    """Compute make() without gradients, as tensors that can be trained later even if inference mode is on now."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return make()
    with torch.no_grad():
        return make()
