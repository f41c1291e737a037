"""Settings that ranks in a tensor-parallel layer must have in common, compared in its first collectives."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from .config import Config

_RANK_SPECIFIC = frozenset({"name", "tp_group_initialized"})
Entries = tuple[tuple[str, str], ...]


def public_settings(config: Config, path: str) -> Entries:
    """Names and values of public config fields. Fields with groups, streams and functions are left out."""
    return tuple(
        (f"{path}.{field.name}", repr(value))
        for field in fields(config)
        if not field.name.startswith("_") and field.name not in _RANK_SPECIFIC
        if _is_plain(value := getattr(config, field.name))
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    if is_dataclass(value):
        return all(_is_plain(getattr(value, field.name)) for field in fields(value))
    return value is None or isinstance(value, (bool, int, float, str))


def hand_down_settings(layer: torch.nn.Module, tp_size: int) -> None:
    """Store settings of a layer and its children in the configs for all its products.

    Only products communicate. A difference in another child, such as an attention's window, is
    therefore reported with the next product. The stored settings are the constructor's.
    """
    if tp_size == 1:
        return
    kind = type(layer).__name__
    modules = [
        (f"{kind}.{name}" if name else kind, module) for name, module in layer.named_modules()
    ]
    configs = [(path, module, module.__dict__.get("_config")) for path, module in modules]
    entries: Entries = ()
    for path, module, config in configs:
        if isinstance(config, Config):
            entries += public_settings(config, path)
        elif hasattr(module, "drop_prob"):
            entries += ((f"{path}.drop_prob", repr(module.drop_prob)),)
    for _, module, config in configs:
        if isinstance(config, Config) and hasattr(config, "_layer"):
            module.__dict__["_config"] = replace(config, _layer=entries)
