"""last_choice["use_fused_attention"] and similar keys: the backend used by the last attention call in this process.

The values follow NVIDIA's dictionary with that name, computed when they are read: a call
stores two references only. Calls inside compiled code store none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...functions.attention import fp8_cudnn
from ...functions.attention.fp8 import RecomputedFP8Attention
from ...functions.attention.fp8_attention import FP8Attention
from ...primitives.attention.call import AttentionCall
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
    """The last choice as a mapping; all values are None before the first call.

    Attributes:
        seen: Begins with the last call and its backend or FP8 attention.
        renewals: How often a new choice was requested for all layers; part of the keys of their plans.
    """

    def __init__(self) -> None:
        self.seen: tuple[Any, ...] | None = None
        self.renewals = 0
        # `seen` when the new choice was requested; None: not requested.
        self._requested_after: Any = None
        self._described: tuple[Any, ...] | None = None
        self._values: dict[str, Any] = dict.fromkeys(_KEYS)

    @property
    def requires_update(self) -> bool:
        """Value of ["backend_selection_requires_update"]: True until the next call of a layer.

        All layers then choose again. Changed NVTE_* variables take effect without it.
        """
        return self._requested_after is not None and self._requested_after[0] is self.seen

    def __getitem__(self, key: str) -> Any:
        return self.requires_update if key == _UPDATE else self._current()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        """Write any key; the next call that differs from the last one overwrites all keys but the flag."""
        if key == _UPDATE:
            self.renewals += bool(value)
            self._requested_after = (self.seen,) if value else None
        else:
            self._current()[key] = value

    def __iter__(self) -> Iterator[str]:
        return iter((*_KEYS, _UPDATE))

    def __len__(self) -> int:
        return len(_KEYS) + 1

    def _current(self) -> dict[str, Any]:
        last = self.seen
        if last is not None and last is not self._described:
            self._values, self._described = _description(*last[:2]), last
        return self._values


def _description(call: AttentionCall, chosen: Any) -> dict[str, Any]:
    kind = NVTE_Fused_Attn_Backend
    if isinstance(chosen, RecomputedFP8Attention):
        chosen = chosen.attention
    if isinstance(chosen, FP8Attention):
        fused = kind.NVTE_FP8 if chosen.passes.forward is fp8_cudnn.forward else None
        flash, unfused = None, fused is None
    else:
        flash = FLASH[chosen.name]() if chosen.name in FLASH else None
        unfused = chosen.name == "reference"
        fused = None if unfused or chosen.name in FLASH else kind.NVTE_F16_arbitrary_seqlen
    is_flash = not unfused and fused is None
    params = AttentionParams.of(call, fp8=isinstance(chosen, FP8Attention))
    return dict(
        zip(_KEYS, (params, is_flash, flash, fused is not None, fused, unfused), strict=True)
    )


last_choice = LastChoice()
