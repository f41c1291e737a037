"""FORMATS[name]: every file in this folder defines its formats' rows (`ROWS`)."""

from __future__ import annotations

from .....common.folder import import_modules
from ..spec import FormatRow

FORMATS: dict[str, FormatRow] = {
    row.format.name: row
    for module in import_modules(__name__, __path__)
    for row in module.FORMAT_ROWS
}
