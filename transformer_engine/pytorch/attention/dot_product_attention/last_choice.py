"""last_choice["use_fused_attention"] and the like: what the last attention call of this process was computed by.

A view in the terms of the original's dictionary of that name, made when somebody reads it: a call leaves a note of
two references only. Calls inside compiled code leave none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...functions.attention import fp8, fp8_cudnn
from ...primitives.attention.request import AttentionRequest
from .utils import FLASH, AttentionParams, NVTE_Fused_Attn_Backend

_KEYS = (
    "attention_params",
    "use_flash_attention",
    "flash_attention_backend",
    "use_fused_attention",
    "fused_attention_backend",
    "use_unfused_attention",
)
_UPDATE = "backend_selection_requires_update"


class LastChoice(Mapping[str, Any]):
    """Reads as the last choice; None everywhere before the first.

    seen              begins with the request of the last call, and the backend or the FP8 attention that took it
    requires_update   ["backend_selection_requires_update"]: the next call of a layer that finds it set has all layers
                      choose again, and clears it. NVTE_* variables are looked at without it
    """

    def __init__(self) -> None:
        self.seen: tuple[Any, ...] | None = None
        self.requires_update = False
        self._renewals = 0
        self._described: tuple[Any, ...] | None = None
        self._values: dict[str, Any] = dict.fromkeys(_KEYS)

    @property
    def renewed(self) -> int:
        """How often all layers were to choose again: a part of what they remember their choices by."""
        if self.requires_update:
            self._renewals += 1
            self.requires_update = False
        return self._renewals

    def __getitem__(self, key: str) -> Any:
        return self.requires_update if key == _UPDATE else self._current()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        """Any key may be written; the next call that differs from the last writes all but the flag again."""
        if key == _UPDATE:
            self.requires_update = bool(value)
        else:
            self._current()[key] = value

    def __iter__(self) -> Iterator[str]:
        return iter((*_KEYS, _UPDATE))

    def __len__(self) -> int:
        return len(_KEYS) + 1

    def _current(self) -> dict[str, Any]:
        seen = self.seen
        if seen is not None and seen is not self._described:
            self._values, self._described = _description(*seen[:2]), seen
        return self._values


def _description(request: AttentionRequest, chosen: Any) -> dict[str, Any]:
    kind = NVTE_Fused_Attn_Backend
    if isinstance(chosen, fp8.Recomputed):
        chosen = chosen.attention
    if isinstance(chosen, fp8.Attention):
        fused = kind.NVTE_FP8 if chosen.chosen.forward is fp8_cudnn.forward else None
        flash, unfused = None, fused is None
    else:
        flash = FLASH[chosen.name]() if chosen.name in FLASH else None
        unfused = chosen.name == "reference"
        fused = None if unfused or chosen.name in FLASH else kind.NVTE_F16_arbitrary_seqlen
    is_flash = not unfused and fused is None
    params = AttentionParams.of(request, fp8=isinstance(chosen, fp8.Attention))
    return dict(zip(_KEYS, (params, is_flash, flash, fused is not None, fused, unfused), strict=True))


last_choice = LastChoice()
