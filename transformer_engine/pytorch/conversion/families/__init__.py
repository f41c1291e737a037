"""FAMILIES[model_type]: every file of this folder gives the row of one family of checkpoints."""

from __future__ import annotations

from ....common.folder import modules_of
from .family import Family

FAMILIES: dict[str, Family] = {}
for _module in modules_of(__name__, __path__):
    if hasattr(_module, "FAMILY"):
        FAMILIES[_module.FAMILY.model_type] = _module.FAMILY


def family_named(model_type: object) -> Family:
    """The row of a checkpoint's model_type; ValueError lists those there are."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise ValueError(
        f"model_type {model_type!r} has no table of names; those that have: {', '.join(sorted(FAMILIES))}"
    )
