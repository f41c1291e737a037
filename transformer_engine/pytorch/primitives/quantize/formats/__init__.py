"""FORMATS[name]: every file in this folder gives the rows for its formats; the folder is the table."""

from __future__ import annotations

from .....common.folder import import_modules
from ..format_row import FormatRow

FORMATS: dict[str, FormatRow] = {}


def register(row: FormatRow) -> None:
    """Register one more format with the code that serves every format."""
    FORMATS[row.format.name] = row


def unregister(name: str) -> None:
    """Forget a format."""
    del FORMATS[name]


for _module in import_modules(__name__, __path__):
    for _row in _module.FORMAT_ROWS:
        register(_row)
