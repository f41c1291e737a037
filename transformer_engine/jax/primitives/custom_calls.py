"""NVTE_JAX_CUSTOM_CALLS: which kernels are switched off, by the original's names of primitives."""

from __future__ import annotations

from ...common import env
from ...common.checks import switch as check_switch

_VARIABLE = "NVTE_JAX_CUSTOM_CALLS"
_said: dict[str, bool] = {}  # by `switch`, for this process


def switch(primitive: str, on: bool) -> None:
    """Use kernels of that name, or do not, whatever the environment says."""
    check_switch("enabled", on)
    _said[primitive] = bool(on)


def switched_off(primitive: str) -> str | None:
    """Why kernels of that name are not used: "false" for all, or "Name=false,Other=true"; None: nobody said so."""
    if primitive in _said:
        return None if _said[primitive] else f"{primitive}.set_enabled(False) was called"
    value = str(env.get(_VARIABLE) or "true")
    if "=" not in value:
        return f"{_VARIABLE}={value}" if not _truth(value) else None
    for entry in value.split(","):
        name, separator, said = entry.partition("=")
        if not separator:
            raise ValueError(
                f"{_VARIABLE}={value!r}: {entry!r} is no Name=true or Name=false; separate them by ','"
            )
        off = not _truth(said)
        if off and name.strip() == primitive:
            return f"{_VARIABLE} sets {primitive}=false"
    return None


def _truth(word: str) -> bool:
    word = word.strip().lower()
    if word not in ("true", "false", "1", "0"):
        raise ValueError(f"{_VARIABLE}: {word!r} is neither true nor false; say one of them")
    return word in ("true", "1")
