"""Which kernels of an attention block and an MLP are adapted with low rank."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.checks import described
from ...common.warning import warn_once


@dataclass(frozen=True)
class LoRAScope:
    """One switch for the projections of query, key and value, for that of the output, and for the MLP."""

    qkv_proj: bool = False
    output_proj: bool = False
    mlp: bool = False


_SCOPES = {
    "none": LoRAScope(),
    "all": LoRAScope(True, True, True),
    "qkv_proj": LoRAScope(qkv_proj=True),
    "output_proj": LoRAScope(output_proj=True),
    "mlp": LoRAScope(mlp=True),
    "exclude_qkv_proj": LoRAScope(False, True, True),
    "exclude_output_proj": LoRAScope(True, False, True),
    "exclude_mlp": LoRAScope(True, True, False),
}


def _canonicalize_lora_scope(scope: str | None) -> LoRAScope:
    """Return the switches of a scope's name; None is "none", and so is an unknown scope, with a warning."""
    name = "none" if scope is None else str(scope).lower()
    if name not in _SCOPES:
        warn_once(
            "low_rank_adaptation_scope",
            f"low_rank_adaptation_scope={described(scope)} is unknown and adapts nothing; known scopes are "
            f"{', '.join(_SCOPES)}",
            stacklevel=4,
        )
        return LoRAScope()
    return _SCOPES[name]
